"""Is this class a LayerNorm? Hard rows, shapes, dtypes, gradients and torch.compile, and the name of what is wrong.

check.py          runs the cases on a norm, and returns the report; summary.py shows it
  cases.py  behaviour.py      the cases
  case.py         the norm under check; one question to it at each dtype, compared within a bound, and the result
  truth.py        the inputs, LayerNorm in float64, and the bound on rounding
diagnosis.py      from failed cases to the name of the mistake
"""

from minigpt.conformance.case import CaseResult
from minigpt.conformance.check import ConformanceReport, case_names, check_norm

__all__ = ["CaseResult", "ConformanceReport", "case_names", "check_norm"]
