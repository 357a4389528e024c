"""The conformance kit as tests run it: on the CPU and from one seed; a norm with somebody's forward; what failed."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from minigpt import LayerNorm
from minigpt.conformance import ConformanceReport, check_norm

Forward = Callable[[Any, Tensor], Any]


def check(norm: Any, cases: str | list[str] = "*", *, seed: int = 0, **how: Any) -> ConformanceReport:
    return check_norm(norm, device="cpu", cases=cases, seed=seed, **how)


def norm_with(forward: Forward, base: type[LayerNorm] = LayerNorm, name: str = "Norm") -> type[LayerNorm]:
    """A subclass of ``base`` whose forward is ``forward(norm, x)``."""
    return type(name, (base,), {"forward": forward})


def failed_dtypes(report: ConformanceReport) -> set[str]:
    """The names of the dtypes at which a norm failed."""
    return {dtype for dtype, passed in report.dtypes.items() if not passed}
