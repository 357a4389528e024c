"""Mistakes in weights: biases left out, matrices that are not transposed or reshaped in place of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.judge.mistakes.mistake import MistakePart, Put, Swaps, mistake

Change = Callable[[Tensor], Tensor]
LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def layers_at(model: Any, paths: Sequence[str]) -> Iterator[Any]:
    """Yield the layers at some paths of every block. A layer that another mistake has left out is none."""
    for block in model.h:
        for path in paths:
            layer = block.get_submodule(path)
            if not isinstance(layer, nn.Identity):
                yield layer


def altering(words: str, layers: Sequence[str], role: str = "weight", **about: Any) -> Callable[[Change], Change]:
    """Decorate a change of the weights or biases of some layers in every block.

    Args:
        layers: paths in a block.
        role: "weight" or "bias".
        about: of ``mistake``.
    """

    def altered(change: Change) -> Put:
        def put(model: Any, swaps: Swaps) -> None:
            for layer in layers_at(model, layers):
                swaps.parameter(layer, role, change(getattr(layer, role)))

        return put

    return mistake(words, into=altered, part=MistakePart.WEIGHTS, **about)


def is_square(config: Any) -> bool:
    """Return whether the MLP is as wide as the model, so that its matrices may be transposed."""
    return config.inner_size == config.n_embd


@altering("attn.c_proj not transposed", LAYERS[1:2], cure="Write x @ weight in place of x @ weight.T in attn.c_proj.")
@altering("mlp.c_fc not transposed", LAYERS[2:3], when=is_square)
@altering("mlp.c_proj not transposed", LAYERS[3:], when=is_square)
def transposed_weight(weight: Tensor) -> Tensor:
    return weight.T.contiguous()


@altering("attn.c_attn reshaped in place of transposed", LAYERS[:1])
@altering("mlp.c_fc reshaped in place of transposed", LAYERS[2:3])
@altering("mlp.c_proj reshaped in place of transposed", LAYERS[3:])
@altering("every matrix reshaped in place of transposed", LAYERS)
def reshaped(weight: Tensor) -> Tensor:
    """Return what a linear layer computes with a kernel (in, out) that was reshaped to (out, in)."""
    inputs, outputs = weight.shape
    return weight.reshape(outputs, inputs).T.contiguous()


for path in LAYERS:
    altering(f"no bias in {path}", [path], "bias")(torch.zeros_like)
altering("no biases in the MLP", LAYERS[2:], "bias")(torch.zeros_like)
altering("no biases in attention", LAYERS[:2], "bias")(torch.zeros_like)
altering("no biases in attn.c_proj and mlp.c_proj", LAYERS[1::2], "bias")(torch.zeros_like)
altering("no biases in attention and MLP", LAYERS, "bias")(torch.zeros_like)


@altering("no bias of the queries", LAYERS[:1], "bias")
def without_queries(bias: Tensor) -> Tensor:
    _, keys, values = bias.chunk(3)
    return torch.cat([torch.zeros_like(keys), keys, values])


@altering("no bias of the values", LAYERS[:1], "bias")
def without_values(bias: Tensor) -> Tensor:
    queries, keys, _ = bias.chunk(3)
    return torch.cat([queries, keys, torch.zeros_like(keys)])
