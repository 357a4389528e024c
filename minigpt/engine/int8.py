"""Weights in eight bits, so that decoding reads a quarter of them; everything else stays as exact as it was.

C embedding, V vocabulary, R rows: every token of a batch is one.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from minigpt.choices import check_quantize
from minigpt.engine import kernel
from minigpt.engine.kernel import BLOCK, PANEL, StepKernel
from minigpt.engine.parts import FastGPT2, affine_layers, head_rows
from minigpt.errors import ConfigError, kind_of
from minigpt.model import GPT2
from minigpt.model.gpt2 import check_gpt2

MOST = 127  # the largest weight: both signs have as many steps
ORDER = [0, 2, 1, 3]  # of the four inputs that lie together; it is its own inverse
AT_ONCE = 4096  # outputs rounded at a time, so that it takes little memory
CACHED_BYTES = 64 << 20  # of weights that are fast to read, so that drafts save nothing
SCALES = 4 * PANEL  # bytes of a block's scales, which are float32


class Int8Linear(nn.Module):
    """``y = x W^T + b`` with ``W`` as integers of -127 to 127, each 64 of a row times a scale of their own.

    The kernel rounds an input row by blocks too, to 16 bits. Without
    the kernel the weights are widened for each product, which gives the same numbers slowly.

    Args:
        rows: (out, in), the weight of ``F.linear``.
        bias: (out), or None.

    Raises:
        ConfigError: if a weight is not finite.
    """

    panels: UInt8[Tensor, "panels blocks bytes"]

    def __init__(self, rows: Float[Tensor, "out inp"], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias, self.shape = bias, tuple(rows.shape)
        self.panels = panels_of(rows.detach())

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        rows = x.reshape(-1, x.shape[-1]).float()
        y = torch.ops.minigpt.int8_product(rows, self.panels, self.shape[0])  # (R, out)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return "{1}, {0}, int8".format(*self.shape)


def panels_of(rows: Float[Tensor, "out inp"]) -> UInt8[Tensor, "panels blocks bytes"]:
    """Return a weight in eight bits as ``kernel.c`` reads it: 16 outputs at a time, blocks of 64 inputs, zeros behind.

    Raises:
        ConfigError: if a value is not finite.
    """
    count, blocks = -(-len(rows) // PANEL), -(-rows.shape[1] // BLOCK)
    panels = torch.empty(count, blocks, SCALES + PANEL * BLOCK, dtype=torch.uint8, device="cpu")
    if kernel.is_at_hand() and rows.dtype in kernel.ROWS:
        kernel.int8_panels(rows, panels)
    else:
        for some, place in zip(rows.split(AT_ONCE), panels.split(AT_ONCE // PANEL), strict=True):
            _round(some, place)
    if not panels[..., :SCALES].contiguous().view(torch.float32).isfinite().all():
        raise ConfigError("weights must be finite to be quantized, got NaN or infinity")
    return panels


def _round(rows: Float[Tensor, "out inp"], panels: UInt8[Tensor, "panels blocks bytes"]) -> None:
    count, blocks, _ = panels.shape
    padded = F.pad(rows.float(), (0, blocks * BLOCK - rows.shape[1], 0, count * PANEL - len(rows)))
    padded = padded.view(count, PANEL, blocks, BLOCK)
    scales = padded.abs().amax(-1) / MOST  # (panels, 16, blocks)
    steps = scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    whole = (padded / steps).round_().to(torch.int8).unflatten(-1, (-1, 4))[..., ORDER]  # (panels, 16, blocks, 16, 4)
    panels[..., :SCALES] = scales.transpose(1, 2).contiguous().view(torch.uint8)
    panels[..., SCALES:] = whole.permute(0, 2, 3, 1, 4).flatten(2).view(torch.uint8)


def rows_of(panels: UInt8[Tensor, "panels blocks bytes"]) -> Float[Tensor, "out inp"]:
    """Return the values of ``panels_of``, its zeros included."""
    whole = panels[..., SCALES:].view(torch.int8).unflatten(-1, (-1, PANEL, 4))[..., ORDER]
    scales = panels[..., :SCALES].contiguous().view(torch.float32)  # (panels, blocks, 16)
    values = whole * scales[:, :, None, :, None]  # (panels, blocks, 16, 16, 4)
    return values.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1).flatten(1)


torch.library.define("minigpt::int8_product", "(Tensor x, Tensor panels, int out) -> Tensor")


@torch.library.impl("minigpt::int8_product", "cpu")
def _int8_product(x: Tensor, panels: Tensor, out: int) -> Tensor:
    if kernel.is_at_hand():
        return kernel.int8_product(x, panels, out)
    some = AT_ONCE // PANEL
    pieces = [F.linear(x, rows_of(part)[:, : x.shape[1]]) for part in panels.split(some)]
    return torch.cat(pieces, dim=1)[:, :out].contiguous()


@torch.library.register_fake("minigpt::int8_product")
def _int8_product_shape(x: Tensor, panels: Tensor, out: int) -> Tensor:
    return x.new_empty(len(x), out)


@torch.no_grad()
def quantize_int8(model: GPT2) -> GPT2:
    """Put an ``Int8Linear`` in place of every affine layer and the head; return ``model``.

    Embeddings, norms and biases stay as they are. The model is for inference then: the weights of the checkpoint are
    gone. A layer with hooks, or with a forward of somebody else's, stays as it is.

    Raises:
        ConfigError: if the model is not a GPT2 on the CPU in "fast" arithmetic, is quantized already, or has a weight
            that is not finite.
    """
    check_gpt2(model)
    check_quantize("int8", model.arithmetic)
    if not isinstance(model, FastGPT2):
        raise ConfigError(f"model must be what minigpt.engine.accelerate returns, got a {kind_of(model)}")
    if model.quantize is not None:
        raise ConfigError("the model is quantized already")
    if not model.wte.weight.is_cpu:
        raise ConfigError(f"weights of eight bits are for the CPU, got {model.wte.weight.device}")
    model.add_module("lm_head", Int8Linear(head_rows(model), None).train(model.training))
    for name in affine_layers(model):
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, Int8Linear(layer.weight.t(), layer.bias).train(layer.training))
    return model.requires_grad_(False)


def drafter_of(model: GPT2) -> StepKernel:
    """Return the kernel of a model with its matrices in eight bits; everything else is the model's own.

    The rounded matrices are kept as long as the model's weights, and made again if a weight is changed in place, or its
    data replaced.

    Raises:
        ConfigError: if the kernel does not serve the model, or its weights are int8 or not finite.
    """
    reason = "the model is int8 itself" if model.quantize else kernel.why_not(model)
    if reason:
        raise ConfigError(f'draft="int8" needs a model in float32 or bfloat16 and the decoding kernel: {reason}')
    return StepKernel(model, _kept_panels)


def why_not_drafted(model: GPT2) -> str | None:
    """Return why drafts in int8 would not pay for this model, or None if they would."""
    if getattr(model, "quantize", None):
        return "the model is int8 itself"
    if sum(parameter.nbytes for parameter in model.parameters()) <= CACHED_BYTES:
        return f"the weights take at most {CACHED_BYTES >> 20} MiB, which a processor's cache holds"
    return kernel.why_not(model)


_panels: MutableMapping[Tensor, tuple[Any, Tensor]] = WeakTensorKeyDictionary()  # of a weight: its state, its panels


def _kept_panels(weight: Tensor, by_rows: bool) -> Tensor:
    state = (0 if weight.is_inference() else weight._version), weight.data_ptr(), weight.shape
    kept = _panels.get(weight)
    if kept is None or kept[0] != state:
        rows = weight.detach() if by_rows else weight.detach().t()
        kept = _panels[weight] = state, panels_of(rows)
    return kept[1]
