"""A GPT-2 of a published size with random weights, for measurements that need the size and not the words.

python scripts/bench/random_gpt2.py ./random-gpt2 --preset gpt2 --seed 0

Its norms and biases are random too. A few dimensions of its residual stream have entries near 3,000 from the first
block on, like those of the pretrained GPT-2 (massive activations, arXiv 2402.17762). It reads and writes with the
demo's tokenizer, whose ids are few enough for any vocabulary.
"""

import dataclasses
from pathlib import Path

import torch
import typer

import minigpt

MASSIVE = {1: 3000.0, -2: -2500.0, 138: 400.0}  # dimension of the residual stream: what the first block adds to it


def random_gpt2(
    preset: str | minigpt.GPT2Config = "gpt2", seed: int = 0, device: str | torch.device = "cpu"
) -> minigpt.GPT2:
    """The model at float32, in eval mode, the same for the same seed on the same device."""
    torch.manual_seed(seed)
    config = minigpt.GPT2Config.preset(preset) if isinstance(preset, str) else preset
    with torch.device(device):
        model = minigpt.GPT2(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0, std=0.1)
        for dimension, entry in MASSIVE.items():
            if dimension < config.n_embd:  # the demo is narrower than its published kin
                model.get_parameter("h.0.mlp.c_proj.bias")[dimension] = entry
    return model


def main(folder: Path, preset: str = "gpt2", seed: int = 0) -> None:
    """Write it as a Hugging Face checkpoint into ``folder``."""
    model, tokenizer = random_gpt2(preset, seed), minigpt.Tokenizer.from_pretrained("demo")
    model.config = dataclasses.replace(model.config, used_vocab_size=tokenizer.vocab_size)  # it writes these ids alone
    minigpt.save_pretrained(model, folder, tokenizer)


if __name__ == "__main__":
    typer.run(main)
