"""For the test suites of those who write norms and kernels for them.

In a suite that already runs pytest, one test a norm::

    def test_my_norm_is_a_layer_norm():
        minigpt.testing.assert_norm_parity(MyNorm)

or one test a case, so that each is reported by its name::

    @pytest.mark.parametrize("case", minigpt.testing.norm_cases())
    def test_my_norm(case):
        minigpt.testing.assert_norm_parity(MyNorm, cases=case)
"""

from collections.abc import Iterable

import torch

from minigpt.conformance import case_names, check_norm
from minigpt.norms import NormSpec

__all__ = ["assert_norm_parity", "norm_cases"]


def assert_norm_parity(
    norm: NormSpec,
    *,
    cases: str | Iterable[str] = "*",
    device: str | torch.device | None = None,
    seed: int = 0,
    compile_backend: str | None = None,
) -> None:
    """Nothing, if ``norm`` is a LayerNorm; see ``minigpt.conformance.check_norm`` for what is asked of it.

    Args:
        norm: as ``minigpt.norms.build`` takes it: a class, a registered name, "package.module:Name", ...
        cases: a shell-style pattern, or several, over the names and groups of the cases: "float16, *", "gradients".
        device: where to run it; by default CUDA where there is one, else the CPU.
        seed: of the rows and weights; another seed asks the same of other numbers.
        compile_backend: of torch.compile; by default inductor where it can compile for this device, else aot_eager.

    Raises:
        AssertionError: it is not one. The message names what is wrong, then each failed case with its error and bound.
        NormError: it cannot be judged: it is not found, cannot be built or run at all, or no case matches.
        ConfigError: the device is unknown or absent.
    """
    __tracebackhide__ = True  # pytest then points at the line of the test
    report = check_norm(norm, cases=cases, device=device, seed=seed, compile_backend=compile_backend)
    if not report.passed:
        raise AssertionError(str(report))


def norm_cases() -> list[str]:
    """The name of every case, as ``cases`` takes it."""
    return case_names()
