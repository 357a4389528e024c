"""Write docs/results/attention.json: how much each head attends to the first position, and its entropy, for each norm.

python scripts/docs/attention.py CAL.TXT    # the norms are fitted on this text, at all sites of the demo
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import minigpt
from minigpt.machine import versions

NORMS = ("fused", "no_affine", "rms", "no_scale", "dyt", "hardtanh", "frozen")
RESULT = Path("docs/results/attention.json")


@torch.inference_mode()
def attention(model: Any, texts: list[list[int]]) -> dict[str, list[list[float]]]:
    """Return the share of the first position and the entropy in nats, (layers, heads) each, as means over the tokens.

    The first token, which attends to nothing else, does not count.
    """
    rows: dict[str, list[list[Tensor]]] = {name: [[] for _ in model.h] for name in ("first", "entropy")}

    def keep(layer: int, _: nn.Module, __: object, qkv: Tensor) -> None:
        q, k, _v = qkv[0].double().view(len(qkv[0]), 3, model.config.n_head, -1).permute(1, 2, 0, 3)  # each (H, T, D)
        future = torch.ones(len(qkv[0]), len(qkv[0]), dtype=torch.bool).triu(1)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1)[:, 1:]  # (H, T - 1, T)
        rows["first"][layer].append(weights[..., 0])
        rows["entropy"][layer].append(torch.special.entr(weights).sum(-1))

    hooks = [block.attn.c_attn.register_forward_hook(partial(keep, i)) for i, block in enumerate(model.h)]
    for ids in texts:
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return {
        name: [[round(x, 4) for x in torch.cat(layer, 1).mean(1).tolist()] for layer in layers]
        for name, layers in rows.items()
    }


if __name__ == "__main__":
    texts = [prompt.ids for prompt in minigpt.Original("demo", device="cpu").truth.texts.prompts]
    models = {
        name: minigpt.Recipe("demo", norm=name, fit=sys.argv[1], arithmetic="reference", device="cpu").open()[0]
        for name in NORMS
    }
    result = {"command": "python scripts/docs/attention.py cal.txt", "versions": versions(torch.device("cpu"))}
    result["before"] = attention(minigpt.from_pretrained("demo", arithmetic="reference", device="cpu"), texts)
    result["after"] = {name: attention(model, texts) for name, model in models.items()}
    RESULT.write_text(json.dumps(result) + "\n", encoding="utf-8")
