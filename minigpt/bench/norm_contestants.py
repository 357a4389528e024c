"""The norms that are timed: how to build each, and why one is left out."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minigpt import norms
from minigpt.errors import NormError

CONTESTANTS = ("torch", "compiled", "triton", "liger")


def module_of(make: norms.NormSpec, width: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a norm with random scale and shift, the same for every contestant."""
    module: Any = norms.build(make, width)
    generator = torch.Generator().manual_seed(width)
    with torch.no_grad():
        for parameter in (module.weight, module.bias):
            parameter.copy_(torch.randn(width, generator=generator) + 0.5)
    return module.to(device, dtype)


def present(contestants: list[str], device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """Return how to build each contestant, and why the others cannot run here."""
    known: dict[str, Any] = {
        "torch": "fused",
        "compiled": Compiled,
        "liger": "liger_kernel.transformers:LigerLayerNorm",
    }
    absent = {}
    if "triton" in contestants and (reason := norms.available()["triton"].reason_on(device)):
        absent["triton"] = reason
    if "liger" in contestants and importlib.util.find_spec("liger_kernel") is None:
        absent["liger"] = "needs liger_kernel: pip install liger-kernel"
    elif "liger" in contestants and device.type != "cuda":
        absent["liger"] = f"runs on CUDA, not on {device.type}"
    makers = {name: known.get(name, name) for name in contestants if name not in absent}
    if not makers:
        raise NormError(f"there is nothing to time: {'; '.join(f'{name} {why}' for name, why in absent.items())}")
    return makers, absent


@contextlib.contextmanager
def strict_compiler() -> Iterator[None]:
    """Let compiled gradients be taken repeatedly, and raise an error if the compiler gives up."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    with functorch.patch(donated_buffer=False), dynamo.patch(fail_on_recompile_limit_hit=True, recompile_limit=32):
        yield


class Compiled(norms.LayerNorm):
    """The textbook norm under torch.compile: compiled once for all numbers of rows, and again for each width.

    Without the reset, the compiler counts widths and numbers of rows together. After eight of them it runs eagerly, and
    the benchmark would time something else.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(normalized_shape, eps, bias)
        torch.compiler.reset()
        self.forward = torch.compile(super().forward, dynamic=True)


def in_float64(module: Any) -> nn.Module:
    """Return PyTorch's norm in float64 with the same weights."""
    truth: Any = norms.build("fused", tuple(module.weight.shape)).to(module.weight.device, torch.float64)
    with torch.no_grad():
        truth.weight.copy_(module.weight)
        truth.bias.copy_(module.bias)
    return truth
