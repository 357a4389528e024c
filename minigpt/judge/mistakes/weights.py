"""Mistakes in weights: biases left out, matrices that are not transposed or reshaped in place of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt.judge.mistakes.mistake import Mistake, Swaps

LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def altering(words: str, layers: Sequence[str], role: str, change: Callable[[Tensor], Tensor]) -> Mistake:
    """Return a mistake that changes the weights or biases of some layers in every block.

    Args:
        layers: paths in a block.
        role: "weight" or "bias".
    """

    def put(model: Any, swaps: Swaps) -> None:
        for block in model.h:
            for path in layers:
                layer = block.get_submodule(path)
                swaps.parameter(layer, role, change(getattr(layer, role)))

    return Mistake(words, put)


def reshaped(weight: Tensor) -> Tensor:
    """Return what a linear layer computes with a kernel (in, out) that was reshaped to (out, in)."""
    inputs, outputs = weight.shape
    return weight.reshape(outputs, inputs).T.contiguous()


def transposed_weight(weight: Tensor) -> Tensor:
    return weight.T.contiguous()


def without_third(bias: Tensor, number: int) -> Tensor:
    """Return c_attn's bias without that of q, k or v."""
    thirds = [*bias.chunk(3)]
    thirds[number] = torch.zeros_like(thirds[number])
    return torch.cat(thirds)


def wrong_biases() -> Iterator[Mistake]:
    """Yield biases that are left out."""
    for layer in LAYERS:
        yield altering(f"no bias in {layer}", [layer], "bias", torch.zeros_like)
    yield altering("no biases in the MLP", LAYERS[2:], "bias", torch.zeros_like)
    yield altering("no biases in attention", LAYERS[:2], "bias", torch.zeros_like)
    yield altering("no biases in attn.c_proj and mlp.c_proj", LAYERS[1::2], "bias", torch.zeros_like)
    yield altering("no biases in attention and MLP", LAYERS, "bias", torch.zeros_like)
    yield altering("no bias of the queries", LAYERS[:1], "bias", lambda bias: without_third(bias, 0))
    yield altering("no bias of the values", LAYERS[:1], "bias", lambda bias: without_third(bias, 2))


def wrong_transposes(config: Any) -> Iterator[Mistake]:
    """Yield matrices that are read the wrong way round where their shape allows it."""
    yield altering("attn.c_proj not transposed", LAYERS[1:2], "weight", transposed_weight)
    if config.inner_size == config.n_embd:
        yield altering("mlp.c_fc not transposed", LAYERS[2:3], "weight", transposed_weight)
        yield altering("mlp.c_proj not transposed", LAYERS[3:], "weight", transposed_weight)
    for layer in (LAYERS[0], *LAYERS[2:]):
        yield altering(f"{layer} reshaped in place of transposed", [layer], "weight", reshaped)
    yield altering("every matrix reshaped in place of transposed", LAYERS, "weight", reshaped)
