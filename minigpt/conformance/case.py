"""The norm under check, and one question to it: tensors that are compared, at which dtypes, and the result."""

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from minigpt import norms
from minigpt.conformance.truth import ORDINARY, RowKind, Truth, Weights, gradient_truth, ordinary_weights, truth
from minigpt.device import DTYPES, dtype_name
from minigpt.errors import RAISED, NormError
from minigpt.norms.foreign.adapt import AdaptedNorm
from minigpt.norms.foreign.construct import construct, naming, require_same_shape, title
from minigpt.norms.foreign.locate import last_line, locate
from minigpt.report.numerals import brief

EPS, OTHER_EPS = 1e-5, 1e-3  # GPT-2's, and one that it does not have
NEEDED = (64, 768, 1024, 1280, 1600)  # widths of GPT-2s; a norm may refuse others
EXACTLY = "the numbers must be the same: nothing is rounded"
ALL = tuple(DTYPES.values())


class Unsupported(NormError):
    """The norm does not support this, and GPT-2 does not need it. The case is not judged, and does not fail."""


@dataclasses.dataclass
class Built:
    """A norm that is built, in eval mode, with its weights."""

    module: Any
    eps: float
    name: str

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
    def is_completed(self) -> bool:
        """True if scale or shift are applied to what the module has rounded."""
        return isinstance(self.module, AdaptedNorm) and (self.module.multiplies or self.module.adds)

    def __call__(self, x: Tensor, *, dtypes: Sequence[torch.dtype] = ()) -> Tensor:
        """Return the norm of ``x``, in the dtype of ``x`` or one of ``dtypes``.

        Raises:
            NormError: if the norm raises, or returns another shape or dtype.
        """
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
        """Return PyTorch's own LayerNorm of ``x``, with scale and shift where the module has them."""
        weight, bias, complete = self.module.weight, self.module.bias, None
        if self.is_completed:
            complete = self.module.completed
            weight, bias = None if self.module.multiplies else weight, None if self.module.adds else bias
        y = F.layer_norm(x, self.module.weight.shape, weight, bias, self.eps)
        return complete(y) if complete else y

    def compared(self, x: Tensor, what: str = "") -> "Compared":
        """Compare the norm of ``x`` with the truth."""
        values, bound = self.truth(x)  # before the norm, which may write into its input
        return Compared(what, self(x), values, bound)

    def truth(self, x: Tensor, roundings: int | None = None) -> Truth:
        """Return LayerNorm of ``x`` in float64 with the same weights, and the bound on rounding; on the CPU."""
        roundings = 3 if self.is_completed else roundings
        return truth(x, self.module.weight, self.module.bias, self.eps, roundings=roundings)

    def gradient_truth(self, x: Tensor, dy: Tensor) -> dict[str, Truth]:
        """Return the gradients of that for an incoming ``dy``, by name."""
        return gradient_truth(x, self.module.weight, self.eps, dy)


