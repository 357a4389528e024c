"""Remarks on a norm that decide no verdict: what it shares with PyTorch, where it is less exact, what it refuses.

Each is measured only where its case was asked and the norm is right in float32.
"""

import contextlib
from collections.abc import Callable

import torch

from minigpt.conformance.behaviour import MIXED_PRECISION, rows_independent
from minigpt.conformance.case import Axis, judged_at
from minigpt.conformance.compare import distance
from minigpt.conformance.found import Results, listed_values
from minigpt.conformance.subject import Built, Subject
from minigpt.conformance.truth import CONSTANT, HUGE_VALUES, normal, ordinary
from minigpt.errors import raised
from minigpt.machine import one_thread
from minigpt.norms.foreign.adapt import notes
from minigpt.norms.formulas import exact_norm, norm_by_pytorch, way_of_rounding
from minigpt.precision import HALVES, dtype_name
from minigpt.report.numerals import brief

FEW_IN_WORDS = "widths 3, 64, 768, 1,001 and 4,096; up to 1,021 rows, 65 texts and 257 tokens"
OVERFLOW = 1e18  # its square is in float32, and the sum of 768 of them is not
NARROW_WIDTH, WIDE = 64, 4096
GROWTH = 4  # times PyTorch's own error. Sums in 8 lanes and more stay below 2 at this width; a serial sum has 10
CONSTANT_ROWS = torch.linspace(8_200.1, 16_300.3, 12, dtype=torch.float64)[:, None]  # most sums of many are not exact
OFF_THE_SHIFT = 0.2  # a mean that is off by one rounding gives 0.3 there, since sqrt(eps) is 0.003


@one_thread()
def remarks(subject: Subject, candidate: Built, results: Results) -> list[str]:
    """Return the remarks on a norm, a sentence each."""
    sentences = [*notes(candidate.module)]
    if candidate.lacks_gradients:
        sentences.append(f"gradients: not judged, since {subject.name} gives none; its attribute vjp would")
    if subject.has_few_shapes:
        sentences.append(f"few shapes, since its package compiles each operation again for each: {FEW_IN_WORDS}")
    sentences += row_alone(subject, results)
    sentences += refusals(results)
    adapted = candidate.adapted
    if not (subject.centers or (adapted and adapted.multiplies)):
        with contextlib.suppress(Exception):
            sentences += rounds_row(subject.drawing_for("remarks"))
    sentences += lost_by_pytorch(results)
    if any("float32" in case.failed_at for case in results):
        return sentences
    of_cases: list[tuple[str, Callable[[Subject], list[str]]]] = [
        (MIXED_PRECISION, note_on_mixed_precision),
        (HUGE_VALUES.name, overflow),
        (CONSTANT.name, constant_rows),
        (str(WIDE), growth),
    ]
    values = {case.value for case in results}
    for value, remark in of_cases:
        if value in values:
            with contextlib.suppress(Exception):
                sentences += remark(subject.drawing_for("remarks"))
    return sentences


def row_alone(subject: Subject, results: Results) -> list[str]:
    """Return a sentence if a row has other bits alone than among others, which packages but PyTorch may give it."""
    if subject.repeats_bits:
        return []
    for case in results:
        error = case.worst_measured.error
        if case.compare is rows_independent and error:
            return [f"a row has other bits alone than among others, within rounding: they differ by {brief(error)}"]
    return []


@torch.no_grad()
def note_on_mixed_precision(subject: Subject) -> list[str]:
    """Return a sentence if 16-bit rows with float32 weights are refused, or come out in another dtype."""
    norm = subject.candidate()
    for dtype in HALVES:
        if dtype in subject.raises:
            continue
        rows = dtype_name(dtype)
        try:
            y = norm.call(subject.rows(4, 64, dtype=dtype))
        except raised() as error:
            return [f"it refuses {rows} rows with a float32 scale and shift, as PyTorch's own does on CUDA: {error}"]
        if y.dtype != dtype:
            sentence = f"{rows} rows with a float32 scale come out in {dtype_name(y.dtype)}"
            if not subject.centers:
                sentence += ", as with Llama's norms in transformers"
            return [sentence]
    return []


def overflow(subject: Subject) -> list[str]:
    """Return a sentence if rows whose sum of squares overflows come out as the shift, or not finite."""
    x = (OVERFLOW * normal(subject.generator, 4, 768)).float().double()
    y = subject.ask(x)
    rows = f"float32 rows of {OVERFLOW:.0e}".replace("e+", "e")
    if not y.isfinite().all():
        return [f"{rows} come out as NaN or infinities: the sum of their squares overflows"]
    if y.abs().max() < 1e-3:
        return [f"{rows} come out as the shift, as PyTorch's own do: the sum of their squares overflows"]
    return []


