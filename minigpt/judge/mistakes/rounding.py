"""Mistakes that are roundings: of weights, of keys and values, of inputs of products, of the activation.

Every function returns numbers of the given dtype that another format can hold.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.judge.mistakes.attention import in_attention
from minigpt.judge.mistakes.mistake import OF_GPT2, Mistake, Swaps
from minigpt.judge.mistakes.weights import LAYERS, layers_at
from minigpt.precision import cut

Rounds = Callable[[Tensor], Tensor]
BLOCK_SIZE = 32  # numbers that share a scale in GGML's Q8_0 and Q4_0
ERRORS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 2.0**-7, "int4": 2.0**-3}  # relative, of one number


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    with torch._C.DisableTorchFunction():  # else a model that is held in float64 would not round
        return x.to(dtype).to(x.dtype)


to_float16 = partial(cast, dtype=torch.float16)
to_bfloat16 = partial(cast, dtype=torch.bfloat16)


def int8_scale(x: Tensor, dim: int | None = -1, most: float = 127.0) -> Tensor:
    """Return the scale of integers of 8 bits; the numbers along ``dim`` share one, without it all do."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return (largest / most).clamp(min=torch.finfo(torch.float32).tiny)


def int8(x: Tensor, dim: int | None, most: float = 127.0) -> Tensor:
    """Round to integers of 8 bits, whose scale ``int8_scale`` gives."""
    scale = int8_scale(x, dim, most)
    return (x / scale).round().clamp(-128, 127) * scale


def in_blocks(x: Tensor) -> Tensor:
    """Return a view (..., blocks, 32) of rows; the last block is filled with zeros."""
    missing = -x.shape[-1] % BLOCK_SIZE
    return nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, BLOCK_SIZE))


def q8_0(x: Tensor) -> Tensor:
    """Round rows as GGML's quantize_row_q8_0_ref does: the scale is kept in float16."""
    blocks = in_blocks(x.float())
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    rounded = (blocks * inverse).round() * scale.half().float()
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def q4_0(x: Tensor) -> Tensor:
    """Round rows as GGML's quantize_row_q4_0_ref does: the number that is largest in size becomes -8."""
    blocks = in_blocks(x.float())
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = extreme / -8
    inverse = torch.where(scale != 0, 1 / scale, 0.0)
    levels = (blocks * inverse + 8.5).floor().clamp(0, 15) - 8
    rounded = levels * scale.half().float()
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


# Which weights


