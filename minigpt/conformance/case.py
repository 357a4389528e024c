"""The norm under check, and one question to it: tensors that are compared, at which dtypes, and the result."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from minigpt import norms
from minigpt.conformance.truth import ORDINARY, PERIOD, RowKind, Truth, Weights, gradient_truth, truth
from minigpt.device import DTYPES, dtype_name
from minigpt.errors import RAISED, NormError
from minigpt.norms.foreign.adapt import AdaptedNorm
from minigpt.norms.foreign.construct import construct, naming, require_same_shape, title
from minigpt.norms.foreign.locate import last_line, locate
from minigpt.report.numerals import brief

EPS, OTHER_EPS = 1e-5, 1e-3  # GPT-2's, and one that it does not have
NEEDED = (64, 768, 1024, 1280, 1600)  # widths of GPT-2s; a norm may refuse others


class Unsupported(NormError):
    """The norm does not support this, and GPT-2 does not need it. The case is not judged, and does not fail."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a comparison, or of one case at one dtype: that of the element furthest beyond its bound.

    Attributes:
        passed: None if the norm does not support what the case needs, and is not judged there.
        ratio, error, bound: of the worst element; error and bound are None if nothing was measured.
        note: the comparison, for example "the second call"; or why nothing was measured.
        place: of what is wrong in the tensor: "rows from 256 on".
        parts: the gradients that are wrong, by name; "" for an output.
    """

    passed: bool | None
    ratio: float = 0.0
    error: float | None = None
    bound: float | None = None
    note: str = ""
    place: str = ""
    parts: frozenset[str] = frozenset()


def compare(what: str, value: Tensor, expected: Tensor, bound: Tensor | float, part: str = "") -> Outcome:
    """Compare two tensors that should be equal. A NaN equals nothing.

    Args:
        expected: as many elements as ``value``, or those of its first rows, which it repeats.
        bound: the largest error allowed, in the shape of ``expected``, or a number.
        part: the gradient's name; "" for an output.
    """
    value, expected = value.detach().cpu(), expected.detach().cpu()
    if value.numel() == 0 or (isinstance(bound, int) and torch.equal(value, expected)):
        return Outcome(True, 0.0, 0.0, 0.0, what)
    bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(expected).flatten()
    b, wrong, largest, worst = expected.double().flatten(), [], -1.0, (0.0, 0.0)
    for piece in value.flatten().split(len(b)):
        a, b, bound = piece.double(), b[: len(piece)], bound[: len(piece)]
        error = torch.where(a == b, 0.0, (a - b).abs())  # infinities may be equal
        ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
        index = int(ratio.argmax())
        if ratio[index] > largest:
            largest, worst = float(ratio[index]), (float(error[index]), float(bound[index]))
        wrong.append(ratio > 1)
    if largest <= 1:
        return Outcome(True, largest, *worst, what)
    return Outcome(False, largest, *worst, what, place_of(torch.cat(wrong).view(value.shape), value), frozenset({part}))


def place_of(wrong: Tensor, value: Tensor) -> str:
    """Describe where a tensor is wrong: "tokens from 1,024 on", "one row in 8 from 7 on (all 0)"; "" for no pattern."""
    if wrong.ndim == 0:
        return ""
    wrong, value = torch.atleast_2d(wrong), torch.atleast_2d(value)
    rows, flags = wrong.any(-1), list[tuple[str, Tensor]]()
    for axis, name in enumerate(("text", "token")):
        if rows.ndim == 2 and torch.equal(rows.any(1 - axis, keepdim=True).expand_as(rows), rows):
            flags.append((name, rows.any(1 - axis)))
    flags += [("row", rows.flatten()), ("column", wrong.flatten(0, -2).any(0))]
    place = next(filter(None, (pattern_of(name, along) for name, along in flags)), "")
    return place + " (all 0)" * bool(place and not value[rows].any())


def pattern_of(name: str, wrong: Tensor) -> str:
    """Describe a part of a dimension, if it has a beginning, an end or a step."""
    index = wrong.nonzero().flatten()
    if wrong.all() or len(index) == 0:
        return ""
    steps, first, last = index.diff().unique().tolist(), int(index[0]), int(index[-1])
    if len(index) == 1:
        return f"{name} {first:,}"
    if steps == [1]:
        return f"{name}s from {first:,} on" if last == len(wrong) - 1 else f"{name}s {first:,} to {last:,}"
    return f"one {name} in {steps[0]:,} from {first:,} on" if len(steps) == 1 and len(index) > 2 else ""


@dataclasses.dataclass
class Built:
    """A norm that is built, in eval mode, with its weights.

    While it runs, no truth is in memory, where its code could look for it: a case computes the truth after its last
    call.
    """

    module: Any
    eps: float
    name: str
    centers: bool  # whether it should subtract the mean: a LayerNorm does, an RMSNorm does not

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its weight and, if it has one, its bias, by name."""
        both = {"weight": self.module.weight, "bias": self.module.bias}
        return {name: parameter for name, parameter in both.items() if parameter is not None}

    @property
    def foreign(self) -> nn.Module:
        """The module without what was put around it: its class is what a message names."""
        return self.module.norm if isinstance(self.module, AdaptedNorm) else self.module

    @property
    def rounds_row(self) -> bool:
        """True if scale or shift may be applied to a rounded row: beside the module, or in an RMSNorm like Llama's."""
        is_completed = isinstance(self.module, AdaptedNorm) and (self.module.multiplies or self.module.adds)
        return is_completed or not self.centers

    def __call__(self, x: Tensor, *, dtypes: Sequence[torch.dtype] = ()) -> Tensor:
        """Return the norm of ``x``, in the dtype of ``x`` or one of ``dtypes``.

        Raises:
            NormError: if the norm raises, or returns another shape or dtype.
        """
        x.new_full(x.shape, torch.nan)  # then memory that it does not write holds NaN, and no earlier result
        try:
            with naming(self.foreign, f"{self.name}, given {tuple(x.shape)} in {dtype_name(x.dtype)},"):
                y = self.module(x)
        except NormError as error:
            if self._refuses_width_of(x):
                raise Unsupported(str(error)) from error
            raise
        require_same_shape(y, x, self.foreign)
        if y.dtype not in (x.dtype, *dtypes):
            raise NormError(f"{self.name} changes the dtype: {x.dtype} went in, {y.dtype} came out")
        return y

    def _refuses_width_of(self, x: Tensor) -> bool:
        """Return True if the norm raises for two rows of a width that no GPT-2 has."""
        if x.shape[-1] in NEEDED:
            return False
        try:
            self.module(x.new_ones(2, x.shape[-1]))
        except RAISED:
            return True
        return False

    def by_pytorch(self, x: Tensor) -> Tensor:
        """Return PyTorch's own norm of ``x``, with scale and shift where the module has them."""
        adapted = self.module if isinstance(self.module, AdaptedNorm) else None
        weight = None if adapted and adapted.multiplies else self.module.weight
        bias = None if adapted and adapted.adds else self.module.bias
        if self.centers:
            y = F.layer_norm(x, self.module.weight.shape, weight, bias, self.eps)
        else:
            y = F.rms_norm(x, self.module.weight.shape, weight, self.eps)
            y = y if bias is None else y + bias
        return adapted.completed(y) if adapted else y

    def compared(self, inputs: Iterable[tuple[str, Tensor]]) -> list[Outcome]:
        """Compare the norm of each input with the truth. One may be an earlier one whose numbers have changed."""
        calls = [(what, x.clone(), self(x).clone()) for what, x in inputs]  # it may write into its input
        return [compare(what, y, *self.truth(x)) for what, x, y in calls]

    def truth(self, x: Tensor, roundings: int | None = None) -> Truth:
        """Return the norm of the first rows of ``x`` in float64 with the same weights, and the bound on rounding."""
        if self.rounds_row:  # the row, its product with the scale, and that plus the shift
            roundings = 2 if self.module.bias is None else 3
        how: dict[str, Any] = {"centers": self.centers, "roundings": roundings}
        return truth(first_rows(x), self.module.weight, self.module.bias, self.eps, **how)

    def gradient_truth(self, x: Tensor, dy: Tensor) -> dict[str, Truth]:
        """Return the gradients of that for an incoming ``dy``, by name."""
        rows = x[..., 0].numel()
        x, dy = first_rows(x), first_rows(dy)
        return gradient_truth(x, self.module.weight, self.eps, dy, centers=self.centers, rows=rows)


