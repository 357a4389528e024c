"""The same random weights in our model and in transformers', at the published shapes and with massive activations."""

from typing import Any

import torch
from bench.random_gpt2 import random_gpt2

import minigpt
from minigpt.judge.reference import quiet_transformers

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
TINY = minigpt.GPT2Config(vocab_size=211, n_positions=128, n_embd=160, n_layer=2, n_head=4)


def ours_of(size: str, device: torch.device, quick: bool) -> minigpt.GPT2:
    """Random weights at float32; of a tiny shape where it should be ``quick``."""
    return random_gpt2(TINY if quick else size, device=device)


def with_norm(weights: minigpt.GPT2, norm: str, attention: str) -> minigpt.GPT2:
    """Another model on the same tensors as ``weights``."""
    with torch.device("meta"):
        model = minigpt.GPT2(weights.config, norm=norm, attention=attention)
    model.load_state_dict(weights.state_dict(), assign=True)
    return model.eval()


def theirs_of(weights: minigpt.GPT2, attention: str, dtype: torch.dtype | None = None) -> Any:
    """transformers' model of the same weights, which it then computes with in ``dtype``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    fields: Any = weights.config.to_dict() | {"attn_implementation": attention}
    with quiet_transformers(), weights.wte.weight.device:
        model: Any = GPT2LMHeadModel(GPT2Config(**fields))
    model.to(dtype or weights.wte.weight.dtype)
    named = {f"transformer.{name}": tensor for name, tensor in weights.state_dict().items()}
    missing, foreign = model.load_state_dict(named, strict=False)
    assert (missing, foreign) == (["lm_head.weight"], []), "the two have other parameters"
    return model.eval()


def known_norms(names: tuple[str, ...], device: torch.device) -> list[str]:
    """Those of the norms that can run there."""
    return [name for name in names if minigpt.norms.available()[name].reason_on(device) is None]


def finish(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
