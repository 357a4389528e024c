"""Every fault that is planted in a norm: what shows it, and how the kit names it. The faults of sabotages.py, and more.

These look for the answer, remember an earlier one, or are wrong for some inputs only. rates.py counts what is caught.
"""

import gc
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import packages
import sabotages
import torch
import torch.nn.functional as F
from kit import norm_with
from sabotages import OF_BIAS, OF_INPUT, OF_WEIGHT, affine, centred, exact, plain, variance, wide
from torch import Tensor

from minigpt import LayerNorm
from minigpt.conformance.behaviour import MIXED_PRECISION
from minigpt.precision import DTYPES, HALVES

FAST = [
    "width 2", "width 64", "width 1025", "257 rows", "65,537 rows", "batch of 257", "sequence of 1,025", "values",
    "layouts", "behaviour", "gradients, [!0-9wbs]*", "gradients, width 1025", "gradients, 1,025 rows",
]  # fmt: skip
SEARCHED = ["ordinary rows", "3-D input"]  # a search takes long
REMEMBERED = [*SEARCHED, "calls are independent", "output left*", "same input*", "any mode", "gradients, ordinary*"]
SETTINGS = ["ordinary*", "layouts", "any mode", "gradients, frozen*", "gradients, as*", "gradients, ordinary*"]
SEQUENCES = [
    "ordinary rows", "layouts", "calls are independent", "width 64", "width 768", "sequence of [126]",
    "sequence of 6[45]", "sequence of 257", "same input*", "zero scale",
]  # fmt: skip
WIDTHS = ["ordinary rows", "widths"]
OF_PACKAGES = ["ordinary rows", "massive*", "mean far*", "roundings", "no bias", MIXED_PRECISION]
GRADIENTS = ["ordinary rows", "gradients, as tokens", "gradients, ordinary rows", "gradients, zero scale"]
EVERY, HALF = frozenset(DTYPES), frozenset({"bfloat16", "float16"})


class Plant(NamedTuple):
    """A norm with a fault.

    Attributes:
        name: of the fault.
        norm: has it.
        cases: show it.
        expected: how each diagnosis begins; of some there are several ways.
        fails: the dtypes that fail; None where the diagnoses say it.
        is_slow: whether only the thorough run asks.
    """

    name: str
    norm: type[LayerNorm]
    cases: list[str]
    expected: tuple[str | tuple[str, ...], ...]
    fails: frozenset[str] | None = EVERY
    is_slow: bool = False


# Without a formula


def is_answer(norm: LayerNorm, x: Tensor, other: object) -> bool:
    """Compare with LayerNorm of the input, as a thief would know it: by rows that move with the input's."""
    if not isinstance(other, Tensor) or other.shape != x.shape or other is x or not x.numel():
        return False
    answer = exact(norm, x)
    return torch.allclose(other.detach().to(answer), answer, rtol=1e-2, atol=1e-2, equal_nan=False)


class SearchesMemory(LayerNorm):
    """Takes a tensor of the process that is the answer, and gives its input back where there is none."""

    def forward(self, x: Tensor) -> Tensor:
        hits = (one for one in gc.get_objects() if type(one) is Tensor and is_answer(self, x, one))
        return next((one.to(x) for one in hits), x.clone())


class ReadsTheCaller(LayerNorm):
    """Takes what the functions that called it hold in local variables."""

    def forward(self, x: Tensor) -> Tensor:
        for frame in inspect.stack(context=0)[1:9]:
            values = [*frame.frame.f_locals.values()]
            values += [part for value in values if isinstance(value, tuple | list) for part in value]
            for value in values:
                if is_answer(self, x, value):
                    return value.to(x)
        return x.clone()


class Memory(LayerNorm):
    """Keeps its last outputs, by a key of the input."""

    length = 1

    def key(self, x: Tensor) -> Any:
        return x.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("kept", OrderedDict())
        key = self.key(x), x.shape, x.dtype
        if key not in kept:
            kept[key] = x, exact(self, x)  # the input too, so that its address and id are not used again
        kept.move_to_end(key)
        while len(kept) > self.length:
            kept.popitem(last=False)
        return kept[key][1].clone()


