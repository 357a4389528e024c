"""A few tokens' product by the fastest call is the product, whatever the shape, the layout and the dtype."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_within, needs_onednn, random_ids, rms, small_model

import minigpt.engine.product
from minigpt.engine.product import PIECE, product
from minigpt.precision import HALVES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (5, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_is_the_affine_product(shape: tuple[int, int], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, rows = torch.randn(*shape, 24).to(device, dtype), torch.randn(37, 24).to(device, dtype)
    shift = torch.randn(37).to(device, dtype) if bias else None
    truth = F.linear(x.double(), rows.double(), None if shift is None else shift.double())
    supplied = product(x, rows.t(), shift)
    assert supplied.shape == (*shape, 37)
    assert supplied.dtype == dtype
    assert_within(rms(supplied.double() - truth), 2 * torch.finfo(dtype).eps * rms(truth), rms(truth), f"{shape}")


def shapes_given(call: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of ``x`` in every ``call`` from now on, of those that ``product`` chooses from."""
    shapes: list[tuple[int, ...]] = []
    whole = getattr(minigpt.engine.product, call)

    def spy(x: torch.Tensor, *more: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return whole(x, *more)

    monkeypatch.setattr(minigpt.engine.product, call, spy)
    return shapes


@pytest.fixture
def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a processor of AMD's with AVX-512."""
    monkeypatch.setattr("minigpt.engine.product.PREFERS_ONEDNN", True)
    return shapes_given("onednn_linear", monkeypatch)


@pytest.fixture
def float32_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a processor without instructions for halves."""
    monkeypatch.setattr("minigpt.engine.product.SLOW_HALVES", HALVES)
    return shapes_given("in_float32", monkeypatch)


def by_rows(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().t()


@needs_onednn
@pytest.mark.parametrize("lies_by_rows", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 20), (1, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_takes_either_layout(
    shape: tuple[int, int], bias: bool, lies_by_rows: bool, onednn_calls: list[tuple[int, ...]]
) -> None:
    x, weight = torch.randn(*shape, 48)[..., ::2], torch.randn(24, 37)
    shift = torch.randn(74)[::2] if bias else None
    truth = x.double() @ weight.double() + (0 if shift is None else shift.double())
    with torch.inference_mode():
        supplied = product(x, by_rows(weight) if lies_by_rows else weight, shift)
    assert onednn_calls == [(*shape, 24)]
    assert supplied.shape == (*shape, 37)
    assert_within(rms(supplied - truth), 2e-7 * rms(truth), rms(truth), f"{shape}")


@needs_onednn
def test_onednn_is_left_alone_where_it_does_not_belong(onednn_calls: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(1, 3, 24), torch.randn(24, 37, requires_grad=True)
    product(x, weight).sum().backward()
    assert weight.grad is not None, "it has no derivative"
    with torch.no_grad():
        product(x, weight)
    with torch.inference_mode():
        assert product(x.double(), weight.double()).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16):
            assert product(x, weight, torch.zeros(37)).dtype == torch.bfloat16
        exact = small_model(arithmetic="reference")
        exact(random_ids(2, 7))
    assert not onednn_calls
    with torch.inference_mode():
        small_model()(random_ids(2, 7))
    assert len(onednn_calls) == 2 * 4 + 1, "two blocks and the head"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lies_by_rows", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("out", [1, 37, 2 * PIECE, 2 * PIECE + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_halves_that_a_processor_does_not_know_are_multiplied_in_float32(
    mode: Any, bias: bool, out: int, rows: int, lies_by_rows: bool, dtype: torch.dtype,
    float32_calls: list[tuple[int, ...]],
) -> None:  # fmt: skip
    x, weight = torch.randn(1, rows, 24).to(dtype), torch.randn(24, out).to(dtype)
    shift = torch.randn(2 * out).to(dtype)[::2] if bias else None
    truth = x.double() @ weight.double() + (0 if shift is None else shift.double())
    with mode():
        supplied = product(x, by_rows(weight) if lies_by_rows else weight, shift)
    assert float32_calls == [(1, rows, 24)]
    assert supplied.shape == (1, rows, out)
    assert supplied.dtype == dtype
    assert (supplied == truth.to(dtype)).float().mean() > 0.99, "rounded once, bias and all"
    assert_within(rms(supplied - truth), torch.finfo(dtype).eps * rms(truth), rms(truth), f"{rows} rows")


def test_float32_stands_in_for_halves_only_where_it_may(float32_calls: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(1, 5, 24).bfloat16(), torch.randn(24, 37).bfloat16().requires_grad_()
    product(x, weight).sum().backward()
    assert weight.grad is not None, "whoever trains keeps no copy of the weights"
    with torch.no_grad():
        product(x.float(), weight.float())
        with torch.autocast("cpu", torch.bfloat16):
            product(x, weight)
        small_model(arithmetic="reference", dtype=torch.bfloat16)(random_ids(2, 7))
        assert not float32_calls
        small_model(dtype=torch.bfloat16)(random_ids(2, 7))
    assert len(float32_calls) == 2 * 4 + 1, "two blocks and the head"
