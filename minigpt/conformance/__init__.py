"""Is this class a LayerNorm? Hard rows, shapes, dtypes, gradients and torch.compile, and the name of what is wrong.

check.py                    run the cases on a norm, and where one fails look for the mistake
values.py  layouts.py  behaviour.py  sums.py  gradients.py  compiling.py      the cases
  case.py                   one question to a norm: what is measured, against which bound
  subject.py                the norm under check, built with weights that hide nothing
  settings.py               what holds for the whole process, put back afterwards
  rows.py  truth.py         the inputs; LayerNorm of them in float64, and what rounding alone may add
diagnosis.py                from failed cases to the name of the mistake
  probe.py                  ask the norm for one more answer
  formula.py  precision.py  mistakes of formula; of too few bits
report.py                   what came out
summary.py                  the same, as a person reads it in a terminal
"""

from minigpt.conformance.check import case_names, check_norm
from minigpt.conformance.conformance_report import CaseResult, ConformanceReport

__all__ = ["CaseResult", "ConformanceReport", "case_names", "check_norm"]
