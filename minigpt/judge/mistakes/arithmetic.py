"""Arithmetic of other programs, by their documentation or source: what they round before they multiply.

Each is put into a model of transformers. Functions of PyTorch are caught as they are called, so no module is replaced.

B batch, H heads, T tokens, S tokens in all, D width of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minigpt.judge.mistakes.mistake import Put, Swaps, as_given
from minigpt.judge.mistakes.rounding import Rounds, int8, to_float16

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
    return off.to(x.dtype) @ weight.unflatten(-1, (-1, 32)).amin(-1).T


def by_row(x: Tensor) -> Tensor:
    """Round rows to int8 as CTranslate2 does: a row's scale is its largest number / 127."""
    return int8(x.float(), dim=-1).to(x.dtype)


def in_groups(x: Tensor, size: int) -> Tensor:
    """Round rows to int8 as OpenVINO does: so many neighbours share a scale."""
    return int8(x.float().unflatten(-1, (-1, size)), dim=-1).flatten(-2).to(x.dtype)


def unsigned(x: Tensor) -> Tensor:
    """Round as ONNX's DynamicQuantizeLinear does: all rows of all tokens share a scale and a zero point in uint8."""
    single = x.float()
    least, most = single.amin().clamp(max=0), single.amax().clamp(min=0)
    scale = ((most - least) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-least / scale).round().clamp(0, 255)
    return (((single / scale).round() + zero).clamp(0, 255) - zero).mul(scale).to(x.dtype)


# Where a program rounds


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


class RoundedInputs(TorchFunctionMode):
    """Rounds what a linear layer multiplies its weight with.

    Args:
        roundings: by the ``data_ptr`` of the weight, which views of it have too.
    """

    def __init__(self, roundings: Mapping[int, InputRounding]) -> None:
        super().__init__()
        self.roundings = roundings

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = {F.linear: 0, torch.addmm: 1}.get(func)  # of the input, behind which the weight is
        rounding = None if place is None else self.roundings.get(args[place + 1].data_ptr())
        if place is None or rounding is None:
            return func(*args, **(kwargs or {}))
        x, weight = args[place], args[place + 1]
        y = func(*args[:place], rounding.rounds(x), *args[place + 1 :], **(kwargs or {}))
        if rounding.adds is not None:
            y = y + rounding.adds(x, weight.T if func is torch.addmm else weight)
        return y


class RoundedAttention(TorchFunctionMode):
    """Rounds what attention multiplies: queries and keys, attention weights and values.

    Args:
        keys: rounds queries and keys; values: rounds values; weights: rounds attention weights.
    """

    def __init__(self, keys: Rounds, values: Rounds, weights: Rounds) -> None:
        super().__init__()
        self.keys, self.values, self.weights = keys, values, weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return softmax(scale * q k^T + mask) v, (B, H, T, D), with rounded factors."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.keys(q) @ self.keys(k).mT * (q.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, T, S)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.weights(scores.softmax(-1)) @ self.values(v)


def inputs_rounded(roundings: Mapping[str, InputRounding]) -> Put:
    """Return what rounds the inputs of products.

    Args:
        roundings: by the name of the weight, without what a model of transformers has before it.
    """

    def put(model: nn.Module, swaps: Swaps) -> None:
        by_weight: dict[int, InputRounding] = {}
        for name, parameter in model.named_parameters():
            rounding = roundings.get(name.removeprefix("transformer."))
            if rounding is not None:
                by_weight[parameter.data_ptr()] = rounding
        swaps.enter_context(RoundedInputs(by_weight))

    return put


def attention_rounded(keys: Rounds = as_given, values: Rounds = as_given, weights: Rounds = as_given) -> Put:
    """Return what rounds the factors of attention, as a cache in a narrower format does."""

    def put(model: nn.Module, swaps: Swaps) -> None:
        swaps.enter_context(RoundedAttention(keys, values, weights))

    return put


def gelu_by_table(model: nn.Module, swaps: Swaps) -> None:
    """Look GELU up in a table of float16, as GGML does."""

    def looked_up(gelu: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = to_float16(gelu(to_float16(x)))
        return torch.where(x >= MOST_TABLE, x, torch.where(x <= -MOST_TABLE, 0.0, y))

    for module in model.modules():
        act = vars(module).get("act")  # a function, in a model of ours
        if "gelu" in type(module).__name__.lower():
            swaps.set(module, "forward", partial(looked_up, module.forward))
        elif act is not None and "gelu" in cast(Any, model.config).activation_function:
            swaps.set(module, "act", partial(looked_up, act))