def first_rows(x: Tensor) -> Tensor:
    """Return the rows (at most PERIOD, width) that a longer input repeats; a shorter one as it is."""
    return x if x[..., 0].numel() <= PERIOD else x.reshape(-1, x.shape[-1])[:PERIOD]


@dataclasses.dataclass
class Subject:
    """The norm under check: how to build it, and its random numbers.

    Attributes:
        norm: what ``norms.build`` takes.
        device: where it is built and runs.
        seed, purpose: the random numbers depend on both, so that no case depends on earlier cases.
        centers: whether it should subtract the mean.
    """

    norm: norms.NormSpec
    device: torch.device
    seed: int = 0
    purpose: str = ""
    centers: bool = True

    def __post_init__(self) -> None:
        self.name = self.norm if isinstance(self.norm, str) else title(self.norm)
        self.generator = Generator().manual_seed(zlib.crc32(f"{self.seed} {self.purpose}".encode()))

    def drawing_for(self, purpose: str) -> "Subject":
        """Return the same norm with random numbers for this purpose."""
        return dataclasses.replace(self, purpose=purpose)

    def candidate(
        self,
        width: int = 64,
        dtype: torch.dtype = torch.float32,
        *,
        eps: float = EPS,
        bias: bool = True,
        weights: Callable[[int, Generator], Weights] = ORDINARY.weights,
    ) -> Built:
        """Build the norm over ``width`` with ``weights(width, generator)``, rounded to ``dtype``.

        Sets the Parameters ``weight`` and ``bias``, as ``swap_norms`` does.

        Raises:
            NormError: if it cannot be built.
        """
        try:
            module: Any = norms.build(self.norm, width, eps=eps, bias=bias)
        except NormError as error:
            if width in NEEDED:
                raise
            raise Unsupported(str(error)) from error
        scale, shift = weights(width, self.generator)
        module.weight = nn.Parameter(self.put(scale, dtype))
        module.bias = nn.Parameter(self.put(shift, dtype)) if bias else None
        with naming(module):
            return Built(module.to(device=self.device, dtype=dtype).eval(), eps, self.name, self.centers)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32, kind: RowKind = ORDINARY) -> Tensor:
        """Return rows of a kind in this shape, (..., width), on the device; they repeat after ``PERIOD``."""
        count = math.prod(shape[:-1])
        x = self.put(kind.rows(count, shape[-1], self.generator, dtype), dtype)
        return x.repeat(-(-count // PERIOD), 1)[:count].view(shape)

    def put(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Round a float64 tensor to ``dtype``, and move it to the norm's device."""
        return tensor.to(device=self.device, dtype=dtype)

    @property
    def takes_eps(self) -> bool:
        """True if its constructor takes an eps."""
        make = locate(self.norm) if isinstance(self.norm, str) else self.norm
        return norms.is_ours(getattr(make, "func", make)) or construct(make, (64,), eps=OTHER_EPS, bias=True).takes_eps


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The answer to one question at each dtype."""

    name: str
    group: str
    tests: str
    reason: str  # for the bound
    outcomes: dict[str, Outcome]  # by dtype

    @property
    def passed(self) -> bool:
        """True if it failed at no dtype."""
        return not self.failed_at

    @property
    def failed_at(self) -> set[str]:
        """The names of the dtypes at which it failed."""
        return {dtype for dtype, passed in self.dtypes.items() if not passed}

    @property
    def wrong_at(self) -> set[str]:
        """The names of the dtypes at which its numbers are wrong."""
        return {dtype for dtype in self.failed_at if self.outcomes[dtype].error is not None}

    @property
    def raised_at(self) -> dict[str, str]:
        """By dtype, what the norm raised where nothing was measured."""
        wrong = self.failed_at - self.wrong_at
        return {dtype: outcome.note for dtype, outcome in self.outcomes.items() if dtype in wrong}

    @property
    def dtypes(self) -> dict[str, bool]:
        """Whether it passed at each dtype. A dtype that was not judged is absent."""
        return {dtype: outcome.passed for dtype, outcome in self.outcomes.items() if outcome.passed is not None}

    @property
    def refused(self) -> dict[str, str]:
        """By dtype, why it was not judged there."""
        return {dtype: outcome.note for dtype, outcome in self.outcomes.items() if outcome.passed is None}

    @property
    def worst(self) -> Outcome:
        """The outcome that a report shows: the one that raised, else that with the largest ratio."""
        return max(self.outcomes.values(), key=lambda outcome: (outcome.passed is not None, outcome.ratio))

    @property
    def note(self) -> str:
        """The place of the largest error, or why nothing was measured."""
        worst = self.worst
        if worst.error is None:
            return worst.note if worst.passed is False else f"not judged: {worst.note}"
        dtype = next(name for name, outcome in self.outcomes.items() if outcome is worst)
        where = ", ".join(filter(None, (dtype * (len(self.outcomes) > 1), worst.note)))
        return f"worst at {where}" if worst.error and where else ""

    def beside(self, dtypes: set[str]) -> "CaseResult":
        """Return the result without those at ``dtypes``."""
        rest = {dtype: outcome for dtype, outcome in self.outcomes.items() if dtype not in dtypes}
        return dataclasses.replace(self, outcomes=rest)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        worst = self.worst
        return {
            "name": self.name, "group": self.group, "tests": self.tests, "error": worst.error, "bound": worst.bound,
            "reason": self.reason, "passed": self.passed, "dtypes": self.dtypes, "note": self.note,
            "refused": self.refused, "parts": sorted(worst.parts), "place": worst.place,
        }  # fmt: skip

    def __str__(self) -> str:
        worst, verdict = self.worst, "pass" if self.passed else "FAIL"
        measured = "" if worst.error is None else f": error {brief(worst.error)}, bound {brief(worst.bound)}"
        note = ", ".join(filter(None, (self.note, worst.place)))
        return f"{verdict} {self.name}{measured}{f' ({note})' if note else ''}"


Compare = Callable[[Subject, torch.dtype], Iterator[Outcome]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A question, and what to compare for the answer at one dtype.

    Attributes:
        reason: for the bound.
    """

    name: str
    group: str
    tests: str
    reason: str
    compare: Compare

    def run(self, subject: Subject) -> CaseResult:
        """Ask at every dtype. A norm that raises fails; one that does not support a dtype is not judged there."""
        outcomes = {
            name: self._at(subject.drawing_for(f"{self.name}, {name}"), dtype) for name, dtype in DTYPES.items()
        }
        return CaseResult(self.name, self.group, self.tests, self.reason, outcomes)

    @torch.no_grad()
    def _at(self, subject: Subject, dtype: torch.dtype) -> Outcome:
        try:
            outcomes = [*self.compare(subject, dtype)]
        except RAISED as error:
            sentence = str(error) if isinstance(error, NormError) else f"it raises {last_line(error)}"
            is_refused = isinstance(error, Unsupported) or dtype == torch.float64
            return Outcome(None if is_refused else False, math.inf, note=sentence)
        parts = frozenset[str]().union(*(outcome.parts for outcome in outcomes))
        return dataclasses.replace(max(outcomes, key=lambda outcome: outcome.ratio), parts=parts)
