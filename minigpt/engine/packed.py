"""Weights in the order that oneDNN reads fastest. Only oneDNN can read them: a packed model is inference-only."""

import itertools
import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.engine.pages import MappedFiles
from minigpt.engine.parts import FastConv1D
from minigpt.engine.product import linear_pointwise
from minigpt.engine.root import GPT2
from minigpt.errors import ConfigError
from minigpt.model.checks import check_gpt2
from minigpt.model.conv1d import Conv1D
from minigpt.model.mlp import MLP, gelu_new, gelu_tanh
from minigpt.norms.add import has_hooks
from minigpt.placement import dtype_name
from minigpt.processor import PACKABLE

_numbers = itertools.count()
_held: dict[int, Any] = {}  # what every ``Holder`` holds, by its number


class Holder(nn.Module):
    """A layer whose weights are not a plain tensor.

    The compiler cannot hold such weights: it calls an operator, which finds them by the layer's number.

    Attributes:
        packed: the weights.
        number: as long as the layer lives, ``held(number)`` are its weights.
    """

    packed: Any
    number: int

    def hold(self, packed: Any) -> None:
        if "number" not in vars(self):
            self.number = next(_numbers)
            weakref.finalize(self, _held.pop, self.number)
        self.packed = _held[self.number] = packed

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        del self.number  # the original's
        self.hold(self.packed)


def held(number: int) -> Any:
    """The weights of the layer of this number."""
    return _held[number]


class PackedLinear(Holder):
    """``y = x W^T + b``, the values of ``W`` as they were, in an order that suits ``tokens`` rows of ``x`` at a time.

    Args:
        rows: (out, in), the weight of ``F.linear``, of one of the ``dtypes``, on the CPU.
        bias: (out), or None.
        tokens: how many rows ``x`` mostly has; with any other number the result is as good, and may be slower.
        then: what is applied to ``y`` in the same call: "none", or "gelu", that of the tanh.

    Attributes:
        dtypes: that it can hold.

    Raises:
        ConfigError: oneDNN cannot pack these weights.
    """

    dtypes: tuple[torch.dtype, ...] = PACKABLE

    def __init__(
        self, rows: Float[Tensor, "out inp"], bias: nn.Parameter | None, tokens: int, then: str = "none"
    ) -> None:
        super().__init__()
        self.bias, self.tokens, self.then, self.shape = bias, tokens, then, tuple(rows.shape)
        if bias is not None:
            bias.data = bias.data.contiguous()  # else oneDNN would read it as if it were
        self.pack(rows)

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        if x.dtype != self.dtype:  # as autocast may have it
            return self(x.to(self.dtype)).to(x.dtype)
        if torch.compiler.is_compiling():
            return torch.ops.minigpt.packed_linear(x, self.number, self.shape[0], self.bias, self.then)
        return linear_pointwise(x, self.packed, self.bias, self.then, [], "tanh")

    def rows(self) -> Float[Tensor, "out inp"]:
        """The weight, in the usual order."""
        return self.packed.to_dense()

    def pack(self, rows: Float[Tensor, "out inp"]) -> None:
        check_packable(rows, self.dtypes)
        self.dtype = rows.dtype
        tokens = max(self.tokens, 2)  # for a single one oneDNN leaves float32 as it lies, and reads that more slowly
        self.hold(torch.ops.mkldnn._reorder_linear_weight.default(rows.detach(), tokens))

    def extra_repr(self) -> str:
        return "{1}, {0}, packed".format(*self.shape)

    def check_applicable(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse what would take the weights to a dtype or a place where oneDNN cannot pack them."""
        check_packable(fn(torch.empty(0, dtype=self.dtype, device="cpu")), self.dtypes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        rows = self.rows()
        if (moved := fn(rows)) is not rows:
            self.pack(moved)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "packed": self.rows()}  # a packed tensor cannot be copied as it is

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.pack(self.packed)


class PackedConv1D(PackedLinear):
    """A ``Conv1D`` whose weight is packed, and saved as ever: (in, out)."""

    @property
    def weight(self) -> Float[Tensor, "inp out"]:
        """A copy in the checkpoint's own layout."""
        return self.rows().t().contiguous()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any, **named: Any) -> None:
        raise ConfigError(f"{prefix}weight is packed, and nothing can be loaded into it; load before packing")


