"""Arithmetic of other programs, by their documentation or source: what they round before they multiply.

Each is put into a model of transformers. Functions of PyTorch are caught as they are called, so no module is replaced.

B batch, H heads, T tokens, S tokens in all, D width of a head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minigpt.engines.engine import load_package
from minigpt.judge.mistakes.mistake import Put, Swaps, as_given
from minigpt.judge.mistakes.rounding import Rounds, int8, int8_scale, to_bfloat16, to_float16

MOST_TABLE = 10.0  # GGML's table of GELU holds the numbers between this and its negative


def q8_k(x: Tensor) -> Tensor:
    """Round rows as GGML's quantize_row_q8_K_ref does: 256 numbers share a scale, and the largest becomes -127."""
    blocks = x.float().unflatten(-1, (-1, 256))
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    inverse = torch.where(extreme != 0, -127 / extreme, 0.0)
    scale = torch.where(extreme != 0, 1 / inverse, 0.0)
    return ((blocks * inverse).round().clamp(max=127) * scale).flatten(-2).to(x.dtype)


def rounded_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Return what GGML's Q4_1 and Q5_1 add to a product: a block's least weight is multiplied by a sum in float16.

    Args:
        weight: (out, in); of each 32 neighbours the least is the number that the file keeps.
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    sums = (blocks * inverse[..., None]).round().sum(-1)
    off = to_float16(sums * scale) - sums * to_float16(scale)
    return off.to(x.dtype) @ weight.unflatten(-1, (-1, 32)).amin(-1).mT


def in_groups(x: Tensor, size: int) -> Tensor:
    """Round rows to int8 as OpenVINO and onnxruntime's MatMulNBits do: so many neighbours share a scale."""
    return int8(x.float().unflatten(-1, (-1, size)), dim=-1).flatten(-2).to(x.dtype)


class InUint8(NamedTuple):
    """Rows in integers from 0 to 255: each number is ``(steps - zero) * scale``."""

    steps: Tensor
    zero: Tensor | int
    scale: Tensor

    @classmethod
    def by_row(cls, x: Tensor) -> "InUint8":
        """Round as CTranslate2 does: a row's scale is its largest number / 127. oneDNN adds 128."""
        scale = int8_scale(x.float())
        steps = (x.float() / scale).round()
        return cls(steps + 128, 128, scale)

    @classmethod
    def by_tensor(cls, x: Tensor) -> "InUint8":
        """Round as ONNX's DynamicQuantizeLinear does: all rows of all tokens share a scale and a zero point."""
        single = x.float()
        least, most = single.amin().clamp(max=0), single.amax().clamp(min=0)
        scale = ((most - least) / 255).clamp(min=torch.finfo(torch.float32).tiny)
        zero = (-least / scale).round().clamp(0, 255)
        steps = (single / scale).round() + zero
        return cls(steps.clamp(0, 255), zero, scale)


def through_uint8(x: Tensor, into: Callable[[Tensor], InUint8]) -> Tensor:
    steps, zero, scale = into(x)
    return (steps - zero).mul(scale).to(x.dtype)


def clipped_sums(x: Tensor, weight: Tensor, into: Callable[[Tensor], InUint8], one_scale: bool) -> Tensor:
    """Return what a product of integers gains where VPMADDUBSW adds two neighbours, and clips the sum to 16 bits.

    Args:
        weight: (out, in), integers from -127 to 127 with a scale for each row.
        one_scale: whether all rows share it.
    """
    steps, _, scale = into(x)
    scales = int8_scale(weight.float())
    if one_scale:
        scales = scales.amax(0, keepdim=True)
    integers = (weight.float() / scales).round()
    gained = torch.zeros(())
    for two, others in zip(steps.split(2, -1), integers.split(2, -1), strict=True):
        sums = two @ others.T
        gained = gained + sums.clamp(-(2**15), 2**15 - 1) - sums
    return (gained * scale * scales.T).to(x.dtype)


def as_ggml(x: Tensor, kind: str) -> Tensor:
    """Round rows to a type of GGML, as the package gguf does."""
    gguf = load_package("gguf", "gguf")
    to = gguf.GGMLQuantizationType[kind]
    stored = gguf.quantize(x.float().numpy(), to)
    return torch.from_numpy(gguf.dequantize(stored, to)).to(x.dtype)


# Where a program rounds


