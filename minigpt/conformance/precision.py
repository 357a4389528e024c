"""Mistakes of precision: statistics narrower than float32, and a variance that cancels.

LayerNorm does not change when a row is shifted or stretched (arXiv 1607.06450, section 5.1). What changes then is the
rounding, which tells in how many bits a norm computes, whatever else it does.
"""

import torch

from minigpt.conformance.probe import Probe, distance, rescaled
from minigpt.conformance.truth import PRECISIONS
from minigpt.placement import dtype_name

ROWS, WIDTH = 16, 64
FLOAT16 = PRECISIONS[torch.float16].result  # u
BFLOAT16 = PRECISIONS[torch.bfloat16].result
APPROXIMATE = 16 * 2**-24  # beyond float32's own rounding
ROUNDING = 0.58  # RMS of one rounding's error over u, for errors spread evenly: 1 / sqrt(3)


def narrow_statistics(probe: Probe) -> list[str]:
    """Whether the statistics of float32 rows are kept in fewer bits than float32 has."""
    doubled = _off_by_doubling(probe)
    if doubled >= FLOAT16 / 8:
        return []
    shifted, stretched = shift_rounding(probe, 64.0, torch.float32, of_mean=True), _stretch_rounding(probe)
    off = max(shifted, stretched)
    if off >= FLOAT16 / 8 and _overflows(probe):
        return ["statistics are kept in float16"]
    if shifted < FLOAT16 / 8:  # few bits would tell in the mean too
        is_approximate = stretched > max(APPROXIMATE, 8 * doubled)
        return [f"the deviation is approximate, off by some {stretched:.0e} of it"] * is_approximate
    narrow = "bfloat16" if off > 2.8 * FLOAT16 else "11 bits, as TF32 has"
    return [f"statistics are kept in {narrow}"] if off < 8 * BFLOAT16 else []


def narrow_half_statistics(probe: Probe, dtype: torch.dtype) -> list[str]:
    """Whether the statistics of rows in float16 or bfloat16 are kept in the same."""
    if _off_by_doubling(probe) >= FLOAT16 / 8:
        return []
    is_narrow = shift_rounding(probe, 64.0, dtype, of_mean=True) >= PRECISIONS[dtype].result / 8
    return [kept_in(dtype)] if is_narrow else []


def kept_in(dtype: torch.dtype) -> str:
    """What is said of a norm that keeps its statistics as narrow as its input."""
    return f"statistics are kept in {dtype_name(dtype)} for {dtype_name(dtype)} input"


def cancelling_variance(probe: Probe) -> list[str]:
    """Rounding that grows as the square of the shift: two-pass and Welford's algorithms lose only its first power."""
    near, far = (shift_rounding(probe, shift, torch.float32) / 2**-24 for shift in (64.0, 1024.0))
    if far > 100 and 5 * near < far < 60 * near:
        return ["variance is a difference of squares, E[x^2] - E[x]^2, which cancels where the mean is large"]
    return []


def shift_rounding(probe: Probe, shift: float, dtype: torch.dtype, *, of_mean: bool = False) -> float:
    """How much a shift of the row, itself free of rounding at ``dtype``, changes the result, relative to the shift.

    With ``of_mean``, but for what makes the row larger or smaller as a whole, as an eps does beside another variance.
    """
    if dtype == torch.float32:
        spacing, steps = 2**-10, 2**10  # a deviation of 1, in steps that float32 still holds beside the shift
    else:
        spacing, steps = shift * torch.finfo(dtype).eps, 2  # the finest steps that this dtype holds beside the shift
    x = spacing * (steps * probe.normal(ROWS, WIDTH)).round()
    plain, shifted = probe(x, dtype=dtype), probe(x + shift, dtype=dtype)
    off = distance(rescaled(shifted, plain) if of_mean else shifted, plain)
    return off * x.std(-1, correction=0).mean().item() / shift / ROUNDING


def _off_by_doubling(probe: Probe) -> float:
    """How much a row twice as large changes the result: no binary format rounds it otherwise, but most mistakes do."""
    x = 10 * probe.standard_rows(ROWS, WIDTH)
    return distance(probe(2 * x, dtype=torch.float32), probe(x, dtype=torch.float32))


def _stretch_rounding(probe: Probe) -> float:
    x = 10 * probe.standard_rows(1, WIDTH).expand(ROWS, WIDTH)
    stretched = x * torch.linspace(1, 2, ROWS, dtype=torch.float64)[:, None]
    return distance(probe(stretched, dtype=torch.float32), probe(x, dtype=torch.float32)) / ROUNDING


def _overflows(probe: Probe) -> bool:
    """Whether numbers that only float16 cannot hold come out wrong."""
    x = probe.standard_rows(ROWS, WIDTH)
    return distance(probe(1e5 * x + 1e6, dtype=torch.float32), probe(x, dtype=torch.float32)) > 0.5