def constant_rows(subject: Subject) -> list[str]:
    """Return a sentence if large constant rows do not come out as the shift."""
    if not subject.centers:
        return []
    worst, width = 0.0, NARROW_WIDTH
    for n in (NARROW_WIDTH, 768, WIDE):
        x = CONSTANT_ROWS.expand(-1, n).float().double()
        off = subject.ask(x).abs().max().item()
        if off > worst:
            worst, width = off, n
    if worst < OFF_THE_SHIFT:
        return []
    return [
        f"a row of one value should give the shift: float32 rows near 10,000 are off by {brief(worst)} at width "
        f"{width:,}, since the mean is rounded; PyTorch's norm is exact there"
    ]


def growth(subject: Subject) -> list[str]:
    """Return a sentence if the error, over that of PyTorch's own norm, grows with the width."""
    narrow = error_beside_pytorch(subject, NARROW_WIDTH)
    wide = error_beside_pytorch(subject, WIDE)
    if wide < max(GROWTH, 2 * narrow):
        return []
    return [
        f"its error grows with the width: {narrow:.2g} times PyTorch's own at {NARROW_WIDTH}, "
        f"{wide:.2g} times at {WIDE:,}, as if each row were added from left to right in one float32 sum"
    ]


def error_beside_pytorch(subject: Subject, width: int) -> float:
    """Return the error on ordinary float32 rows over that of PyTorch's own norm, both RMS."""
    x = ordinary(16, width, subject.generator).float().double()
    true = exact_norm(x, subject.kind)
    by_pytorch = norm_by_pytorch(x.float(), subject.kind).double()
    return distance(subject.ask(x), true) / max(distance(by_pytorch, true), 1e-9)


@one_thread()
def second_derivatives(subject: Subject) -> list[str]:
    """Return a sentence if the norm has no second derivatives in float64, or wrong ones; training needs neither."""
    try:
        norm = subject.drawing_for("second derivatives").candidate(width=6, dtype=torch.float64).module.cpu()
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6).sin().requires_grad_()
        leaves = (x, *norm.parameters())
        right = torch.autograd.gradgradcheck(lambda x, *_: norm(x), leaves, raise_exception=False, fast_mode=True)
    except raised():
        return ["it has no second derivatives in float64, or none on the CPU; training needs only first ones"]
    if right:
        return []
    return ["its second derivatives are wrong in float64; training needs only first ones"]


def lost_by_pytorch(results: Results) -> list[str]:
    """Return a sentence on the digits that PyTorch's own backward pass loses, if the norm calls it."""
    losses = [(0.0, "")]
    for case in results:
        if case.axis is not Axis.WIDTH:  # at width 2 most of a gradient cancels
            place = case.axis.named(case.value)
            losses += [(outcome.lost, f"{place} in {name}") for name, outcome in case.outcomes.items()]
    lost, where = max(losses)
    if not lost:
        return []
    return [
        "PyTorch's own backward pass computes its gradients. On a CPU, in half precision, it adds those of scale and "
        f"shift row by row, and rounds mean and deviation: they are off by {lost:.0%} for {where}, and one rounding "
        "by 0.2%. All other steps are right, so it passes; textbook has these in float32"
    ]


def rounds_row(subject: Subject) -> list[str]:
    """Return a sentence if an RMSNorm rounds its row before its weight multiplies it, which is allowed."""
    scale = torch.linspace(0.5, 1.5, 64, dtype=torch.float64).bfloat16().double()
    x = ordinary(8, 64, subject.generator).bfloat16()
    y = subject.ask(x, scale, dtype=torch.bfloat16)
    if way_of_rounding(y, exact_norm(x, subject.kind), scale) == "row":
        return ["in half precision it rounds its row before the weight multiplies it, and after, as Llama's does"]
    return []


def refusals(results: Results) -> list[str]:
    """Return a sentence on the widths that the norm refuses."""
    refused = []
    judged = judged_at(results) - {"float64"}
    for case in results:
        if case.axis is not Axis.WIDTH or case.is_backward:
            continue
        if case.refused.keys() & judged:
            refused.append(case)
    if not refused:
        return []
    widths = listed_values(refused[:3])
    if len(refused) > 3:
        widths += f" and {len(refused) - 3} more"
    reason, *_ = refused[0].refused.values()
    return [f"it refuses widths that no GPT-2 has, {widths}: {reason}"]