class Instead(TorchFunctionMode):
    """Calls other functions in place of PyTorch's.

    Args:
        functions: the others, by PyTorch's.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


class InputRounding(NamedTuple):
    """A rounding of what a weight is multiplied with.

    Attributes:
        words: a noun phrase.
        rounds: rounds rows.
        adds: of the rows and the weight (out, in), what is added to their product.
    """

    words: str
    rounds: Rounds
    adds: Callable[[Tensor, Tensor], Tensor] | None = None


def inputs_rounded(roundings: Mapping[str, InputRounding]) -> Put:
    """Return what rounds the inputs of products.

    Args:
        roundings: by the name of the weight, without what a model of transformers has before it.
    """

    def put(model: nn.Module, swaps: Swaps) -> None:
        by_weight: dict[int, InputRounding] = {}  # by its place in memory, which views of it have too
        for name, parameter in model.named_parameters():
            rounding = roundings.get(name.removeprefix("transformer."))
            if rounding is not None:
                by_weight[parameter.data_ptr()] = rounding

        def multiply(func: Callable[..., Tensor], place: int, *args: Any, **options: Any) -> Tensor:
            x, weight = args[place : place + 2]
            rounding = by_weight.get(weight.data_ptr())
            if rounding is None:
                return func(*args, **options)
            y = func(*args[:place], rounding.rounds(x), *args[place + 1 :], **options)
            if rounding.adds is not None:
                y = y + rounding.adds(x, weight.T if func is torch.addmm else weight)
            return y

        places = {F.linear: 0, torch.addmm: 1}  # of the input, behind which the weight is
        swaps.enter_context(Instead({func: partial(multiply, func, place) for func, place in places.items()}))

    return put


Weigh = Callable[[Tensor, Tensor], Tensor]  # of scores with a mask (B, H, T, S) and values (B, H, S, D)


def weigh(scores: Tensor, v: Tensor, scored: Rounds = as_given, weighted: Rounds = as_given) -> Tensor:
    """Return softmax(scores) v, with rounded scores and attention weights."""
    return weighted(scored(scores).softmax(-1)) @ v


def sum_in_float16(scores: Tensor, v: Tensor, tile: int) -> Tensor:
    """Return softmax(scores) v as GGML's flash attention adds it up: token by token, texts of a tile in float32."""
    if scores.shape[-2] >= tile:
        return weigh(scores, v)
    largest = torch.full_like(scores[..., :1], -torch.inf)
    total, y = torch.zeros_like(largest), torch.zeros(())
    for score, value in zip(scores.split(1, -1), v.split(1, -2), strict=True):
        before = largest
        largest = before.maximum(score)
        kept = (before - largest).exp()
        weight = (score - largest).exp()
        y = to_float16(y * kept)
        y = to_float16(y + weight * value)
        total = total * kept + weight
    return y / total


def turned(x: Tensor, width: int) -> Tensor:
    """Multiply so many neighbours by a Hadamard matrix of rows of length 1, which is its own inverse."""
    turn = x.new_ones(1, 1)
    while len(turn) < width:
        turn = torch.kron(turn.new_tensor([[1, 1], [1, -1]]), turn)
    return (x.unflatten(-1, (-1, width)) @ turn).flatten(-2) * width**-0.5


def attention_rounded(
    queries: InputRounding | None = None,
    keys: Rounds = as_given,
    values: Rounds = as_given,
    mix: Weigh = weigh,
    turn_keys: Rounds = as_given,
    turn_values: Rounds = as_given,
) -> Put:
    """Return what rounds the factors of attention, as a cache in a narrower format does.

    Args:
        turn_keys: is done to queries and keys first; turn_values: to values, and to what they give, as its own inverse.
    """
    of_queries = queries or InputRounding("", as_given)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return softmax(scale * q k^T + mask) v, (B, H, T, D), with rounded factors."""
        groups = q.shape[1] // k.shape[1]
        q, k = turn_keys(q), keys(turn_keys(k.repeat_interleave(groups, 1)))
        v = values(turn_values(v.repeat_interleave(groups, 1)))
        scores = of_queries.rounds(q) @ k.mT  # (B, H, T, S)
        if of_queries.adds is not None:
            scores = scores + of_queries.adds(q, k)
        scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return turn_values(mix(scores, v))

    def put(model: nn.Module, swaps: Swaps) -> None:
        swaps.enter_context(Instead({F.scaled_dot_product_attention: attend}))

    return put


def scaled_in_bfloat16(x: Tensor, power: float) -> Tensor:
    """Round rows of a head, and again what a power of their width makes of them."""
    scale = x.shape[-1] ** power
    return to_bfloat16(to_bfloat16(x) * scale) / scale


def in_bfloat16(is_fused: bool) -> Put:
    """Return what rounds all that a GPT-2's operators give to bfloat16, as OpenVINO's graph does.

    A GELU belongs to the product before it. A norm rounds before its scale and shift too.

    Args:
        is_fused: whether attention is one operator, whose scores stay in float32.
    """
    if is_fused:
        mix = partial(weigh, weighted=to_bfloat16)
        queries, keys = to_bfloat16, partial(scaled_in_bfloat16, power=-0.5)
    else:
        mix = partial(weigh, scored=to_bfloat16, weighted=to_bfloat16)
        queries = keys = partial(scaled_in_bfloat16, power=-0.25)

    def call(func: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        factors = list[Any]()
        for x in args:
            if isinstance(x, Tensor) and x.is_floating_point():
                x = to_bfloat16(x)
            factors.append(x)
        return func(*factors, **options)

    def norm(
        x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        y = F.layer_norm(to_bfloat16(x), shape, None, None, eps)
        y = to_bfloat16(y)
        if weight is not None:
            y = y * weight
        return y if bias is None else y + bias

    def whole(gelu: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return gelu(x)

    def put(model: nn.Module, swaps: Swaps) -> None:
        for module, name in gelus(model):
            swaps.set(module, name, partial(whole, getattr(module, name)))
        functions = {func: partial(call, func) for func in (F.linear, torch.addmm, Tensor.add)}
        swaps.enter_context(Instead({F.layer_norm: norm, **functions}))
        attention_rounded(InputRounding("", queries), keys, to_bfloat16, mix)(model, swaps)

    return put


def gelus(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that have a GELU, and the attribute that it is."""
    for module in model.modules():
        if "gelu" in type(module).__name__.lower():
            yield module, "forward"
        elif "act" in vars(module) and "gelu" in cast(Any, model.config).activation_function:
            yield module, "act"  # a function, in a model of ours


def gelu_by_table(model: nn.Module, swaps: Swaps) -> None:
    """Look GELU up in a table of float16, as GGML does."""

    def looked_up(gelu: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = to_float16(gelu(to_float16(x)))
        return torch.where(x >= MOST_TABLE, x, torch.where(x <= -MOST_TABLE, 0.0, y))

    for module, name in gelus(model):
        swaps.set(module, name, partial(looked_up, getattr(module, name)))
