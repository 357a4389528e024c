"""Compare a tensor with the right one: the error, its bound, and where in the tensor it is wrong."""

import dataclasses
import enum
import math

import torch
from torch import Tensor

from minigpt.machine import one_thread


class Kind(enum.Enum):
    """The answer of a norm."""

    RIGHT = enum.auto()
    WRONG = enum.auto()
    RAISED = enum.auto()
    REFUSED = enum.auto()  # not judged: it does not support what the case needs, or was not tried


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a comparison, or of one case at one dtype: that of the element furthest beyond its bound.

    Attributes:
        ratio, error, bound: of the worst element; error and bound are None if nothing was measured.
        note: the comparison, for example "the second call"; or why nothing was measured.
        place: of what is wrong in the tensor: "rows from 256 on".
        parts: the gradients that are wrong, by name; "" for an output.
        lost: the RMS error over the RMS of a gradient that PyTorch's own backward pass computes.
    """

    kind: Kind
    ratio: float = 0.0
    error: float | None = None
    bound: float | None = None
    note: str = ""
    place: str = ""
    parts: frozenset[str] = frozenset()
    lost: float = 0.0


@one_thread()
def compare(what: str, value: Tensor, expected: Tensor, bound: Tensor | float | None = None, part: str = "") -> Outcome:
    """Compare two tensors that should be equal. A NaN equals nothing.

    Args:
        expected: as many elements as ``value``, or its first rows alone, which it repeats.
        bound: the largest error allowed, in the shape of ``expected``, or a number; None if they must be the same.
        part: the gradient's name; "" for an output.
    """
    value, expected = value.detach().cpu(), expected.detach().cpu()
    if value.numel() == 0 or (bound is None and torch.equal(value, expected)):
        return Outcome(Kind.RIGHT, 0.0, 0.0, 0.0, what)
    allowed = torch.as_tensor(0.0 if bound is None else bound, dtype=torch.float64).expand_as(expected).flatten()
    right, flat = expected.double().flatten(), value.flatten()
    largest, worst = -1.0, (0.0, 0.0)
    wrong = []
    is_repeated = repeats(flat, len(right))
    first, *others = flat.split(len(right))
    for piece in (first, *others):
        if wrong and (is_repeated or torch.equal(piece, first)):
            is_whole = len(piece) == len(first)
            wrong.append(wrong[0] if is_whole else wrong[0][: len(piece)])
            continue
        limit = allowed[: len(piece)]
        error, ratio = errors(piece.double(), right[: len(piece)], limit)
        index = int(ratio.argmax())
        if ratio[index] > largest:
            largest = float(ratio[index])
            worst = float(error[index]), float(limit[index])
        wrong.append(ratio > 1)
    if largest <= 1:
        return Outcome(Kind.RIGHT, largest, *worst, what)
    place = ""
    if not _is_everywhere(wrong, value):
        place = place_of(torch.cat(wrong).view(value.shape), value)
    return Outcome(Kind.WRONG, largest, *worst, what, place, frozenset({part}))


def repeats(flat: Tensor, period: int) -> bool:
    """Return True if the bits of a flat tensor repeat after so many elements."""
    size = flat.element_size()
    places = (flat.storage_offset(), len(flat), period)
    is_of_words = all(place * size % 8 == 0 for place in places)
    if len(flat) <= period or not is_of_words or not flat.is_contiguous():
        return False
    words = flat.view(torch.int64)
    shift = period * size // 8
    return torch.equal(words[shift:], words[:-shift])


def errors(value: Tensor, right: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors of float64 values, and their ratios to the limits; infinite for a NaN."""
    error = (value - right).abs_()
    ratio = error / limit
    if ratio.max().isfinite():
        return error, ratio
    error = torch.where(value == right, 0.0, error)  # infinities may be equal
    ratio = torch.where(error == 0, 0.0, error / limit)
    return error, ratio.nan_to_num(nan=math.inf, posinf=math.inf)


def _is_everywhere(pieces: list[Tensor], value: Tensor) -> bool:
    """Return True if each row and each column of ``value`` has a flag in its pieces, of which most are the first."""
    if value.ndim == 0:
        return False
    width = value.shape[-1]
    first = pieces[0].view(-1, width)
    if not first.any(0).all():
        return False
    different = [piece for piece in pieces if piece is not pieces[0]]
    return all(bool(piece.view(-1, width).any(-1).all()) for piece in (first, *different))


def place_of(wrong: Tensor, value: Tensor) -> str:
    """Describe where a tensor is wrong: "tokens from 1,024 on", "one row in 8 from 7 on (all 0)"; "" for no pattern."""
    if wrong.ndim == 0:
        return ""
    wrong, value = torch.atleast_2d(wrong), torch.atleast_2d(value)
    rows = wrong.any(-1)
    for name, flags in _dimensions(wrong):
        place = pattern_of(name, flags)
        if place:
            is_zero = not value[rows].any()
            return f"{place} (all 0)" if is_zero else place
    return ""


def _dimensions(wrong: Tensor) -> list[tuple[str, Tensor]]:
    """Return the flags of what is wrong along texts and tokens, if these decide it, along rows and along columns."""
    rows = wrong.any(-1)
    flags = []
    if rows.ndim == 2:
        for axis, name in enumerate(("text", "token")):
            along = rows.any(1 - axis, keepdim=True)
            if torch.equal(along.expand_as(rows), rows):
                flags.append((name, along.flatten()))
    return [*flags, ("row", rows.flatten()), ("column", wrong.flatten(0, -2).any(0))]


def pattern_of(name: str, wrong: Tensor) -> str:
    """Describe a part of a dimension, if it has a beginning, an end or a step."""
    index = wrong.nonzero().flatten()
    if wrong.all() or len(index) == 0:
        return ""
    first, last = int(index[0]), int(index[-1])
    if len(index) == 1:
        return f"{name} {first:,}"
    steps = index.diff().unique().tolist()
    if steps == [1] and last == len(wrong) - 1:
        return f"{name}s from {first:,} on"
    if steps == [1]:
        return f"{name}s {first:,} to {last:,}"
    if len(steps) == 1 and len(index) > 2:
        return f"one {name} in {steps[0]:,} from {first:,} on"
    return ""


def distance(a: Tensor, b: Tensor) -> float:
    """Return RMS(a - b) / RMS(b)."""
    size = b.square().mean().sqrt().clamp(min=1e-300)
    return ((a - b).square().mean().sqrt() / size).item()
