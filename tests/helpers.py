"""What test files share: transformers and our model on the same random weights, errors beside their bounds."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import minigpt
from minigpt.engine import accelerate, kernel, quantize_int8
from minigpt.machine import HAS_ONEDNN
from minigpt.model.mlp import Conv1D

SMALL = {
    "vocab_size": 83, "n_positions": 128, "n_embd": 48, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


ODD: dict[str, Any] = {"vocab_size": 257, "n_positions": 40, "n_embd": 33, "n_head": 1}
WIDE: dict[str, Any] = {"vocab_size": 100, "n_positions": 70, "n_embd": 132, "n_head": 3, "n_inner": 77}
assert "other sources" not in str(kernel.load()), f"{kernel.load()}: no test of the kernel would run"
needs_kernel = pytest.mark.skipif(not kernel.is_at_hand(), reason="the kernel was not built, or is turned off")
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this PyTorch has no oneDNN")


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0, *, std: float = 0.15, vector_std: float = 0.3) -> None:
    """Every parameter random and none symmetric: the norms' scales around 1, all biases off 0.

    Matrices are wide enough for attention to be far from uniform, so that a wrong mask or scale shows.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0
        parameter.normal_(mean, vector_std if parameter.ndim == 1 else std, generator=generator)


def reference_model(
    *, attention: str = "sdpa", dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **fields: Any
) -> GPT2LMHeadModel:
    """transformers' GPT-2 with random weights rounded to ``dtype``, in eval mode."""
    model = GPT2LMHeadModel(GPT2Config(**SMALL | fields, attn_implementation=attention))
    randomize(model)
    return model.eval().to(device, dtype)


def small_model(
    norm: Any = "fused", *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    attention: str = "sdpa", arithmetic: str = "fast", **fields: Any,
) -> minigpt.GPT2:  # fmt: skip
    """Our GPT-2 with random weights, in eval mode."""
    config = minigpt.GPT2Config(**SMALL | fields)
    model = minigpt.GPT2(config, norm=norm, attention=attention)
    if arithmetic == "fast":
        accelerate(model)
    randomize(model)
    return model.eval().to(device, dtype)


def model_of(kind: str, by_rows: bool = False, **shape: Any) -> Any:
    """Return a small model in a dtype or in int8; with ``by_rows`` its weights lie as those of ``nn.Linear``."""
    model = small_model(dtype=getattr(torch, kind.replace("int8", "float32")), **shape)
    if by_rows:
        for name, part in model.named_modules():
            if name.endswith(("c_attn", "c_fc", "c_proj")):
                part.weight.data = part.weight.data.t().contiguous().t()  # type: ignore[union-attr]
    return quantize_int8(model) if kind == "int8" else model


def same_weights(reference: GPT2LMHeadModel, arithmetic: str = "fast", **how: Any) -> minigpt.GPT2:
    """Our model of the reference's config, attention and weights, every one of them written; eval mode."""
    config = minigpt.GPT2Config.from_dict(reference.config.to_dict())
    model = minigpt.GPT2(config, attention=reference.config._attn_implementation, **how)
    if arithmetic == "fast":
        accelerate(model)
    weights = {name.removeprefix("transformer."): tensor for name, tensor in reference.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    model.to(reference.device, reference.dtype).load_state_dict(weights, strict=True)
    return model.eval()


def in_float64(reference: GPT2LMHeadModel, **fields: Any) -> GPT2LMHeadModel:
    """The same weights, as they are rounded, computed with in float64: the truth."""
    truth = GPT2LMHeadModel(GPT2Config(**reference.config.to_dict() | fields, attn_implementation="eager"))
    truth.load_state_dict(reference.state_dict())
    return truth.eval().to(reference.device, torch.float64)


def random_ids(batch: int, seq: int, *, vocab: int = SMALL["vocab_size"], device: torch.device | str = "cpu") -> Tensor:
    """Token ids (batch, seq)."""
    return torch.randint(vocab, (batch, seq)).to(device)


def left_padding(lengths: Iterable[int], total: int, device: torch.device | str = "cpu") -> Tensor:
    """Attention mask (rows, total): 0 for padding, then 1 for each row's ``lengths`` tokens."""
    return torch.tensor([[0] * (total - length) + [1] * length for length in lengths], device=device)


def true_positions(mask: Tensor) -> Tensor:
    """position_ids as transformers' own ``generate`` makes them of a mask; on padding they are not compared."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


class LouderConv1D(Conv1D):
    """An affine layer of somebody's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def make_louder(module: Any) -> None:
    """Give it a forward of its own, as those do who patch a model."""
    inner = module.forward
    module.forward = lambda *supplied: 2 * inner(*supplied)


def rms(x: Tensor) -> float:
    """Root mean square, in float64."""
    return x.double().square().mean().sqrt().item()


def max_abs(x: Tensor) -> float:
    """Largest magnitude; 0 for an empty tensor, NaN where there is one."""
    return x.double().abs().max().item() if x.numel() else 0.0


def assert_within(error: float, bound: float, scale: float, what: str) -> None:
    """Print the measured error beside its bound and the size of what was measured, and hold it to the bound."""
    print(f"{what}: error {error:.3g}, bound {bound:.3g}, scale {scale:.3g}")
    assert error <= bound, f"{what}: error {error:.3g} is over its bound {bound:.3g} (scale {scale:.3g})"


def assert_close(supplied: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """The largest difference is at most ``tolerance`` times the largest magnitude of ``wanted``."""
    scale = max_abs(expected)
    assert supplied.shape == expected.shape, f"{what}: {tuple(supplied.shape)}, not {tuple(expected.shape)}"
    assert_within(max_abs(supplied.double() - expected.double()), tolerance * scale, scale, what)


def assert_same_bits(supplied: Tensor, expected: Tensor, what: str) -> None:
    """Maximum difference exactly 0, in the same dtype and shape, and all of it finite."""
    assert (supplied.dtype, supplied.shape) == (expected.dtype, expected.shape)
    assert expected.isfinite().all(), f"{what}: the reference is not finite"
    assert_within(max_abs(supplied.double() - expected.double()), 0.0, max_abs(expected), what)


def chunks(length: int, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """(start, stop) of the pieces into which the cuts divide range(length)."""
    return list(itertools.pairwise([0, *sorted({cut for cut in cuts if 0 < cut < length}), length]))
