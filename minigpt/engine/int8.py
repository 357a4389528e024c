"""Weights in eight bits, so that decoding reads a quarter of them; everything else stays as exact as it was.

C embedding, V vocabulary, R rows: every token of a batch is one.
"""

import time
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from minigpt.choices import check_quantize
from minigpt.engine import kernel
from minigpt.engine.parts import FastGPT2, affine_layers, arithmetic_of, head_rows, quantize_of
from minigpt.engine.snapshot import version_of
from minigpt.engine.step import StepKernel
from minigpt.engine.structs import BLOCK, PANEL, ROW_FORMS
from minigpt.engine.supported import why_not
from minigpt.errors import ConfigError, kind_of
from minigpt.inputs import check_gpt2
from minigpt.model import GPT2

CACHED_BYTES = 64 << 20  # of weights that are fast to read, so that drafts save nothing
COMMON_IDS = 8192  # that greedy drafts consist of, where the vocabulary has more than twice as many
SCALE_BYTES = 4 * PANEL  # bytes of a block's scales, which are float32


class Int8Linear(nn.Module):
    """``y = x W^T + b`` with ``W`` as integers of -127 to 127, each 64 of a row times a scale of their own.

    The kernel multiplies. It rounds an input row by blocks too, to 16 bits.

    Args:
        rows: (out, in), the weight of ``F.linear``.
        bias: (out), or None.

    Raises:
        ConfigError: if a weight is not finite.
    """

    panels: UInt8[Tensor, "panels blocks bytes"]

    def __init__(self, rows: Float[Tensor, "out inp"], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias
        self.shape = tuple(rows.shape)
        self.panels = panels_of(rows.detach())

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        rows = x.reshape(-1, x.shape[-1]).float()
        y = torch.ops.minigpt.int8_product(rows, self.panels, self.shape[0])  # (R, out)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return "{1}, {0}, int8".format(*self.shape)


def panels_of(rows: Float[Tensor, "out inp"]) -> UInt8[Tensor, "panels blocks bytes"]:
    """Return a weight in eight bits as ``kernel.c`` reads it: 16 outputs at a time, blocks of 64 inputs, zeros behind.

    Raises:
        ConfigError: if a value is not finite.
    """
    count, blocks = -(-len(rows) // PANEL), -(-rows.shape[1] // BLOCK)
    panels = torch.empty(count, blocks, SCALE_BYTES + PANEL * BLOCK, dtype=torch.uint8, device="cpu")
    if rows.dtype not in ROW_FORMS:
        rows = rows.float()
    kernel.int8_panels(rows, panels)
    scales = panels[..., :SCALE_BYTES].contiguous().view(torch.float32)
    if not scales.isfinite().all():
        raise ConfigError("weights must be finite to be quantized, got NaN or infinity")
    return panels


torch.library.define("minigpt::int8_product", "(Tensor x, Tensor panels, int out) -> Tensor")


@torch.library.impl("minigpt::int8_product", "cpu")
def _int8_product(x: Tensor, panels: Tensor, out: int) -> Tensor:
    return kernel.int8_product(x, panels, out)


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
            that is not finite; or if there is no kernel. Nothing has been changed then.
    """
    check_gpt2(model)
    check_quantize("int8", arithmetic_of(model))
    if not isinstance(model, FastGPT2):
        raise ConfigError(f"model must be what minigpt.engine.accelerate returns, got a {kind_of(model)}")
    if model.quantize is not None:
        raise ConfigError("the model is quantized already")
    if not model.wte.weight.is_cpu:
        raise ConfigError(f"weights of eight bits are for the CPU, got {model.wte.weight.device}")
    library = kernel.load()
    if isinstance(library, str):
        raise ConfigError(f'quantize="int8" needs the decoding kernel: {library}')
    _check_weight("the head", head_rows(model))
    for name in affine_layers(model):
        _check_weight(name, model.get_submodule(name).get_parameter("weight"))
    head = Int8Linear(head_rows(model), None)
    model.add_module("lm_head", head.train(model.training))
    for name in affine_layers(model):
        layer: Any = model.get_submodule(name)
        rounded = Int8Linear(layer.weight.t(), layer.bias)
        model.set_submodule(name, rounded.train(layer.training))
    return model.requires_grad_(False)


def _check_weight(name: str, weight: Tensor) -> None:
    """Check a weight before any is replaced.

    Raises:
        ConfigError: if a value is NaN, or not finite in float32.
    """
    extremes = torch.stack(torch.aminmax(weight.detach())).float()
    if not extremes.isfinite().all():
        raise ConfigError(f"weights must be finite to be quantized, got NaN or infinity in {name}")


def drafter_of(model: GPT2, is_greedy: bool = False) -> StepKernel:
    """Return the kernel of a model with its matrices in eight bits; everything else is the model's own.

    The rounded matrices are kept as long as the model's weights, and made again if a weight is changed in place, or its
    data replaced.

    Args:
        is_greedy: its head computes the logits of ``COMMON_IDS`` ids alone, of which greedy texts mostly consist.

    Raises:
        ConfigError: if the kernel does not serve the model, or its weights are int8 or not finite.
    """
    reason = why_not(model)
    if quantize_of(model):
        reason = "the model is int8 itself"
    if reason is not None:
        raise ConfigError(f'draft="int8" needs a model in float32 or bfloat16 and the decoding kernel: {reason}')
    head = None
    if is_greedy and _has_common_ids(model):
        head = _common_head(model)

    def panels(weight: Tensor, by_rows: bool) -> Tensor:
        is_head = by_rows
        if is_head and head is not None:
            return head.panels
        return _rounded(weight, by_rows).panels

    if head is None:
        return StepKernel(model, panels)
    return StepKernel(model, panels, head.ids)


def why_not_drafted(model: GPT2) -> str | None:
    """Return why drafts in int8 would not pay for this model, or None if they would where the kernel serves it."""
    if quantize_of(model):
        return "the model is int8 itself"
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if weight_bytes <= CACHED_BYTES:
        return f"the weights take at most {CACHED_BYTES >> 20} MiB, which a processor's cache holds"
    return None


def int8_share(model: GPT2, is_greedy: bool = False) -> float:
    """Return the bytes that ``drafter_of`` reads for a token, as a share of those that the model reads."""
    bytes_of_weight = 1 + SCALE_BYTES / (PANEL * BLOCK)
    share = bytes_of_weight / model.wte.weight.itemsize
    if is_greedy and _has_common_ids(model):
        head = head_rows(model)
        unread = (len(head) - COMMON_IDS) * head.shape[1]
        share *= 1 - unread / sum(parameter.numel() for parameter in model.parameters())
    return share


def rounding_seconds(model: GPT2, is_greedy: bool = False) -> float:
    """Return about how long ``drafter_of`` takes, by rounding one layer; 0 if all rounded weights are kept.

    Raises:
        ConfigError: if the kernel does not serve the model, or a weight of that layer is not finite.
    """
    reason = why_not(model)
    if reason is not None:
        raise ConfigError(reason)
    count = _count_to_round(model, is_greedy)
    if not count:
        return 0.0
    weight = model.get_parameter("h.0.attn.c_proj.weight")
    start = time.perf_counter()
    panels_of(weight.detach().t())
    seconds = time.perf_counter() - start
    return seconds * count / weight.numel()


def _count_to_round(model: GPT2, is_greedy: bool) -> int:
    """Return how many numbers ``drafter_of`` has to round, since they are not kept."""
    count = 0
    for name in affine_layers(model):
        weight = model.get_submodule(name).get_parameter("weight")
        if _cached(_matrices, weight) is None:
            count += weight.numel()
    head = head_rows(model)
    if is_greedy and _has_common_ids(model):
        if _cached(_common_heads, head, _last_shift(model)) is None:
            count += COMMON_IDS * head.shape[1]
    elif _cached(_matrices, head) is None:
        count += head.numel()
    return count


class RoundedWeight(NamedTuple):
    """A weight in eight bits, and the states of the tensors that it was made of."""

    states: object
    panels: Tensor
    ids: Int[Tensor, " ids"] | None = None  # whose rows it has; None if all


RoundedWeights = MutableMapping[Tensor, RoundedWeight]

_matrices: RoundedWeights = WeakTensorKeyDictionary()
_common_heads: RoundedWeights = WeakTensorKeyDictionary()


def _cached(rounded: RoundedWeights, weight: Tensor, shift: Tensor | None = None) -> RoundedWeight | None:
    """Return a weight in eight bits, if it is kept and what it was made of has not changed."""
    kept = rounded.get(weight)
    if kept is None or kept.states != _states(weight, shift):
        return None
    return kept


def _states(*tensors: Tensor | None) -> object:
    return [(version_of(tensor), tensor.data_ptr(), tensor.shape) for tensor in tensors if tensor is not None]


def _rounded(weight: Tensor, by_rows: bool) -> RoundedWeight:
    """Return a weight in eight bits, and keep it."""
    kept = _cached(_matrices, weight)
    if kept is None:
        rows = weight.detach()
        if not by_rows:
            rows = rows.t()
        kept = RoundedWeight(_states(weight), panels_of(rows))
        _matrices[weight] = kept
    return kept


def _has_common_ids(model: GPT2) -> bool:
    used = model.config.used_vocab_size or model.config.vocab_size
    shift = _last_shift(model)
    return used > 2 * COMMON_IDS and shift is not None and bool(shift.any())


def _last_shift(model: GPT2) -> Tensor | None:
    norm: Any = model.ln_f
    return getattr(norm, "bias", None)  # most other norms have none


def _common_head(model: GPT2) -> RoundedWeight:
    """Return the head's rows for the ids that the model adds most often, in ascending order, and keep them.

    The shift of the last norm is a part of every input of the head. Its logits follow the frequencies of the tokens in
    the training text (Kobayashi et al. 2023, arXiv 2305.18294).
    """
    weight, shift = head_rows(model), _last_shift(model)
    assert shift is not None
    kept = _cached(_common_heads, weight, shift)
    if kept is None:
        rows = weight.detach()
        logits = rows @ shift.detach().to(rows.dtype)  # (V)
        ids = logits[: model.config.used_vocab_size].topk(COMMON_IDS).indices.sort().values
        kept = RoundedWeight(_states(weight, shift), panels_of(rows[ids]), ids)
        _common_heads[weight] = kept
    return kept
