"""A few tokens' product by the fastest call is the product, whatever the shape, the layout and the dtype."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, assert_within, needs_onednn, random_ids, reference_model, rms, small_model
from torch import nn

from minigpt.engine.product import PIECE, in_float32, may_replace_addmm, onednn_linear, product
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


def by_rows(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().t()


@needs_onednn
@pytest.mark.parametrize("lies_by_rows", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 20), (1, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_takes_either_layout(shape: tuple[int, int], bias: bool, lies_by_rows: bool) -> None:
    x, weight = torch.randn(*shape, 48)[..., ::2], torch.randn(24, 37)
    shift = torch.randn(74)[::2] if bias else None
    truth = x.double() @ weight.double() + (0 if shift is None else shift.double())
    with torch.inference_mode():
        supplied = onednn_linear(x, (by_rows(weight) if lies_by_rows else weight).t(), shift)
    assert supplied.shape == (*shape, 37)
    assert_within(rms(supplied - truth), 2e-7 * rms(truth), rms(truth), f"{shape}")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lies_by_rows", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("out", [1, 37, 2 * PIECE, 2 * PIECE + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_halves_that_a_processor_does_not_know_are_multiplied_in_float32(
    mode: Any, bias: bool, out: int, rows: int, lies_by_rows: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(1, rows, 24).to(dtype), torch.randn(24, out).to(dtype)
    shift = torch.randn(2 * out).to(dtype)[::2] if bias else None
    truth = x.double() @ weight.double() + (0 if shift is None else shift.double())
    with mode():
        supplied = in_float32(x, by_rows(weight) if lies_by_rows else weight, shift)
    assert supplied.shape == (1, rows, out)
    assert supplied.dtype == dtype
    assert (supplied == truth.to(dtype)).float().mean() > 0.99, "rounded once, bias and all"
    assert_within(rms(supplied - truth), torch.finfo(dtype).eps * rms(truth), rms(truth), f"{rows} rows")


class Doubled(nn.Module):
    """It shows in its result whether another product than PyTorch's may be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if may_replace_addmm(x, self.weight) else 1)


def test_no_processor_takes_another_product_in_training_autocast_or_a_graph() -> None:
    x, doubled = torch.randn(1, 5, 24), Doubled()
    assert_same_bits(doubled(x), x, "training")
    with torch.no_grad():
        exported = torch.export.export(doubled, (x,)).module()
        assert_same_bits(exported(x), x, "exported")
        torch.compiler.reset()
        assert_same_bits(torch.compile(doubled, backend="eager", fullgraph=True)(x), x, "compiled")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_bits(doubled(x), 2 * x, "inference")
            assert not may_replace_addmm(x.bfloat16(), doubled.weight), "two dtypes"
            with torch.autocast("cpu", torch.bfloat16):
                assert_same_bits(doubled(x), x, "autocast")


def test_training_autocast_and_reference_arithmetic_are_pytorchs_own() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(1, 5, 24, dtype=dtype), torch.randn(24, 37, dtype=dtype, requires_grad=True)
        product(x, weight).sum().backward()
        ones = torch.ones(5, 37, dtype=dtype)
        assert_same_bits(weight.grad, x[0].t() @ ones, f"gradient at {dtype}")
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            assert product(x.float(), weight.float(), torch.zeros(37)).dtype == torch.bfloat16
        exact = small_model(arithmetic="reference")
        assert not any(type(part).__module__.startswith("minigpt.engine") for part in exact.modules())
        reference, ids = reference_model(), random_ids(2, 7)
        assert_same_bits(exact(ids), reference(ids).logits, "reference arithmetic")
