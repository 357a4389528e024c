"""Distances of tensors and of next-token distributions from the truth, and all those of one runner.

Of transformers at the dtype they are the noise floor. Of a candidate a report compares them with that floor.

T tokens, V vocabulary, C embedding.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.judge.reading import Reading, Text, rounded_as
from minigpt.judge.texts import Texts
from minigpt.norms.formulas import TrueNorm
from minigpt.report.fields import Distribution, LogitsError, NotANumber, Precision, WorstPosition
from minigpt.report.noise import noise_ratio
from minigpt.scoring import perplexity_of

MOST_NUMBERS = 2**19  # logits that are compared together: 4 MB in float64, which stay in a cache and are used again


@dataclass
class Distance:
    """Distances of tensors from their truth. A NaN in either shows in every figure."""

    largest: float = 0.0
    count: int = 0
    squares: float = 0.0
    true_squares: float = 0.0

    def add(self, value: Tensor, truth: Tensor) -> None:
        """Count a pair of equal shape; an empty one counts nothing."""
        if truth.numel() == 0:
            return
        truth = truth.double()
        difference = value.double() - truth
        self._count(difference, difference.square().sum(), truth.square().sum())

    def add_rows(self, difference: Float[Tensor, "rows width"], squares: Tensor, true_squares: Tensor) -> None:
        """Count rows whose squares are known.

        Args:
            difference: in float64.
            squares, true_squares: of the differences, and of the truth, summed along each row (rows).
        """
        self._count(difference, squares.sum(), true_squares.sum())

    def _count(self, difference: Tensor, squares: Tensor, true_squares: Tensor) -> None:
        least, most = difference.aminmax()
        for end in (-float(least), float(most)):
            self.largest = float(np.maximum(self.largest, end))  # NaN if either is
        self.squares += float(squares)
        self.true_squares += float(true_squares)
        self.count += difference.numel()

    def __add__(self, other: "Distance") -> "Distance":
        return Distance(
            largest=float(np.maximum(self.largest, other.largest)),
            count=self.count + other.count,
            squares=self.squares + other.squares,
            true_squares=self.true_squares + other.true_squares,
        )

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return math.sqrt(self.squares / max(self.count, 1))

    @property
    def scale(self) -> float:
        """Root of the truth's mean square."""
        return math.sqrt(self.true_squares / max(self.count, 1))


@dataclass
class RowDistance:
    """Distances of rows from their truth, each measured by its own size, so that no massive row hides the others."""

    count: int = 0
    squares: float = 0.0

    def add(self, value: Float[Tensor, "*rows embd"], truth: Float[Tensor, "*rows embd"]) -> None:
        """Count rows of equal shape."""
        truth = truth.double()
        difference = value.double() - truth
        errors = difference.square().sum(-1)  # (*rows)
        sizes = truth.square().sum(-1)  # (*rows)
        relative = torch.where(errors == 0, 0, errors / sizes)
        self.squares += float(relative.sum())
        self.count += sizes.numel()

    @property
    def relative(self) -> float:
        """Root of the mean, over rows, of the squared difference over the squared truth."""
        return math.sqrt(self.squares / max(self.count, 1))


STORED_DTYPES = (torch.bfloat16, torch.float16)  # the coarser one first
AnyDistance = TypeVar("AnyDistance", Distance, RowDistance)


class Stored(Generic[AnyDistance]):
    """Distances of the truth from itself, stored at each narrow dtype that holds all values so far exactly.

    Values that another program wrote at such a dtype are off by that rounding alone.

    Args:
        dtype: that of the original. One that rounds as much is left out.
        error: makes what counts the distance.
    """

    def __init__(self, dtype: torch.dtype, error: Callable[[], AnyDistance]) -> None:
        self.errors: dict[torch.dtype, AnyDistance] = {}
        for narrow in STORED_DTYPES:
            if torch.finfo(narrow).eps > torch.finfo(dtype).eps:
                self.errors[narrow] = error()

    def add(self, value: Float[Tensor, "*rows width"], truth: Float[Tensor, "*rows width"]) -> None:
        """Count values, and the true ones."""
        for narrow in list(self.errors):
            if holds(narrow, value):
                self.errors[narrow].add(truth.to(narrow), truth)
            else:
                del self.errors[narrow]

    @property
    def coarsest(self) -> tuple[torch.dtype, AnyDistance] | None:
        """The coarsest of these dtypes and the distance; None if there is none."""
        return next(iter(self.errors.items()), None)


