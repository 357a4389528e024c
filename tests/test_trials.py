"""Every accelerator that raises or computes wrong numbers is left aside, with one warning; the plain path goes on."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_within, max_abs, small_model
from torch import Tensor

import minigpt
from minigpt import NormError, norms, trials
from minigpt.conformance import check_norm
from minigpt.device import HALVES
from minigpt.engine import compile_steps
from minigpt.report.describe import describe

HOW: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no compiler here\nand more of it")


def lying(true: Callable[..., Any]) -> Callable[..., Any]:
    """The same numbers, the first of them a tenth too large."""

    def changed(*given: Any, **how: Any) -> Any:
        found = true(*given, **how)
        return found * 1.1 if isinstance(found, Tensor) else (found[0] * 1.1, *found[1:])

    return changed


@pytest.fixture(autouse=True)
def _first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_failures", {})


def written(model: minigpt.GPT2, said: str | None) -> Tensor:
    """Write twice, and expect one warning in all."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        first, again = (minigpt.generate(model, torch.arange(10).view(2, 5), **HOW) for _ in range(2))
    assert torch.equal(first, again)
    ours = [str(warning.message) for warning in found if "not used" in str(warning.message)]
    assert len(ours) == (said is not None), ours
    assert not said or said in ours[0]
    return first


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "fails": (lambda true: raising, "RuntimeError: no compiler here"),
    "lies": (lying, "times the noise floor"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("unchecked")
def test_wrong_compiled_steps_are_left_aside(fault: str) -> None:
    change, said = FAULTS[fault]
    wanted = minigpt.generate(small_model(), torch.arange(10).view(2, 5), **HOW)

    model = compile_steps(small_model(), backend=lambda graph, inputs: change(graph.forward))
    assert torch.equal(written(model, "compiled steps"), wanted)
    assert said in str(trials.results())


@pytest.fixture
def kernels(triton_device: torch.device) -> Any:
    from minigpt.norms.triton import ops

    return ops


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", ["_forward_by_kernel", "_backward_by_kernel"])
def test_wrong_kernels_of_norms_are_left_aside(
    kernel: str, fault: str, kernels: Any, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = FAULTS[fault]
    monkeypatch.setattr(kernels, kernel, change(getattr(kernels, kernel)))
    norm, truth = (norms.build(name, (4, 12)).to(triton_device) for name in ("triton", "fused"))
    truth.load_state_dict({name: torch.randn(4, 12) for name in truth.state_dict()})
    norm.load_state_dict(truth.state_dict())
    x, delta, dy = torch.randn(3, 5, 4, 12, device=triton_device)
    with pytest.warns(UserWarning, match="triton norms not used") as found:
        total, y = norms.add_norm(norm, x.requires_grad_(), delta.requires_grad_())
    given = torch.autograd.grad([total, y], [x, delta, *norm.parameters()], [dy, dy])
    assert len(found) == 1
    assert said in str(found[0].message)
    wanted = torch.autograd.grad([x + delta, truth(x + delta)], [x, delta, *truth.parameters()], [dy, dy])
    for one, other in zip([y, *given], [truth(x + delta), *wanted], strict=True):
        assert_within(max_abs(one - other), 1e-5 * max_abs(other), max_abs(other), "")
    for dtype in HALVES:
        with pytest.warns(UserWarning, match="triton norms not used"):
            assert norm.to(dtype)(x.to(dtype)).dtype == dtype


def test_the_kernels_of_norms_pass(kernels: Any, triton_device: torch.device) -> None:
    for dtype in (torch.float64, torch.float32, *HALVES):
        norms.build("triton", 160).to(triton_device, dtype)(torch.randn(3, 160, device=triton_device, dtype=dtype))
    assert list(trials.results().values()) == [None] * 4


def test_a_norm_without_its_kernels_is_not_judged(
    kernels: Any, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be PyTorch's arithmetic that is judged by its name."""
    monkeypatch.setattr(kernels, "_forward_by_kernel", raising)
    with pytest.raises(NormError, match=r"norm 'triton' cannot be judged: it fails on c.* no compiler here"):
        check_norm("triton", device=triton_device, cases="width 1001")
    with pytest.raises(NormError, match="norm 'triton' cannot be judged"), pytest.warns(UserWarning, match="not used"):
        minigpt.parity("demo", norm="triton", device=triton_device, prompts=["a"], max_new_tokens=0)


def test_a_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIGPT_ACCELERATORS", "0")
    written(compile_steps(small_model(), backend=raising), None)
    assert trials.results() == {}
    with pytest.raises(NormError, match="turned off by MINIGPT_ACCELERATORS=0"):
        norms.build("triton", 8)
    assert describe("demo")["accelerators"] == ["turned off by MINIGPT_ACCELERATORS=0"]
