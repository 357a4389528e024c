"""What other packages compute has a name (plants.py has most), and a right norm that adds in another order passes."""

from typing import Any

import packages
import pytest
import sabotages
import torch
import torch.nn.functional as F
from kit import check, failed_dtypes
from norm_classes import NoGradient
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from minigpt import LayerNorm
from minigpt.conformance.behaviour import MIXED_PRECISION

pytestmark = pytest.mark.usefixtures("unchecked")

HALVES = {"bfloat16", "float16"}
WIDE = ["ordinary rows", "constant rows", "width 768", "width 4096"]


# --- Names ---


RMS_ROWS = {
    "the mean square is rounded": lambda x, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(),
    "1 / sqrt(mean square) is rounded": lambda x, eps: (
        x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt().to(x.dtype).float()
    ),
}


@pytest.mark.parametrize("name", [next(iter(RMS_ROWS)), pytest.param([*RMS_ROWS][1], marks=pytest.mark.thorough)])
def test_an_rms_norm_with_statistics_in_half_precision_is_named(name: str) -> None:
    def forward(norm: Any, x: Tensor) -> Tensor:
        return (RMS_ROWS[name](x, norm.variance_epsilon) * norm.weight).to(x.dtype)

    norm = type("Half", (LlamaRMSNorm,), {"forward": forward})
    report = check(norm, ["ordinary rows", "roundings"], kind="rms_norm")
    expected = [f"{narrow}: {name} to " for narrow in sabotages.NARROW]
    of_halves = [message for message in report.diagnoses if "float64" not in message]
    assert [message.startswith(start) for message, start in zip(of_halves, expected, strict=True)] == [True, True]


def test_a_norm_with_one_plus_weight_has_a_scale() -> None:
    (note,) = (note for note in check(NemotronLayerNorm1P, "no bias").notes if "applied to its output" in note)
    assert note.startswith("NemotronLayerNorm1P has no plain scale (it multiplies by more than weight")


# --- Orders of sums ---


def test_a_serial_sum_passes_and_its_error_is_said_to_grow() -> None:
    report = check(packages.SERIAL, WIDE)
    assert report.passed, report
    assert any("its error grows with the width" in note for note in report.notes), report.notes
    assert any(note.startswith("a row of one value should give the shift") for note in report.notes), report.notes
    assert "note: its error grows with the width" in str(report)


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(norm, marks=[pytest.mark.thorough] if norm.__name__ != "lanes of 8" else [], id=norm.__name__)
        for norm in packages.ORDERS
    ],
)
def test_another_order_of_sums_passes_and_does_not_grow(norm: type[LayerNorm]) -> None:
    report = check(norm, WIDE)
    assert report.passed, report
    assert not any("grows" in note for note in report.notes), report.notes


def test_the_fused_norm_has_constant_rows_right() -> None:
    assert check("fused", WIDE).notes == []


# --- Rows whose sum of squares overflows ---


def scaled_first(norm: Any, x: Tensor) -> Tensor:
    """The row is divided by its largest value first, so that no square overflows."""
    largest = sabotages.wide(x).abs().amax(-1, keepdim=True).clamp(min=1)
    row = sabotages.wide(x) / largest
    d = row - row.mean(-1, keepdim=True)
    return sabotages.affine(norm, d / torch.sqrt(d.square().mean(-1, keepdim=True) + norm.eps / largest**2)).to(x.dtype)


def test_what_pytorch_itself_does_is_said_and_a_norm_that_is_right_there_passes() -> None:
    said = "float32 rows of 1e18 come out as the shift, as PyTorch's own do: the sum of their squares overflows"
    x = 1e18 * torch.randn(4, 768)
    assert not F.layer_norm(x, (768,)).any(), "PyTorch itself"
    assert check("fused", "huge values").notes == [said]
    norm = packages.norm_of(scaled_first)
    assert norm(768)(x).std() > 0.9
    report = check(norm, ["values", "gradients, massive*"])
    assert report.passed, report
    assert said not in report.notes


# --- What raises ---


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no derivative")


def raises_in_backward_at(dtype: torch.dtype) -> type[LayerNorm]:
    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        y = sabotages.exact(norm, x)
        return RaisesInBackward.apply(y) if x.dtype == dtype else y  # type: ignore[return-value]

    return packages.norm_of(forward)