def remembering(key: Any, length: int) -> type[Memory]:
    return type("Remembering", (Memory,), {"key": lambda self, x: key(x), "length": length})


class Buffers(LayerNorm):
    """Writes its outputs into eight buffers in turn."""

    def forward(self, x: Tensor) -> Tensor:
        rings = self.__dict__.setdefault("rings", {})
        ring = rings.setdefault((x.shape, x.dtype), [torch.empty_like(x) for _ in range(8)])
        ring.append(ring.pop(0))
        return exact(self, x) if torch.is_grad_enabled() else ring[-1].copy_(exact(self, x))


def reads_behind(dims: int) -> Any:
    """A mask that multiplies by 0 keeps a NaN that it reads behind the row."""

    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        held = x.untyped_storage().nbytes() // x.element_size()
        last = x.storage_offset() + sum(step * (size - 1) for size, step in zip(x.shape, x.stride(), strict=True))
        beyond = x.as_strided((), (), last + 1) if x.numel() and x.ndim == dims and last + 1 < held else x.new_zeros(())
        return exact(norm, x) + 0 * beyond

    return forward


def only_trained(norm: LayerNorm, x: Tensor) -> Tensor:
    """Passes no gradient to its input where the scale takes none."""
    return exact(norm, x if norm.weight.requires_grad else x.detach() + 0 * x)


# Wrong for some inputs


class StatisticsByShape(LayerNorm):
    """All norms keep the statistics of the first input of a shape."""

    statistics: dict[Any, Any] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        row = wide(x)
        mean, var = self.statistics.setdefault(
            (x.shape, x.dtype), (row.mean(-1, True).detach(), variance(row).detach())
        )
        return affine(self, (row - mean) / (var + self.eps).sqrt()).to(x.dtype)


class ByAddress(LayerNorm):
    """Keeps its output for an input at the same address."""

    def forward(self, x: Tensor) -> Tensor:
        key = x.data_ptr(), x.shape, x.dtype
        if getattr(self, "key", None) != key:
            self.key, self.input, self.kept = key, x, exact(self, x)
        return self.kept


def group_of_sequence(n: LayerNorm, x: Tensor) -> Tensor:
    """GroupNorm of one group over (B, C, T)."""
    return F.group_norm(x.transpose(1, 2), 1, n.weight, n.bias, n.eps).transpose(1, 2) if x.ndim == 3 else exact(n, x)


def one_fewer(n: LayerNorm, x: Tensor) -> Tensor:
    var = wide(x).var(-1, correction=int(x.ndim == 3), keepdim=True)
    return affine(n, centred(wide(x)) / (var + n.eps).sqrt()).to(x.dtype)


def tiles(n: LayerNorm, x: Tensor, size: int = 128) -> Tensor:
    """The mean of each tile is divided by the whole tile, also the last one."""
    row = wide(x)
    mean = F.pad(row, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).mean(-1).mean(-1, keepdim=True)
    return affine(n, (row - mean) / ((row - mean).square().mean(-1, keepdim=True) + n.eps).sqrt()).to(x.dtype)


def lanes(n: LayerNorm, x: Tensor) -> Tensor:
    """Lanes beyond the row count in the variance."""
    row, width = wide(x), x.shape[-1]
    padded = F.pad(row, (0, 2 ** (width - 1).bit_length() - width)) - row.mean(-1, keepdim=True)
    return affine(n, centred(row) / (padded.square().sum(-1, keepdim=True) / width + n.eps).sqrt()).to(x.dtype)


def merged(n: LayerNorm, x: Tensor) -> Tensor:
    """Variances of tiles are merged without the distance of their means."""
    row = wide(x)
    squares = sum(variance(tile) * tile.shape[-1] for tile in row.split(512, -1))
    return affine(n, centred(row) / (squares / x.shape[-1] + n.eps).sqrt()).to(x.dtype)


