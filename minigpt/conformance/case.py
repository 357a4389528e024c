"""The norm under check, and one question to it: tensors that are compared, at which dtypes, and what came out."""

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from minigpt import norms
from minigpt.conformance.truth import (
    ORDINARY,
    GradientTruth,
    RowKind,
    Truth,
    Weights,
    gradient_truth,
    ordinary_weights,
    truth,
)
from minigpt.device import dtype_name
from minigpt.errors import RAISED, NormError
from minigpt.norms.foreign.adapt import AdaptedNorm
from minigpt.norms.foreign.construct import construct, naming, require_same_shape, title
from minigpt.norms.foreign.locate import last_line, locate
from minigpt.report.numerals import brief

EPS, OTHER_EPS = 1e-5, 1e-3  # GPT-2's, and one that it does not have
EXACTLY = "the numbers must be the same: nothing is rounded"


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
        with naming(self.foreign, f"{self.name}, given {tuple(x.shape)} in {dtype_name(x.dtype)},"):
            y = self.module(x)
        require_same_shape(y, x, self.foreign)
        if y.dtype not in (x.dtype, *dtypes):
            raise NormError(f"{self.name} changes the dtype: {x.dtype} went in, {y.dtype} came out")
        return y

    def compared(self, x: Tensor, what: str = "") -> "Compared":
        """Compare the norm of ``x`` with the truth."""
        values, bound = self.truth(x)  # before the norm, which may write into its input
        return Compared(what, self(x), values, bound)

    def truth(self, x: Tensor, roundings: int | None = None) -> Truth:
        """Return LayerNorm of ``x`` in float64 with the same weights, and the bound on rounding; on the CPU."""
        roundings = 3 if self.is_completed else roundings
        return truth(x, self.module.weight, self.module.bias, self.eps, roundings=roundings)

    def gradient_truth(self, x: Tensor, dy: Tensor) -> dict[str, GradientTruth]:
        """Return the gradients of that for an incoming ``dy``, by name."""
        return gradient_truth(x, self.module.weight, self.eps, dy)


class Subject:
    """The norm under check: how to build it, and its random numbers.

    Attributes:
        name: its name in messages.
        device: where it is built and runs.
        generator: draws rows and weights, by the seed.
        compile_backend: the compiler that torch.compile uses.
    """

    def __init__(
        self, norm: norms.NormSpec, device: torch.device, *, seed: int = 0, compile_backend: str = "aot_eager"
    ) -> None:
        self.norm, self.device, self.seed, self.compile_backend = norm, device, seed, compile_backend
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
        module: Any = norms.build(self.norm, width, eps=eps, bias=bias)
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
class CaseResult:
    """The answer to one question. The error is that of the element closest to its bound, or furthest beyond it."""

    name: str
    group: str
    tests: str
    error: float | None  # None if nothing was measured; the note says why
    bound: float | None
    reason: str  # for the bound
    passed: bool
    dtypes: dict[str, bool]  # whether it passed at each dtype; a dtype that was not judged is absent
    note: str = ""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)  # by dtype, why it was not judged there
    parts: list[str] = dataclasses.field(default_factory=list)  # those that are wrong: see Compared
    place: str = ""  # of what is wrong in the worst tensor: "rows from 256 on"

    @property
    def raised(self) -> bool:
        """True if the norm failed and there is nothing to measure: it raised, or returned no such tensor."""
        return not self.passed and self.error is None

    @property
    def failed_at(self) -> set[str]:
        """The names of the dtypes at which it failed."""
        return {dtype for dtype, passed in self.dtypes.items() if not passed}

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        measured = "" if self.error is None else f": error {brief(self.error)}, bound {brief(self.bound)}"
        note = ", ".join(filter(None, (self.note, self.place)))
        return f"{verdict} {self.name}{measured}{f' ({note})' if note else ''}"


class Measurement(NamedTuple):
    """The element with the largest ratio of error and bound. A NaN's ratio is infinite."""

    ratio: float
    error: float
    bound: float
    what: str
    part: str = ""
    place: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """A question, and what to compare for the answer at one dtype."""

    name: str
    group: str
    tests: str
    reason: str  # for the bound
    compare: Compare
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def run(self, subject: Subject) -> CaseResult:
        """Ask at every dtype. A norm that raises fails; one that does not support a dtype is not judged there.

        Raises:
            NormError: if the norm's code ends the program, for example by KeyboardInterrupt.
        """
        measured: list[Measurement] = []
        passed: dict[str, bool] = {}
        refused: dict[str, str] = {}
        failed, parts = "", set[str]()
        for dtype in self.dtypes:
            name = dtype_name(dtype)
            try:
                with torch.no_grad():  # one by one: a norm may write over an earlier output
                    asked = [
                        worst_element(*compared) for compared in self.compare(subject.drawing_for(self.name), dtype)
                    ]
            except RAISED as error:
                if error.__cause__ is not None and not isinstance(error.__cause__, RAISED):
                    raise
                sentence = str(error) if isinstance(error, NormError) else f"it raises {last_line(error)}"
                if isinstance(error, Unsupported) or dtype == torch.float64:
                    refused[name] = sentence
                else:
                    passed[name], failed = False, sentence
            else:
                worst = max(asked)
                passed[name] = worst.ratio <= 1
                parts |= {one.part for one in asked if one.ratio > 1}
                places = [name] * (len(self.dtypes) > 1) + [worst.what] * bool(worst.what)
                measured.append(worst._replace(what=", ".join(places)))
        note, error, bound, place = failed, None, None, ""
        if measured and not failed:
            _, error, bound, what, _, place = max(measured)
            note = f"worst at {what}" if error and what else ""
        note = note or "".join(f"not judged: {reason}" for reason in list(refused.values())[:1])
        return CaseResult(
            self.name, self.group, self.tests, error, bound, self.reason, all(passed.values()), passed, note,
            refused, sorted(parts), place,
        )  # fmt: skip


def worst_element(what: str, value: Tensor, expected: Tensor, bound: Tensor | float, part: str = "") -> Measurement:
    """Return the element with the largest ratio. Equal infinities and two NaNs have no error; a NaN alone is one."""
    if value.numel() == 0:
        return Measurement(0.0, 0.0, 0.0, what, part)
    a, b = (tensor.detach().cpu().double() for tensor in (value, expected))
    error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    index = int(ratio.argmax())
    worst = [float(figure.flatten()[index]) for figure in (ratio, error, bound)]
    return Measurement(worst[0], worst[1], worst[2], what, part, place_of(ratio > 1, a) if worst[0] > 1 else "")


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
    place = next(filter(None, (_pattern(name, along) for name, along in flags)), "")
    return place + " (all 0)" * bool(place and not value[rows if rows.any() else wrong].any())


def _pattern(name: str, wrong: Tensor) -> str:
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