class Subject:
    """The norm under check: how to build it, and its random numbers.

    Attributes:
        name: its name in messages.
        device: where it is built and runs.
        generator: draws rows and weights, by the seed.
    """

    def __init__(self, norm: norms.NormSpec, device: torch.device, *, seed: int = 0) -> None:
        self.norm, self.device, self.seed = norm, device, seed
        self.name = norm if isinstance(norm, str) else title(norm)
        self.generator = Generator().manual_seed(seed)

    def drawing_for(self, purpose: str) -> "Subject":
        """Return the same norm with separate random numbers, so that no case depends on earlier cases."""
        other = copy.copy(self)
        other.generator = Generator().manual_seed(zlib.crc32(f"{self.seed} {purpose}".encode()))
        return other

    def candidate(
        self,
        width: int = 64,
        dtype: torch.dtype = torch.float32,
        *,
        eps: float = EPS,
        bias: bool = True,
        weights: Callable[[int, Generator], Weights] = ordinary_weights,
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
            return Built(module.to(device=self.device, dtype=dtype).eval(), eps, self.name)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32, kind: RowKind = ORDINARY) -> Tensor:
        """Return rows of a kind in this shape, (..., width), on the device."""
        return self.put(kind.rows(math.prod(shape[:-1]), shape[-1], self.generator, dtype), dtype).view(shape)

    def put(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Round a float64 tensor to ``dtype``, and move it to the norm's device."""
        return tensor.to(device=self.device, dtype=dtype)

    @property
    def takes_eps(self) -> bool:
        """True if its constructor takes an eps."""
        make = locate(self.norm) if isinstance(self.norm, str) else self.norm
        return norms.is_ours(getattr(make, "func", make)) or construct(make, (64,), eps=OTHER_EPS, bias=True).takes_eps


class Compared(NamedTuple):
    """Two tensors that should be equal.

    Attributes:
        what: a place for the report: "the second call".
        value, expected: the norm's numbers, and the right ones.
        bound: the largest error allowed: float64 on the CPU, or a number.
        part: the gradient's name; "" for an output.
    """

    what: str
    value: Tensor
    expected: Tensor
    bound: Tensor | float
    part: str = ""


Compare = Callable[[Subject, torch.dtype], Iterator[Compared]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one case at one dtype. The error is that of the element closest to its bound, or furthest beyond.

    Attributes:
        passed: None if the norm does not support what the case needs, and is not judged there.
        ratio, error, bound: of the worst element; None if nothing was measured.
        note: the place of the worst element, or why nothing was measured.
        place: of what is wrong in the worst tensor: "rows from 256 on".
        parts: those that are wrong; see ``Compared``.
    """

    passed: bool | None
    ratio: float = 0.0
    error: float | None = None
    bound: float | None = None
    note: str = ""
    place: str = ""
    parts: frozenset[str] = frozenset()


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
        return {dtype for dtype, outcome in self.outcomes.items() if outcome.passed is False}

    @property
    def wrong_at(self) -> set[str]:
        """The names of the dtypes at which its numbers are wrong."""
        return {dtype for dtype in self.failed_at if self.outcomes[dtype].error is not None}

    @property
    def raised_at(self) -> dict[str, str]:
        """By dtype, what the norm raised where nothing was measured."""
        return {name: one.note for name, one in self.outcomes.items() if one.passed is False and one.error is None}

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
        dtype = next(name for name, outcome in self.outcomes.items() if outcome is worst)
        if worst.passed is None:
            return f"not judged: {worst.note}"
        if worst.error is None:
            return worst.note
        where = ", ".join(filter(None, (dtype * (len(self.outcomes) > 1), worst.note)))
        return f"worst at {where}" if worst.error and where else ""

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
    dtypes: tuple[torch.dtype, ...] = ALL

    def run(self, subject: Subject) -> CaseResult:
        """Ask at every dtype. A norm that raises fails; one that does not support a dtype is not judged there."""
        names = {dtype: dtype_name(dtype) for dtype in self.dtypes}
        outcomes = {name: self._at(subject.drawing_for(f"{self.name}, {name}"), dtype) for dtype, name in names.items()}
        return CaseResult(self.name, self.group, self.tests, self.reason, outcomes)

    @torch.no_grad()
    def _at(self, subject: Subject, dtype: torch.dtype) -> Outcome:
        try:  # one by one: a norm may write over an earlier output
            outcomes = [worst_element(*compared) for compared in self.compare(subject, dtype)]
        except RAISED as error:
            sentence = str(error) if isinstance(error, NormError) else f"it raises {last_line(error)}"
            is_refused = isinstance(error, Unsupported) or dtype == torch.float64
            return Outcome(None if is_refused else False, math.inf, note=sentence)
        parts = frozenset[str]().union(*(outcome.parts for outcome in outcomes))
        return dataclasses.replace(max(outcomes, key=lambda outcome: outcome.ratio), parts=parts)


def worst_element(what: str, value: Tensor, expected: Tensor, bound: Tensor | float, part: str = "") -> Outcome:
    """Return the element with the largest ratio of error and bound. Two NaNs are equal in exact comparisons only."""
    if value.numel() == 0:
        return Outcome(True, 0.0, 0.0, 0.0, what)
    a, b = (tensor.detach().cpu().double() for tensor in (value, expected))
    bound = torch.as_tensor(bound, dtype=torch.float64)
    is_repeated = a.isnan() & b.isnan() & (bound == 0)
    error = torch.where((a == b) | is_repeated, 0.0, (a - b).abs())  # infinities may be equal
    bound = bound.expand_as(error)
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    index = int(ratio.argmax())
    largest, *worst = (float(figure.flatten()[index]) for figure in (ratio, error, bound))
    if largest <= 1:
        return Outcome(True, largest, worst[0], worst[1], what)
    return Outcome(False, largest, worst[0], worst[1], what, place_of(ratio > 1, a), frozenset({part}))


def place_of(wrong: Tensor, value: Tensor) -> str:
    """Describe where a tensor is wrong: "tokens from 1,024 on", "one row in 8 from 7 on (all 0)"; "" for no pattern."""
    if wrong.ndim == 0:
        return ""
    rows = wrong.any(-1) if wrong.ndim > 1 else wrong[:0]
    names = {3: ["text", "token"], 2: ["row"]}.get(wrong.ndim, [])
    flags: list[tuple[str, Tensor]] = []
    for axis, name in enumerate(names):
        along = rows.any(1 - axis) if rows.ndim > 1 else rows
        if torch.equal(rows, along.unsqueeze(1 - axis).expand_as(rows) if rows.ndim > 1 else along):
            flags.append((name, along))
    flags += [("row", rows.flatten()), ("column", wrong.flatten(0, -2).any(0) if wrong.ndim > 1 else wrong)]
    place = next(filter(None, (pattern_of(name, along) for name, along in flags)), "")
    return place + " (all 0)" * bool(place and not value[rows if rows.any() else wrong].any())


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
