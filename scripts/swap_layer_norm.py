"""Put a LayerNorm of your own into a pretrained GPT-2 and see what it did to the logits.

python scripts/swap_layer_norm.py --model gpt2 --sites "h.*.ln_1"
"""

import torch
import typer
from torch import Tensor

import minigpt


class TwoPassLayerNorm(minigpt.LayerNorm):
    """The norm under study: change a line here, and see it below."""

    def standardize(self, x: Tensor) -> Tensor:
        """Each row at mean 0 and variance 1."""
        centered = x - x.mean(-1, keepdim=True)
        return centered * (centered.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def main(prompt: str = "Once upon a time", model: str = "demo", sites: str = "*") -> None:
    """Compare the logits before and after the swap, and the text that each model writes."""
    gpt2 = minigpt.from_pretrained(model)
    tokenizer = minigpt.Tokenizer.from_pretrained(model)
    input_ids = torch.tensor([tokenizer.encode(prompt)], device=gpt2.wte.weight.device)

    with torch.inference_mode():
        before = gpt2(input_ids)
        text_before = minigpt.generate(gpt2, input_ids, max_new_tokens=40)[0].tolist()
        replaced = minigpt.swap_norms(gpt2, TwoPassLayerNorm, sites)
        after = gpt2(input_ids)
        text_after = minigpt.generate(gpt2, input_ids, max_new_tokens=40)[0].tolist()

    print(f"replaced {len(replaced)} norms: {', '.join(replaced)}")
    print(
        f"largest change of a logit: {(after - before).abs().max():.3g}, of logits as large as {before.abs().max():.3g}"
    )
    print(f"before: {tokenizer.decode(text_before)}")
    print(f"after:  {tokenizer.decode(text_after)}")


if __name__ == "__main__":
    typer.run(main)
