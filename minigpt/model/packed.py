"""Weights in the order in which oneDNN reads them fastest, which only oneDNN reads: such a model can only compute."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.errors import ConfigError
from minigpt.model.conv1d import Conv1D
from minigpt.model.gpt2 import GPT2
from minigpt.model.mlp import gelu_tanh, unchanged
from minigpt.model.product import onednn_linear

_numbers = itertools.count()
_kept: dict[int, Any] = {}  # packed weights by number, for the compiler: see ``keep``


class PackedLinear(nn.Module):
    """``y = x W^T + b``, the values of ``W`` as they were, in an order that suits ``tokens`` rows of ``x`` at a time.

    Args:
        rows: (out, in), the weight of ``F.linear``, on the CPU.
        bias: (out), or None.
        tokens: how many rows ``x`` mostly has; with any other number the result is as good, and slower.
        then: what is applied to ``y`` in the same call: "none", or "gelu", that of the tanh.
    """

    def __init__(
        self, rows: Float[Tensor, "out inp"], bias: nn.Parameter | None, tokens: int, then: str = "none"
    ) -> None:
        super().__init__()
        self.bias, self.tokens, self.then, self.shape = bias, tokens, then, tuple(rows.shape)
        self._pack(rows)

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        if torch.compiler.is_compiling():
            return torch.ops.minigpt.packed_linear(x, self.number, self.shape[0], self.bias, self.then)
        return onednn_linear(x, self.packed, self.bias, self.then)

    def rows(self) -> Float[Tensor, "out inp"]:
        """The weight, in the usual order."""
        return self.packed.to_dense()

    def extra_repr(self) -> str:
        return "{1}, {0}, packed".format(*self.shape)

    def _pack(self, rows: Float[Tensor, "out inp"]) -> None:
        if not rows.is_cpu:
            raise ConfigError(f"packed weights are for the CPU, and cannot move to {rows.device}; load the model there")
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(rows.detach(), self.tokens)
        self.number = keep(self, self.packed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        self._pack(fn(self.rows()))  # to another dtype, or into shared memory; a packed tensor knows neither
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "packed": self.rows()}  # for a copy, which a packed tensor cannot make of itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack(self.packed)


class PackedConv1D(PackedLinear):
    """A ``Conv1D`` whose weight is packed, and saved as ever: (in, out)."""

    @property
    def weight(self) -> Float[Tensor, "inp out"]:
        """A copy in the checkpoint's own layout."""
        return self.rows().t().contiguous()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


@torch.no_grad()
def pack(model: GPT2, tokens: int = 1, let_go: Callable[[Tensor], object] = lambda weight: None) -> GPT2:
    """Pack every affine weight, for ``tokens`` of them at a time, in place; return ``model``.

    In bfloat16 the head as well, of which the embedding stays as a second copy: it is looked up. GELU becomes part of
    the product before it, so that ``c_fc`` is what it was followed by GELU. ``let_go`` is handed each weight, as it was,
    once it is packed.

    Raises:
        ConfigError: the model is not on the CPU, or its arithmetic is "reference", whose bits depend on the layout.
    """
    if model.arithmetic == "reference":
        raise ConfigError('arithmetic="reference" reads weights as the checkpoint lays them, for the same bits')
    if model.wte.weight.dtype == torch.bfloat16:
        model.fast_head = PackedLinear(model.head_rows(), None, tokens).train(model.training)
    for name in affine_layers(model):
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, PackedConv1D(layer.weight.t(), layer.bias, tokens).train(layer.training))
        let_go(layer.weight)
    for block in model.h:
        if block.mlp.activation is gelu_tanh:
            block.mlp.c_fc.then, block.mlp.activation = "gelu", unchanged
    return model


def affine_layers(model: GPT2) -> list[str]:
    """The names of all ``Conv1D``, and no more of them, so that each can be let go when another takes its place."""
    return [name for name, module in model.named_modules() if isinstance(module, Conv1D)]


def keep(owner: object, packed: Any) -> int:
    """A number by which an operator finds ``packed`` as long as ``owner`` lives.

    The compiler cannot hold packed weights, which are no plain tensors: it calls an operator and passes the number.
    """
    number = next(_numbers)
    _kept[number] = packed
    weakref.finalize(owner, _kept.pop, number)
    return number


def kept(number: int) -> Any:
    """What ``keep`` gave this number to."""
    return _kept[number]


torch.library.define("minigpt::packed_linear", "(Tensor x, int layer, int out, Tensor? bias, str then) -> Tensor")


@torch.library.impl("minigpt::packed_linear", "cpu")
def _packed_linear(x: Tensor, layer: int, out: int, bias: Tensor | None, then: str) -> Tensor:
    return onednn_linear(x, kept(layer), bias, then)


@torch.library.register_fake("minigpt::packed_linear")
def _packed_linear_shape(x: Tensor, layer: int, out: int, bias: Tensor | None, then: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], out)