@torch.no_grad()
def pack(model: GPT2, tokens: int = 1) -> GPT2:
    """Pack every affine weight, for ``tokens`` of them at a time, in place; return ``model``.

    The head is packed too, and the embedding stays beside it, as the table that tokens are looked up in. ``c_fc``
    computes its product and GELU in one call. The model is for inference then: no Parameter asks for a gradient. A
    layer with hooks, or with a forward of somebody else's, stays as it is.

    Raises:
        ConfigError: if oneDNN cannot pack these weights, the model has weights of eight bits, the arithmetic is
            "reference", whose bits depend on the layout, or ``tokens`` is below 1.
    """
    check_layout(model, tokens)
    if model.quantize is not None:
        raise ConfigError(f"weights must not be quantized to be packed, got quantize={model.quantize!r}")
    check_packable(model.wte.weight, PackedLinear.dtypes)
    files = MappedFiles()
    model.fast_head = PackedLinear(model.head_rows(), None, tokens).train(model.training)
    files.give_back(model.head_rows())
    for name in affine_layers(model):
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, PackedConv1D(layer.weight.t(), layer.bias, tokens).train(layer.training))
        files.give_back(layer.weight)
    for mlp in (module for module in model.modules() if isinstance(module, MLP)):
        if type(mlp.c_fc) is PackedConv1D and mlp.act in (gelu_new, gelu_tanh):
            mlp.c_fc.then, mlp.act = "gelu", unchanged
    return model.requires_grad_(False)


def unchanged(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """The activation of an MLP whose ``c_fc`` has applied it already."""
    return x


def affine_layers(model: GPT2) -> list[str]:
    """Return the names of the affine layers that have our own forward and no hooks.

    Names alone, so that each layer is freed when another takes its place.
    """
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (Conv1D, FastConv1D) and "forward" not in vars(module) and not has_hooks(module)
    ]


def check_layout(model: GPT2, tokens: int = 1) -> None:
    """Check that a model's weights may be laid out anew.

    Raises:
        ConfigError: if the arithmetic is "reference", or ``tokens`` is not a whole number, 1 or more.
    """
    check_gpt2(model)
    if not isinstance(tokens, Integral) or tokens < 1:
        raise ConfigError(f"tokens must be a whole number, 1 or more, got {tokens!r}")
    if model.arithmetic == "reference":
        raise ConfigError('arithmetic="reference" needs the weights in the checkpoint\'s layout, for the same bits')


def check_packable(rows: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that oneDNN can pack these weights.

    Raises:
        ConfigError: if the device is not the CPU, or this PyTorch or processor does not pack the dtype.
    """
    if not rows.is_cpu:
        raise ConfigError(f"packed weights are for the CPU, and cannot move to {rows.device}; load the model there")
    if not dtypes:
        raise ConfigError("this PyTorch has no oneDNN, which reads packed weights")
    if rows.dtype not in dtypes:
        known = " or ".join(map(dtype_name, dtypes))
        raise ConfigError(f"packed weights must be {known} on this processor, got {dtype_name(rows.dtype)}")


torch.library.define("minigpt::packed_linear", "(Tensor x, int layer, int out, Tensor? bias, str then) -> Tensor")


@torch.library.impl("minigpt::packed_linear", "cpu")
def _packed_linear(x: Tensor, layer: int, out: int, bias: Tensor | None, then: str) -> Tensor:
    return linear_pointwise(x, held(layer), bias, then, [], "tanh")


@torch.library.register_fake("minigpt::packed_linear")
def _packed_linear_shape(x: Tensor, layer: int, out: int, bias: Tensor | None, then: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], out)
