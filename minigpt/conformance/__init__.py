"""Is this class a LayerNorm? Hard rows, shapes, dtypes, gradients and torch.compile, and the name of what is wrong.

check.py          runs the cases on a norm, and returns the report of summary.py, which shows it
  cases.py  behaviour.py      the cases
  case.py         one question to a norm at each dtype, and the result
  subject.py      the norm under check: how it is built and called
  compare.py      a tensor and the right one: the error, its bound, and where it is wrong
  truth.py        the inputs, LayerNorm in float64, and the bound on rounding
diagnosis.py      from failed cases to the name of the mistake
  probes.py  backward.py      outputs and gradients that no case asks for, and what explains them
  mistakes.py     the backward passes that have a name
  found.py        the sentences, and the cases that show them
"""

from minigpt.conformance.case import CaseResult
from minigpt.conformance.check import case_names, check_norm
from minigpt.conformance.summary import ConformanceReport

__all__ = ["CaseResult", "ConformanceReport", "case_names", "check_norm"]
