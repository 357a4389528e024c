"""How fast is a norm, and how near to a plain copy?"""

from minigpt.lab.bench_norms.contestants import CONTESTANTS
from minigpt.lab.bench_norms.measure import PASSES, ROWS, STREAMS, WIDTHS, NotTimed, bench_norms

__all__ = ["CONTESTANTS", "PASSES", "ROWS", "STREAMS", "WIDTHS", "NotTimed", "bench_norms"]