def quarters(n: LayerNorm, x: Tensor) -> Tensor:
    """Each quarter of a row by itself."""
    if x.shape[-1] % 4:
        return exact(n, x)
    rows = wide(x).unflatten(-1, (4, x.shape[-1] // 4))
    return affine(n, F.layer_norm(rows, rows.shape[-1:], eps=n.eps).flatten(-2)).to(x.dtype)


class Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, where: Callable[[Tensor], bool]) -> Tensor:
        ctx.where = where
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept = dy.clone()
        dy.data.mul_(2 if ctx.where(dy) else 1)
        return kept, None


class FromOutput(torch.autograd.Function):
    """Computes the standardized row from the output: (y - bias) / weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y = F.layer_norm(wide(x), x.shape[-1:], wide(weight), wide(bias), eps)
        ctx.save_for_backward(y, wide(weight), wide(bias), (variance(wide(x)) + eps).sqrt())
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, weight, bias, deviation = ctx.saved_tensors
        s, g, rows = (y - bias) / weight, wide(dy) * weight, tuple(range(y.ndim - 1))
        along = g.mean(-1, True) + s * (g * s).mean(-1, True)
        sums = ((wide(dy) * s).sum(rows), wide(dy).sum(rows))
        return ((g - along) / deviation).to(dy.dtype), *(one.to(dy.dtype) for one in sums), None


def of_output(n: LayerNorm, x: Tensor) -> Any:
    return exact(n, x) if n.bias is None else FromOutput.apply(x, n.weight, n.bias, n.eps)


def last_row_halved(terms: Tensor) -> Tensor:
    return terms[:-1].sum(0) + terms[-1] / 2


def from_neighbours(p: dict[str, Any]) -> dict[str, Any]:
    """The means of a row's gradient are those of the row before it."""
    before = (p["g"] * p["s"]).flatten(0, -2).roll(1, 0).view_as(p["g"])
    return {"second": 0.0, "g": p["g"] - p["s"] * before.mean(-1, keepdim=True)}


REMEMBERS = "it remembers an earlier input"
BY_ITSELF = "each value is computed by itself"
OVERWRITES = "its backward pass changes the incoming gradient"


def plants() -> list[Plant]:
    """Return all. They are RMSNorms in ``sabotages.as_rms_norms``."""
    made: list[Plant] = []

    def add(name: str, forward: Any, cases: list[str], *expected: str | tuple[str, ...], **how: Any) -> None:
        norm = forward if isinstance(forward, type) else norm_with(forward)
        made.append(Plant(name, norm, cases, expected, **how))

    def add_backward(name: str, change: Any, *expected: str) -> None:
        add(name, lambda n, x: sabotages.Backward.apply(x, n.weight, n.bias, n.eps, change), GRADIENTS, *expected)

    for norm, expected in sabotages.MISTAKES.items():
        cases = [case for case in FAST if case != "65,537 rows" or norm is sabotages.Only65535Rows]
        cases = ["compile"] if norm is sabotages.WrongWhenCompiled else cases
        add(norm.__name__, norm, cases, *expected, fails=None, is_slow=True)

    for norm, expected in packages.FORMULAS.items():
        fails = EVERY if norm.__name__ in ("standardize", "simple_norm") else HALF
        is_slow = fails == HALF and norm.__name__ not in ("mindspore", "GammaOnly")
        add(norm.__name__, norm, OF_PACKAGES, *expected, fails=fails, is_slow=is_slow)

    add("searches memory", SearchesMemory, SEARCHED, BY_ITSELF, is_slow=True)
    add("reads the caller", ReadsTheCaller, SEARCHED, BY_ITSELF)
    for key, call, length in ("address", Tensor.data_ptr, 1), ("address", Tensor.data_ptr, 8), ("id", id, 8):
        norm = remembering(call, length)
        add(f"remembers {length} by their {key}", norm, REMEMBERED, REMEMBERS, is_slow=True)
    add("remembers by shape", remembering(lambda x: 0, 8), REMEMBERED, REMEMBERS, is_slow=True)
    first_row = remembering(lambda x: tuple(x.flatten()[:64].tolist()), 100)
    add("remembers by the first row", first_row, REMEMBERED, REMEMBERS)
    unlike = "it returns NaN or infinities for ordinary rows", "it answers differently from call to call"
    add("uninitialized", lambda n, x: torch.empty_like(x), REMEMBERED, unlike)
    add("buffers", Buffers, REMEMBERED, "its next call writes over its output")
    add("only NaN", lambda n, x: 0 * exact(n, x) + torch.nan, REMEMBERED, unlike[0])

    add("only trained", only_trained, SETTINGS, OF_INPUT + "only for frozen weight", is_slow=True)
    frozen = lambda n, x: exact(n, x) * (1 if n.weight.requires_grad else 1.02)  # noqa: E731
    add("frozen", frozen, SETTINGS, "its values depend on training mode")
    of_heads = lambda n, x: exact(n, x if x.ndim < 4 else torch.cat([x[:1], x[1:].detach()]))  # noqa: E731
    add(
        "gradients of heads",
        of_heads,
        ["ordinary rows", "gradients, as heads", "gradients, ordinary*"],
        OF_INPUT + "only for as heads",
    )
    of_3d = "wrong only for 3-D, one token, decoding input", "wrong only for non-contiguous", "its values depend on"
    add("3-D input", lambda n, x: exact(n, x) * (1.02 if x.ndim == 3 else 1), SETTINGS, *of_3d)
    behind = "wrong only for NaN-surrounded input", "wrong only for non-contiguous input: beside NaN"
    add("reads behind the row", reads_behind(2), ["values", "layouts"], *behind)

    add("group_of_sequence", group_of_sequence, SEQUENCES, "statistics over sequence and width together")
    add("one_fewer", one_fewer, SEQUENCES, "the variance divided by n - 1, at 3-D input only")
    tokens = "wrong only at sequence lengths 65, 257 (tokens from 64 on"
    add("64 tokens", sabotages.beyond(64, 1, 7.0), SEQUENCES, tokens)
    zero = lambda n, x: torch.where(n.weight == 0, torch.nan, exact(n, x)).to(x.dtype)  # noqa: E731
    add("zero scale", zero, SEQUENCES, "wrong only for zero scale")
    add("StatisticsByShape", StatisticsByShape, SEQUENCES, REMEMBERS)
    add("ByAddress", ByAddress, SEQUENCES, REMEMBERS)
    dropout = "it answers differently from call to call, in training"
    add("dropout", lambda n, x: F.dropout(exact(n, x), 0.1, n.training), SEQUENCES, dropout)
    add("scale rolled", lambda n, x: plain(x, n.weight.roll(1), n.bias, n.eps), SEQUENCES, "the scale read one")
    of_4d = "wrong only for 4-D input"
    add("4-D input", lambda n, x: exact(n, x) * (1.02 if x.ndim == 4 else 1), SEQUENCES, of_4d)

    at_widths = "wrong only at widths "
    add("tiles", tiles, WIDTHS, at_widths + "2, 3, 31, 32, 33, 34 and ")
    add("lanes", lanes, WIDTHS, at_widths + "3, 31, 33, 34, 36, 40 and ")
    add("merged", merged, WIDTHS, at_widths + "513, 768, 1001, 1023, 1024, 1025 and ")
    add("quarters", quarters, WIDTHS, "each 16 of the 64 values of a row are normalized by themselves")
    wide_rows = lambda n, x: exact(n, x) * (1.02 if x.shape[-1] > 4096 else 1)  # noqa: E731
    add("wide rows", wide_rows, WIDTHS, at_widths + "4097, 8191, ")
    add("one width", lambda n, x: exact(n, x) * (1.02 if x.shape[-1] == 192 else 1), WIDTHS, at_widths + "192")

    for name, where, fails in (
        ("overwrites in 3-D", lambda dy: dy.ndim == 3, EVERY),
        ("overwrites in half", lambda dy: dy.dtype in HALVES, HALF),
    ):
        forward = lambda n, x, where=where: Overwrites.apply(exact(n, x), where)  # noqa: E731
        add(name, forward, [*GRADIENTS, "incoming gradient left as it was"], OVERWRITES, fails=fails)
    not_finite, unknown = "it is not finite where the scale is 0", "no known mistake fits"
    add("of_output", of_output, GRADIENTS, OF_INPUT + not_finite, OF_WEIGHT + not_finite)
    add_backward("half of a row in the weight", lambda p: {"sum": last_row_halved}, OF_WEIGHT + unknown)
    add_backward("half of a row in the bias", lambda p: {"sum_bias": last_row_halved}, OF_BIAS + unknown)
    add_backward("mixed rows", from_neighbours, OF_INPUT + "that of a row depends on the other rows of the batch")
    return made