@pytest.mark.parametrize(
    ("norm", "dtypes", "words"),
    [
        (NoGradient, {"float32", "float64", *HALVES}, "does not require grad"),
        (raises_in_backward_at(torch.float64), {"float64"}, "no derivative"),
        (raises_in_backward_at(torch.bfloat16), {"bfloat16"}, "no derivative"),
        (
            packages.norm_of(lambda n, x: sabotages.exact(n, x).to(torch.promote_types(x.dtype, torch.float32))),
            HALVES,
            "changes the dtype",
        ),
        (
            packages.norm_of(lambda n, x: LayerNorm.forward(n, x.float()).to(min(x.dtype, torch.float32, key=size_of))),
            {"float64"},
            "changes the dtype",
        ),
        (
            packages.norm_of(sabotages.raises("rows of three", lambda n, x: x.ndim == 3 and x.dtype == torch.float64)),
            {"float64"},
            "rows of three",
        ),
    ],
)
def test_what_a_norm_raises_fails_at_its_dtype(norm: type[nn.Module], dtypes: set[str], words: str) -> None:
    report = check(norm, ["ordinary rows", "3-D input", "gradients, as tokens"])
    assert failed_dtypes(report) == dtypes
    assert any(words in sentence for sentence in report.diagnoses), report.diagnoses


def size_of(dtype: torch.dtype) -> int:
    return dtype.itemsize


def test_a_norm_that_takes_no_float64_at_all_is_not_judged_there() -> None:
    report = check(sabotages.NoFloat64, ["ordinary rows", "gradients, as tokens"])
    assert report.passed
    assert "float64" not in report.dtypes


def rounds_its_eps(norm: LayerNorm, x: Tensor) -> Tensor:
    """As a wrapper of another runtime: no bfloat16, and an eps in float32."""
    if x.dtype == torch.bfloat16:
        raise RuntimeError("no bfloat16")
    eps = float(torch.tensor(norm.eps, dtype=torch.float32))
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, eps)


def test_a_norm_that_raises_at_one_dtype_and_is_wrong_at_another_is_told_both() -> None:
    report = check(packages.norm_of(rounds_its_eps), ["values", "width 64", "width 1025", "gradients, as*"])
    assert failed_dtypes(report) == {"bfloat16", "float64"}
    assert "no bfloat16" in report.diagnoses[-1]
    assert not any("it refuses widths" in note for note in report.notes), report.notes


# --- 16-bit rows and float32 weights ---


def test_the_dtype_of_16_bit_rows_with_mixed_precision_is_judged_as_pytorchs() -> None:
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert nn.LayerNorm(64)(x).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):  # what breaks: the next layer
        nn.Linear(64, 64, dtype=torch.bfloat16)(packages.norm_of(packages.flax)(64)(x))
    report = check("fused", MIXED_PRECISION)
    assert report.dtypes == {"bfloat16": True, "float16": True}
    assert report.cases[0].outcomes["bfloat16"].note == "comes out in bfloat16"
    report = check(packages.norm_of(packages.flax), ["ordinary rows", MIXED_PRECISION])
    assert failed_dtypes(report) == HALVES
    assert "a layer of bfloat16 weights refuses" in report.diagnoses[0]


def test_an_rms_norm_that_returns_float32_as_llamas_does_passes_with_a_note() -> None:
    report = check(LlamaRMSNorm, ["ordinary rows", MIXED_PRECISION], kind="rms_norm")
    assert failed_dtypes(report) <= {"float64"}
    assert any("rounds its row" in note for note in report.notes)
    assert "bfloat16 rows with a float32 scale come out in float32, as with Llama's norms in transformers" in str(
        report
    )


def test_a_norm_that_refuses_mixed_precision_is_not_judged_there_and_says_so() -> None:
    refuses = sabotages.raises("expected scalar type BFloat16", lambda n, x: x.dtype != n.weight.dtype)
    report = check(packages.norm_of(refuses), ["ordinary rows", MIXED_PRECISION])
    assert report.passed
    assert any(note.startswith("it refuses bfloat16 rows with a float32 scale and shift") for note in report.notes)
