"""In half precision PyTorch's own backward pass loses digits: no fault of a norm that calls it, and no excuse."""

from collections.abc import Iterator
from typing import Any

import pytest
import sabotages
import torch
import torch.nn.functional as F
from kit import check, failed_dtypes, norm_with
from sabotages import Backward, OneGroup, summed_in_half, wide
from torch import Tensor, nn

from minigpt import LayerNorm
from minigpt.norms.variants import RMSNorm
from minigpt.precision import HALVES

CASES = ["gradients, ordinary rows", "gradients, mean off 0", "gradients, 65,536 rows"]
HALF_NAMES = {"bfloat16", "float16"}


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.thorough), 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def in_pieces(norm: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).split(64)
    return torch.cat([F.layer_norm(one, norm.weight.shape, norm.weight, norm.bias, norm.eps) for one in rows]).view_as(
        x
    )


@pytest.mark.parametrize("norm", ["fused", OneGroup, norm_with(in_pieces)], ids=str)
def test_pytorchs_own_passes_with_what_it_loses(norm: Any) -> None:
    report = check(norm, CASES)
    assert report.passed, str(report)
    (lost,) = [note for note in report.notes if note.startswith("PyTorch's own backward pass computes its gradients")]
    assert "% for 65,536 rows in " in lost or norm is OneGroup


@pytest.mark.parametrize(
    "norm",
    ["textbook", sabotages.RightBackward, pytest.param(sabotages.Float64Inside, marks=pytest.mark.thorough)],
    ids=str,
)
def test_sums_in_float32_need_no_word(norm: Any) -> None:
    report = check(norm, CASES)
    assert report.passed, str(report)
    assert not any("PyTorch's own backward" in note for note in report.notes)


@pytest.mark.parametrize("norm", [RMSNorm, pytest.param(nn.RMSNorm, marks=pytest.mark.thorough)])
def test_rms_norms_pass(norm: Any) -> None:
    assert check(norm, CASES, kind="rms_norm").passed


def quarter(terms: Tensor) -> Tensor:
    return terms[: len(terms) // 4 if len(terms) > 60_000 else None].sum(0)


def of_a_quarter(norm: Any, x: Tensor) -> Tensor:
    """PyTorch's own backward pass, which three quarters of the rows do not reach."""
    rows = x.reshape(-1, x.shape[-1])
    first = len(rows) // 4 if len(rows) > 60_000 and x.dtype in HALVES else len(rows)
    weights = (norm.weight, norm.bias), (norm.weight.detach(), norm.bias.detach())
    pieces = zip((rows[:first], rows[first:]), weights, strict=True)
    return torch.cat([F.layer_norm(one, norm.weight.shape, *own, norm.eps) for one, own in pieces]).view_as(x)


def in_half(p: dict[str, Any], value: Tensor) -> Tensor:
    return value.to(p["x"].dtype).to(value.dtype)


def of_rounded_mean(p: dict[str, Any]) -> dict[str, Any]:
    x = wide(p["x"])
    return {"s": (x - in_half(p, x.mean(-1, keepdim=True))) * p["r"]}


def backward_of(change: Any) -> type[LayerNorm]:
    return norm_with(lambda n, x: Backward.apply(x, n.weight, n.bias, n.eps, change))


@pytest.mark.parametrize(
    ("norm", "at", "named"),
    [
        (backward_of(lambda p: {"sum": quarter}), {"float32", "float64", *HALF_NAMES}, "only for 65,536 rows"),
        pytest.param(norm_with(of_a_quarter), HALF_NAMES, "only for 65,536 rows", marks=pytest.mark.thorough),
        pytest.param(
            backward_of(of_rounded_mean), HALF_NAMES, "the mean is rounded to bfloat16", marks=pytest.mark.thorough
        ),
        pytest.param(
            backward_of(lambda p: {"sum": summed_in_half} if len(p["x"]) < 2000 else {}),
            None,
            "the sum over the rows is",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_backward_pass_that_loses_as_much_fails(norm: Any, at: set[str] | None, named: str) -> None:
    cases = CASES if at is not None else ["gradients, 1,025 rows"]
    report = check(norm, cases)
    assert failed_dtypes(report) == (at or {"float32", "float64", *HALF_NAMES})
    assert all("the gradient of the" in sentence for sentence in report.diagnoses)
    assert named in report.diagnoses[0]


def twelve_bits(norm: Any, x: Tensor) -> Tensor:
    x = wide(x)
    centred = x - x.mean(-1, keepdim=True)
    mantissa, exponent = torch.frexp(torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps))
    inverse = torch.ldexp((mantissa * 2**12).round() / 2**12, exponent)
    return (centred * inverse * norm.weight + norm.bias).to(x.dtype)


def test_an_approximate_reciprocal_root_is_named() -> None:
    report = check(norm_with(twelve_bits), ["ordinary rows"])
    assert report.diagnoses[0].startswith("1 / deviation has 12 bits, as an approximate reciprocal root")