def round_layers(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    """Round the matrices of the blocks, given as (out, in)."""
    for layer in layers_at(model, LAYERS):
        swaps.parameter(layer, "weight", rounds(layer.weight.T).T.contiguous())


def round_head(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    """Round the head's matrix (V, C), and not the embedding that it may be tied to."""
    owner = model.wte if model.config.tie_word_embeddings else model.lm_head
    weight = rounds(owner.weight)
    swaps.set(model, "head", lambda x: nn.functional.linear(x, weight))


def round_embedding(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    """Round the token embedding, and the head."""
    swaps.parameter(model.wte, "weight", rounds(model.wte.weight))
    if not model.config.tie_word_embeddings:
        swaps.parameter(model.lm_head, "weight", rounds(model.lm_head.weight))


def round_positions(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    swaps.parameter(model.wpe, "weight", rounds(model.wpe.weight))


def round_vectors(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    """Round biases and norms."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.ndim == 1:
                swaps.parameter(module, name, rounds(parameter))


RoundPart = Callable[[Any, Swaps, Rounds], None]
SCOPES: dict[str, tuple[RoundPart, ...]] = {
    "all weights": (round_layers, round_embedding, round_positions, round_vectors),
    "the blocks' matrices": (round_layers,),
    "the matrices of blocks and head": (round_layers, round_head),
    "the matrices of blocks, embedding and head": (round_layers, round_embedding),
    "the head's matrix": (round_head,),
}


HALF_FORMATS: list[tuple[str, Rounds, float]] = [
    ("float16", to_float16, ERRORS["float16"]),
    ("bfloat16", to_bfloat16, ERRORS["bfloat16"]),
]


def formats() -> Iterator[tuple[str, Rounds, float]]:
    """Yield formats of matrices (out, in) in words, with their rounding and its relative error."""
    yield from HALF_FORMATS
    yield "float16 towards zero, their bits cut", partial(cut, dtype=torch.float16), ERRORS["float16"]
    yield "bfloat16 towards zero, their bits cut", partial(cut, dtype=torch.bfloat16), ERRORS["bfloat16"]
    yield "int8, a scale for each output", partial(int8, dim=-1), ERRORS["int8"]
    wide = "int8, a scale for each output that is its largest weight / 127.5"
    yield wide, partial(int8, dim=-1, most=127.5), ERRORS["int8"]
    yield "int8, a scale for each input", partial(int8, dim=0), ERRORS["int8"]
    yield "int8, one scale for a matrix", partial(int8, dim=None), ERRORS["int8"]
    yield "int8 in blocks of 32 (Q8_0)", q8_0, ERRORS["int8"]
    yield "4 bits in blocks of 32 (Q4_0)", q4_0, ERRORS["int4"]


def rounding_of(words: str, rounds: Rounds, error: float, *parts: RoundPart) -> Mistake:
    """Return the mistake of parts that are rounded."""

    def put(model: Any, swaps: Swaps) -> None:
        for part in parts:
            part(model, swaps, rounds)

    return Mistake(words, put, error=error)


@OF_GPT2.add
def rounded_weights(config: Any) -> Iterator[Mistake]:
    """Yield roundings of a GPT-2's weights."""
    for form, rounds, error in formats():
        for scope, parts in SCOPES.items():
            is_whole = scope == "all weights"
            if is_whole and error > ERRORS["bfloat16"]:
                continue  # nobody rounds biases to integers
            yield rounding_of(f"{scope} rounded to {form}", rounds, error, *parts)


def round_matrices(model: nn.Module, swaps: Swaps, rounds: Rounds) -> None:
    """Round every matrix of any model."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.ndim < 2:
                continue
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(rounds(parameter.detach()), requires_grad=False)
            swaps.set(module, name, done[id(parameter)])


def by_reciprocal(x: Tensor) -> Tensor:
    """Round rows to int8 as torchao 0.18 does: times the reciprocal of a scale, the largest number / 127.5."""
    single = x.float()
    scale = (single.abs().amax(-1, keepdim=True) / 127.5).clamp(min=torch.finfo(torch.float32).tiny)
    steps = (single * (1 / scale)).round().clamp(-128, 127)
    return (steps * scale).to(x.dtype)


def round_linear(model: nn.Module, swaps: Swaps, rounds: Rounds) -> None:
    """Round the weights of torch's linear layers, and not of embeddings that they are tied to."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            swaps.parameter(module, "weight", rounds(module.weight))


def rounded_matrices() -> Iterator[Mistake]:
    """Yield roundings of the weights of a model of any architecture."""
    words = "the weights of linear layers rounded to int8, as torchao does"
    yield rounding_of(words, by_reciprocal, ERRORS["int8"], round_linear)
    for form, rounds, error in formats():
        yield rounding_of(f"the weight matrices rounded to {form}", rounds, error, round_matrices)


# What is computed


def round_products(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    """Round the weights and inputs of products in blocks and head."""
    round_layers(model, swaps, rounds)
    for layer in layers_at(model, LAYERS):
        swaps.set(layer, "forward", lambda x, layer=layer: rounds(x) @ layer.weight + layer.bias)
    round_embedding(model, swaps, rounds)
    head = model.head
    swaps.set(model, "head", lambda x: head(rounds(x)))


def round_activation(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    """Round the activation's input and output."""
    for block in model.h:
        act = block.mlp.act
        swaps.set(block.mlp, "act", lambda x, act=act: rounds(act(rounds(x))))


def round_cache(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    """Round keys and values."""
    in_attention(hold=rounds)(model, swaps)


def round_attention_weights(model: Any, swaps: Swaps, rounds: Rounds) -> None:
    in_attention(finish=rounds)(model, swaps)


@OF_GPT2.add
def rounded_values(config: Any) -> Iterator[Mistake]:
    """Yield roundings of what a GPT-2 computes."""
    activation = "GELU" if "gelu" in config.activation_function else "the activation"
    values = {
        "keys and values": round_cache,
        f"{activation}'s input and output": round_activation,
        "attention weights": round_attention_weights,
        "weights and inputs of products": round_products,
    }
    for form, rounds, error in HALF_FORMATS:
        for name, part in values.items():
            yield rounding_of(f"{name} rounded to {form}", rounds, error, part)
    by_head = partial(int8, dim=-1)
    yield rounding_of("keys and values rounded to int8, a scale for each head", by_head, ERRORS["int8"], round_cache)
    for name, part in {"keys and values": round_cache, "weights and inputs of products": round_products}.items():
        yield rounding_of(f"{name} rounded to int8 in blocks of 32 (Q8_0)", q8_0, ERRORS["int8"], part)
