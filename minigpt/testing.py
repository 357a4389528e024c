"""Assertions for the test suites of people who write norms, or a GPT-2.

With pytest, one test for a norm::

    def test_my_norm_is_a_layer_norm():
        minigpt.testing.assert_norm_parity(MyNorm)

or one test for each case::

    @pytest.mark.parametrize("case", minigpt.testing.norm_cases())
    def test_my_norm(case):
        minigpt.testing.assert_norm_parity(MyNorm, cases=case)
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.conformance import case_names as norm_cases
from minigpt.conformance import check_norm
from minigpt.judge.original import parity
from minigpt.norms import NormSpec
from minigpt.recipe import Recipe

__all__ = ["assert_norm_parity", "assert_parity", "norm_cases"]


def assert_norm_parity(
    norm: NormSpec,
    *,
    kind: str | None = None,
    cases: str | Iterable[str] = "*",
    device: str | torch.device | None = None,
    seed: int = 0,
    arrays: str | None = None,
    every_case: bool = False,
) -> None:
    """Assert that ``norm`` is a LayerNorm, or an RMSNorm, at every dtype, as ``conformance.check_norm`` judges it.

    Args:
        norm: a norm, as ``minigpt.norms.build`` takes it: a class, a registered name, "package.module:Name", ...
        kind: "layer_norm" or "rms_norm"; None for what the norm claims, a LayerNorm if it claims neither.
        cases: one or more shell-style patterns for names and groups of cases: "float16, *", "gradients".
        device: where to run it; CUDA by default if there is one, else the CPU.
        seed: of the rows and weights.
        arrays: the package whose arrays the norm takes, if it is a function ``norm(x, weight, bias, eps)``: "numpy",
            "jax", ...; None for what its attribute ``arrays`` says.
        every_case: whether to ask torch.compile also at dtypes where another case fails.

    Raises:
        AssertionError: if it is not. The message names the mistake, then each failed case with its error and bound.
        NormError: if the norm is not found, cannot be built or run at all, or no case matches.
        ConfigError: if the device is unknown or absent.
    """
    __tracebackhide__ = True  # pytest then points at the line of the test
    report = check_norm(norm, kind=kind, cases=cases, device=device, seed=seed, arrays=arrays, every_case=every_case)
    if not report.passed:
        raise AssertionError(str(report))


def assert_parity(
    candidate: "str | Path | Recipe | nn.Module | Callable[[Tensor], Any]", against: str | Path, **how: Any
) -> None:
    """Assert that ``candidate`` computes the model ``against``, as ``minigpt.parity`` judges it.

    One test of a GPT-2 that you wrote::

        def test_my_gpt2():
            minigpt.testing.assert_parity(my_model, "gpt2", gradients=True)

    Args:
        candidate, against: as ``minigpt.parity`` takes them: a module, or a function of ids (B, T) to logits (B, T, V).
        how: its other arguments.

    Raises:
        AssertionError: if parity does not hold. The message is the report's summary: reasons first, then figures.
        MiniGPTError: if it cannot be judged.
    """
    __tracebackhide__ = True
    report = parity(candidate, against=against, **how)
    if not report.passed:
        raise AssertionError(str(report))