def holds(narrow: torch.dtype, value: Tensor) -> bool:
    """Return whether a dtype holds all finite values exactly."""
    for part in (value[:1], value):  # one row is enough for most
        back = part.to(narrow).to(part.dtype)
        if not bool(((back == part) | ~part.isfinite()).all()):
            return False
    return True


class LogitsMeter:
    """Logits of many texts against the truth, and the next-token distributions that they are.

    Args:
        with_distributions: whether to measure these too.

    Attributes:
        distances: of the logits of each text.
        distance, without_shift: of all together, as they are, and after each position's mean difference is subtracted.
        columns: for each text, figures by name: one for each position, or for each target.
    """

    def __init__(self, *, with_distributions: bool = True) -> None:
        self.with_distributions = with_distributions
        self.distances: list[Distance] = []
        self.without_shift = Distance()
        self.columns: list[dict[str, Float[Tensor, " seq"]]] = []

    @property
    def distance(self) -> Distance:
        return sum(self.distances, Distance())

    def add(
        self,
        truth: Float[Tensor, "seq vocab"],
        logits: Float[Tensor, "seq vocab"],
        targets: Int[Tensor, " targets"] | None = None,
        counted: int | None = None,
    ) -> None:
        """Count one text.

        Args:
            targets: the tokens that its first positions should have predicted; by default none.
            counted: of how many of its first positions the distribution counts; by default of all.
        """
        if targets is None:
            targets = torch.empty(0, dtype=torch.long, device=truth.device)
        distance = Distance()
        parts: list[dict[str, Tensor]] = []
        rows = max(1, MOST_NUMBERS // truth.shape[-1])
        for start in range(0, len(truth), rows):
            part = slice(start, start + rows)
            true = truth[part].double()
            value = logits[part].double()
            difference = value - true
            squares = _squares(difference)
            true_squares = _squares(true)
            distance.add_rows(difference, squares, true_squares)
            columns = {"error": (squares / truth.shape[-1]).sqrt()}
            if self.with_distributions:
                columns |= _compare(true, value, difference, targets[part])
            difference -= difference.sum(-1, keepdim=True) / truth.shape[-1]
            self.without_shift.add_rows(difference, _squares(difference), true_squares)
            parts.append(columns)
        self.distances.append(distance)
        self.columns.append(_joined(parts, counted))

    @property
    def largest_error(self) -> float:
        """The largest RMS error at a position."""
        errors = [float(columns["error"].max()) for columns in self.columns]
        return max(errors, default=0.0)

    def column(self, name: str) -> Float[Tensor, " all"]:
        """Return a figure at every position of all texts."""
        return torch.cat([columns[name] for columns in self.columns])

    def mean(self, name: str, key: str = "") -> dict[str, float]:
        """Return the mean of a figure and its standard error by texts, as fields of ``Distribution``."""
        sums: list[float] = []
        counts: list[int] = []
        for columns in self.columns:
            sums.append(float(columns[name].sum()))
            counts.append(len(columns[name]))
        mean, error = mean_by_rows(sums, counts)
        key = key or name
        return {key: mean, f"{key}_se": error}

    @property
    def worst(self) -> tuple[int, int]:
        """The number of the text with the largest KL divergence, or the first NaN, and the row there."""
        largest = [float(columns["kl"].max()) for columns in self.columns]
        text = int(np.argmax(largest))
        row = self.columns[text]["kl"].argmax()
        return text, int(row)

    def distribution(self, worst: WorstPosition) -> Distribution:
        """Return KL, agreement and loss, with standard errors by texts; NaN where there is one text only."""
        kl = self.column("kl")
        loss = self.column("loss")
        true_loss = self.column("true_loss")
        median, p90, p99, p999 = kl.quantile(kl.new_tensor([0.5, 0.9, 0.99, 0.999])).tolist()
        return Distribution(
            tokens=len(kl),
            **self.mean("top1", "top1_agreement"),
            top5_agreement=float(self.column("top5").mean()),
            **self.mean("kl", "kl_mean"),
            kl_median=median,
            kl_p90=p90,
            kl_p99=p99,
            kl_p999=p999,
            kl_max=float(kl.max()),
            worst=worst,
            perplexity_reference=perplexity_of(float(true_loss.sum()), len(loss)),
            perplexity_candidate=perplexity_of(float(loss.sum()), len(loss)),
            **self.mean("loss_change"),
        )


def _joined(parts: list[dict[str, Tensor]], counted: int | None) -> dict[str, Tensor]:
    """Return a text's columns of its parts'; a distribution's only at the first positions, which count."""
    columns: dict[str, Tensor] = {}
    for name in parts[0]:
        column = torch.cat([part[name] for part in parts])
        columns[name] = column if name == "error" else column[:counted]
    return columns


def _compare(truth: Tensor, logits: Tensor, difference: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return columns of figures: by position, and losses by target.

    Args:
        difference: of the logits from the truth.
    """
    shares, true_largest, true_size = _exp(truth)
    _, largest, size = _exp(logits)
    kl = (largest - true_largest) + (size - true_size) - torch.linalg.vecdot(shares, difference) / shares.sum(-1)
    if kl.isnan().any():  # as of logits at -inf
        kl = kl_divergence(truth.log_softmax(-1), logits.log_softmax(-1))
    true_loss = _losses(truth, true_largest, true_size, targets)
    loss = _losses(logits, largest, size, targets)
    top1, top5 = top_overlaps(logits, truth)
    return {
        "kl": kl.clamp(min=0),  # rounding may leave it just below 0
        "top1": top1,
        "top5": top5,
        "true_loss": true_loss,
        "loss": loss,
        "loss_change": loss - true_loss,
    }


def _squares(rows: Float[Tensor, "rows width"]) -> Float[Tensor, " rows"]:
    return torch.linalg.vecdot(rows, rows)  # without a tensor of all products


def _exp(
    logits: Float[Tensor, "rows vocab"],
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return exp of each row without its largest number, that number, and log of the sum of that exp.

    The sum of the last two would round away what small errors change, where all logits are far from 0.
    """
    largest = logits.amax(-1, keepdim=True)
    shares = (logits - largest).exp_()
    return shares, largest[:, 0], shares.sum(-1).log()


def _losses(
    logits: Float[Tensor, "rows vocab"],
    largest: Float[Tensor, " rows"],
    size: Float[Tensor, " rows"],
    targets: Int[Tensor, " targets"],
) -> Float[Tensor, " targets"]:
    """Return the loss of each target, in nats.

    Args:
        largest: number of each row.
        size: log of the sum of exp of each row without it.
    """
    count = len(targets)
    of_targets = logits[:count].gather(1, targets[:, None])[:, 0]
    return size[:count] + (largest[:count] - of_targets)


def mean_by_rows(sums: list[float], counts: list[int]) -> tuple[float, float]:
    """Return the mean of all items and its standard error, from the sums and counts of independent rows.

    The error is that of a ratio of sums (Cochran 1977, section 6.3); NaN with fewer than two rows that count.
    """
    total = sum(counts)
    if total == 0:
        return math.nan, math.nan
    mean = sum(sums) / total
    rows = sum(count > 0 for count in counts)
    if rows < 2:
        return mean, math.nan
    squares: list[float] = []
    for part, count in zip(sums, counts, strict=True):
        residual = part - mean * count
        squares.append(residual**2)
    deviation = math.sqrt(sum(squares) * rows / (rows - 1))
    return mean, deviation / total


def against_noise_floor(candidate: Distance, without_shift: Distance, floor: Distance) -> LogitsError:
    """Return the candidate's distance from the truth, and the noise floor, which is the reference's distance."""
    return LogitsError(
        max_abs_error=candidate.largest,
        rms_error=candidate.rms,
        scale=candidate.scale,
        noise_floor_max=floor.largest,
        noise_floor_rms=floor.rms,
        ratio=noise_ratio(candidate.rms, floor.rms, candidate.scale),
        ratio_without_shift=noise_ratio(without_shift.rms, floor.rms, candidate.scale),
    )


def kl_divergence(p: Float[Tensor, "rows vocab"], q: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
    """KL(p || q) in nats, of log probabilities."""
    term = p.exp() * (p - q)
    return term.masked_fill(p == -math.inf, 0).sum(-1)


def top_overlaps(a: Float[Tensor, "rows vocab"], b: Float[Tensor, "rows vocab"]) -> tuple[Tensor, Tensor]:
    """Return whether two rows have the same likeliest token, and their share of the five likeliest, in any order."""
    likeliest: list[Tensor] = []
    five: list[Tensor] = []
    for logits in (a, b):
        values, tokens = logits.topk(min(5, logits.shape[-1]))  # (T, 5)
        first = tokens[:, 0]
        if not (values[:, :1] > values[:, 1:]).all():  # of equal numbers the first in the row counts
            first = logits.argmax(-1)
        likeliest.append(first)
        five.append(tokens)
    is_equal = five[0][:, :, None] == five[1][:, None, :]  # (T, 5, 5)
    top5 = is_equal.any(-1).double().mean(-1)
    return (likeliest[0] == likeliest[1]).double(), top5


class Measures:
    """Distances of a runner's outputs from the truth.

    Args:
        dtype: of the original.
        is_floor: whether errors are all that is needed: neither distributions, nor how values were stored.

    Attributes:
        prompts, windows: of their logits.
        decoded: of the logits of what was written, read token by token; None if they were not read so.
        places: of the output of each norm and block in the running model.
        alone: of the output of each norm, given the true input.
        gradients: the relative error of each Parameter's gradient; None if there are none.
        stored_prompts, stored_windows, stored_places: what storing at a narrow dtype does to the same truth.
        chosen: the likeliest token at each position of each prompt before one that was written.
        read: the prompts on which norms and blocks were read.
        nan: the first NaN of the logits.
        first_nan: "the logits", or "the outputs of" a norm or block: the first part that holds NaN; empty if none does.
    """

    def __init__(self, dtype: torch.dtype, *, is_floor: bool = False) -> None:
        self.dtype, self.is_floor = dtype, is_floor
        self.prompts = LogitsMeter(with_distributions=not is_floor)
        self.windows = LogitsMeter(with_distributions=not is_floor)
        self.decoded: LogitsMeter | None = None
        self.places: dict[str, RowDistance] = {}
        self.alone: dict[str, RowDistance] = {}
        self.gradients: dict[str, float] | None = None
        self.stored_prompts = Stored(dtype, Distance)
        self.stored_windows = Stored(dtype, Distance)
        self.stored_places: dict[str, Stored[RowDistance]] = {}
        self.chosen: list[list[int]] = []
        self.read: list[Text] = []
        self.nan: NotANumber | None = None
        self.first_nan = ""

    def add(
        self, text: Text, reading: Reading, exact: Reading, norms: Mapping[str, TrueNorm], *, is_prompt: bool
    ) -> None:
        """Count a text: its logits; of a prompt its norms and blocks too, as far as these were read."""
        self._look_for_nan(text, reading, exact)
        meter, stored = (self.windows, self.stored_windows)
        if is_prompt:
            meter, stored = (self.prompts, self.stored_prompts)
        if not self.is_floor:
            stored.add(reading.logits, exact.logits)
        meter.add(exact.logits, reading.logits, text.targets(exact.logits.device), text.counted)
        if not is_prompt:
            return
        self.chosen.append(reading.logits[text.before_new].argmax(-1).tolist())
        if not reading.outputs or not exact.outputs:
            return
        self.read.append(text)
        for place, true in exact.outputs.items():
            if place not in reading.outputs:
                continue
            output = reading.outputs[place]
            self.places.setdefault(place, RowDistance()).add(output, true)
            if not self.is_floor:
                self.stored_places.setdefault(place, Stored(self.dtype, RowDistance)).add(output, true)
        for site, output in reading.alone.items():
            if site in norms:
                x = rounded_as(reading, site, exact.inputs[site])
                self.alone.setdefault(site, RowDistance()).add(output, norms[site](x[0]))

    def add_decoded(self, prompts: Sequence[Text], decoded: Sequence[Tensor], exact: Sequence[Tensor]) -> LogitsMeter:
        """Count the logits of what was written after each prompt, read token by token; return their meter.

        Args:
            exact: the true logits of each prompt.
        """
        self.decoded = LogitsMeter(with_distributions=False)
        self.chosen = []
        for text, logits, true in zip(prompts, decoded, exact, strict=True):
            self.chosen.append(logits.argmax(-1).tolist())
            if len(logits):
                self.decoded.add(true[text.before_new], logits)
        return self.decoded

    def _look_for_nan(self, text: Text, reading: Reading, exact: Reading) -> None:
        """Keep where the first NaN is. What transformers computes has been checked."""
        if self.is_floor:
            return
        rows = reading.logits.amax(-1).isnan().nonzero()  # a NaN is the largest
        if len(rows):
            self.first_nan = self.first_nan or "the logits"
            number = len(self.prompts.distances) + len(self.windows.distances)
            self.nan = self.nan or NotANumber(number, text.first + int(rows[0]))
        for place in exact.outputs:
            if self.first_nan:
                return
            if place in reading.outputs and reading.outputs[place].amax().isnan():
                self.first_nan = f"the outputs of {place}"


def measure(
    dtype: torch.dtype,
    texts: Texts,
    readings: Iterable[Reading],
    exact: Iterable[Reading],
    norms: Mapping[str, TrueNorm] | None = None,
) -> Measures:
    """Return the measures of readings against the exact ones.

    Args:
        dtype: as ``Measures`` takes it.
        readings, exact: of the prompts, then of the windows. Each may be read as it is counted.
        norms: the original's, for norms that were read by themselves.
    """
    measures = Measures(dtype)
    for number, (text, reading, true) in enumerate(zip(texts.all, readings, exact, strict=True)):
        measures.add(text, reading, true, norms or {}, is_prompt=number < len(texts.prompts))
    return measures


@dataclass
class Floor:
    """The noise floor: the measures of transformers at the dtype that are kept.

    Attributes:
        prompts, decoded, windows: of logits on the prompts, on tokens read one by one, on each window.
        position: the largest RMS error at a position of a text.
        places: the relative RMS error at each norm and block.
        gradients: the relative error of each Parameter's gradient; empty if the caller did not ask for them.
        bitwise: how far minigpt in reference arithmetic is from transformers.
        losses: tokens and loss of each window of the whole text file, by minigpt in reference arithmetic; of another
            architecture, and of a model that does not fit, by transformers.
        precisions: the RMS error of transformers' logits in float32, float16 and bfloat16, on the prompts.
    """

    prompts: Distance
    decoded: Distance
    windows: list[Distance]
    position: float
    places: dict[str, float]
    gradients: dict[str, float]
    bitwise: Distance
    losses: list[Sequence[float]]
    precisions: dict[str, float]

    @property
    def longer(self) -> Distance:
        """The distance of all windows together."""
        return sum(self.windows, Distance())


def precision_of(error: float, errors: Mapping[str, float]) -> Precision | None:
    """Return the dtype whose error is nearest to one, by their quotient; None if there is none to compare with."""
    nearest, quotient = None, math.inf
    for name, noise in errors.items():
        if not (0 < noise < math.inf and 0 < error < math.inf):
            continue
        apart = abs(math.log(error / noise))
        if apart < quotient:
            nearest, quotient = Precision(name, error / noise), apart
    return nearest
