"""Faults that show for some inputs: each dtype fails, and the diagnosis says which inputs are right and which wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import sabotages
import torch
import torch.nn.functional as F
from kit import check, failed_dtypes, norm_with
from sabotages import affine, centred, exact, plain, variance, wide
from torch import Tensor, nn

from minigpt import LayerNorm, norms
from minigpt.precision import DTYPES, HALVES

pytestmark = pytest.mark.usefixtures("unchecked")

EVERY = {*DTYPES}
VALUES = ["ordinary rows", "layouts", "calls are independent", "width 64", "width 768"]
WIDTHS = ["ordinary rows", "widths"]
SEQUENCES = [*VALUES, "sequence of [126]", "sequence of 6[45]", "sequence of 257", "same input*", "zero scale"]
OF_GRADIENTS = ["ordinary rows", "gradients, as tokens", "gradients, ordinary rows", "gradients, zero scale"]
GRADIENTS = [*OF_GRADIENTS, "behaviour"]


class WithCopies(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), eps
        self.copies = self.weight.detach().clone(), self.bias.detach().clone()


def ignores_scale(n: WithCopies, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=n.eps) + n.bias


def copies_its_parameters(n: WithCopies, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *(copy.to(x) for copy in n.copies), eps=n.eps)


@pytest.mark.parametrize(
    ("forward", "mistake"),
    [(ignores_scale, "no scale"), (copies_its_parameters, "no scale and no shift")],
)
def test_a_class_that_ignores_its_weight_is_no_layer_norm(forward: Callable[..., Tensor], mistake: str) -> None:
    norm = type("Norm", (WithCopies,), {"forward": forward})
    report = check(norm, ["ordinary rows"])
    assert (failed_dtypes(report), report.diagnoses) == (EVERY, [mistake])
    assert "Norm ignores its weight" in report.notes[0]
    assert norms.build(norm, 8).weight is not None


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


@pytest.mark.parametrize(
    ("norm", "mistake"),
    [
        (norm_with(group_of_sequence), "statistics over sequence and width together"),
        (norm_with(one_fewer), "the variance divided by n - 1, at 3-D input only"),
        (
            norm_with(sabotages.beyond(64, 1, 7.0)),
            "wrong only at sequence lengths 65, 257 (tokens from 64 on",
        ),
        (
            norm_with(lambda n, x: torch.where(n.weight == 0, torch.nan, exact(n, x)).to(x.dtype)),
            "wrong only for zero scale",
        ),
        (StatisticsByShape, "it remembers an earlier input"),
        (ByAddress, "it remembers an earlier input"),
        (
            norm_with(lambda n, x: F.dropout(exact(n, x), 0.1, n.training)),
            "it answers differently from call to call, in training",
        ),
        (norm_with(lambda n, x: plain(x, n.weight.roll(1), n.bias, n.eps)), "the scale read one"),
        (norm_with(lambda n, x: exact(n, x) * (1.02 if x.ndim == 4 else 1)), "wrong only for 4-D input"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_mistake_of_some_inputs_fails_every_dtype(norm: type[nn.Module], mistake: str) -> None:
    report = check(norm, SEQUENCES)
    assert failed_dtypes(report) == EVERY
    assert len(report.diagnoses) == 1
    assert report.diagnoses[0].startswith(mistake), report.diagnoses


# --- Widths ---


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


@pytest.mark.parametrize(
    ("forward", "mistake"),
    [
        (tiles, "wrong only at widths 2, 3, 31, 32, 33, 34 and "),
        (lanes, "wrong only at widths 3, 31, 33, 34, 36, 40 and "),
        (merged, "wrong only at widths 513, 768, 1001, 1023, 1024, 1025 and "),
        (quarters, "each 16 of the 64 values of a row are normalized by themselves"),
        (
            lambda n, x: exact(n, x) * (1.02 if x.shape[-1] > 4096 else 1),
            "wrong only at widths 4097, 8191, ",
        ),
        (lambda n, x: exact(n, x) * (1.02 if x.shape[-1] == 192 else 1), "wrong only at widths 192"),
    ],
)
def test_the_widths_that_are_wrong_are_listed(forward: Callable[..., Tensor], mistake: str) -> None:
    report = check(norm_with(forward), WIDTHS)
    assert failed_dtypes(report) == EVERY
    assert len(report.diagnoses) == 1
    assert report.diagnoses[0].startswith(mistake), report.diagnoses


def test_a_width_that_a_norm_refuses_is_a_note() -> None:
    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        if x.shape[-1] % 8:
            raise ValueError("the width must be a multiple of 8")
        return exact(norm, x)

    report = check(norm_with(forward), ["widths", "ordinary rows"])
    assert report.passed, report
    assert report.diagnoses == []
    assert "it refuses widths that no GPT-2 has, 2, 3, 31 and " in report.notes[0]
    assert "the width must be a multiple of 8" in report.notes[0]
    needed = norm_with(lambda n, x: forward(n, x[..., :7]) if x.shape[-1] == 768 else exact(n, x))
    assert not check(needed, ["widths"]).passed


# --- Gradients ---


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


@pytest.mark.parametrize(
    ("where", "dtypes"), [(lambda dy: dy.ndim == 3, EVERY), (lambda dy: dy.dtype in HALVES, {"bfloat16", "float16"})]
)
def test_an_incoming_gradient_that_is_overwritten_is_named(where: Callable[[Tensor], bool], dtypes: set[str]) -> None:
    cases = [*OF_GRADIENTS, "incoming gradient left as it was"]
    report = check(norm_with(lambda n, x: Overwrites.apply(exact(n, x), where)), cases)
    assert failed_dtypes(report) == dtypes
    (mistake,) = report.diagnoses
    assert mistake.startswith("its backward pass changes the incoming gradient")


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


def test_a_backward_pass_that_divides_by_the_scale_is_named() -> None:
    report = check(norm_with(of_output), OF_GRADIENTS)
    assert failed_dtypes(report) == EVERY
    assert "the gradient of the input is wrong: it is not finite where the scale is 0" in report.diagnoses


def last_row_halved(terms: Tensor) -> Tensor:
    return terms[:-1].sum(0) + terms[-1] / 2


def from_neighbours(p: dict[str, Any]) -> dict[str, Any]:
    """The means of a row's gradient are those of the row before it."""
    before = (p["g"] * p["s"]).flatten(0, -2).roll(1, 0).view_as(p["g"])
    return {"second": 0.0, "g": p["g"] - p["s"] * before.mean(-1, keepdim=True)}


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        (lambda p: {"sum": last_row_halved}, f"{sabotages.OF_WEIGHT}no known mistake fits"),
        (lambda p: {"sum_bias": last_row_halved}, f"{sabotages.OF_BIAS}no known mistake fits"),
        (from_neighbours, f"{sabotages.OF_INPUT}that of a row depends on the other rows of the batch"),
    ],
)
def test_rows_that_are_lost_or_mixed_in_the_backward_pass_are_named(change: Any, mistake: str) -> None:
    norm = norm_with(lambda n, x: sabotages.Backward.apply(x, n.weight, n.bias, n.eps, change))
    report = check(norm, OF_GRADIENTS)
    assert failed_dtypes(report) == EVERY
    (named_mistake,) = report.diagnoses
    assert named_mistake.startswith(mistake)
