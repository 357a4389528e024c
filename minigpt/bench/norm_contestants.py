"""Who is timed: how each is made, and why somebody is absent."""

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
    """Random scale and shift, the same for every contestant."""
    module: Any = norms.build(make, width)
    generator = torch.Generator().manual_seed(width)
    with torch.no_grad():
        for parameter in (module.weight, module.bias):
            parameter.copy_(torch.randn(width, generator=generator) + 0.5)
    return module.to(device, dtype)


def present(contestants: list[str], device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """How to make each, and why those that cannot run here are not among them."""
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
    """Compiled gradients can be taken again and again; and a compiler that gives up says so, and is not timed."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    with functorch.patch(donated_buffer=False), dynamo.patch(fail_on_recompile_limit_hit=True, recompile_limit=32):
        yield


class Compiled(norms.LayerNorm):
    """The textbook's formula, through torch.compile: once for every number of rows, and anew for every width.

    Left to itself, the compiler counts widths and numbers of rows together, and past eight of them runs the formula as
    it stands, so that something else would be timed under its name.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(normalized_shape, eps, bias)
        torch.compiler.reset()
        self.forward = torch.compile(super().forward, dynamic=True)


def in_float64(module: Any) -> nn.Module:
    """The library's norm with the same numbers: the truth."""
    truth: Any = norms.build("fused", tuple(module.weight.shape)).to(module.weight.device, torch.float64)
    with torch.no_grad():
        truth.weight.copy_(module.weight)
        truth.bias.copy_(module.bias)
    return truth
