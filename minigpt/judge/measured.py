"""Measures of a runner's readings, against transformers in float64 on the same texts.

Of transformers at the dtype this is the noise floor. Of a candidate it is what a report compares with that floor.

T tokens, V vocabulary, C embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.judge.measures import Distance, LogitsMeter, RowDistance, Stored
from minigpt.judge.reading import Reading, Sample, rounded_as
from minigpt.judge.texts import Texts
from minigpt.norms.formulas import TrueNorm
from minigpt.report.fields import NotANumber


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
        self.read: list[Sample] = []
        self.nan: NotANumber | None = None
        self.first_nan = ""

    def add(
        self, sample: Sample, reading: Reading, exact: Reading, norms: Mapping[str, TrueNorm], *, is_prompt: bool
    ) -> None:
        """Count a text: its logits; of a prompt its norms and blocks too, as far as these were read."""
        self._look_for_nan(sample, reading, exact)
        meter, stored = (self.windows, self.stored_windows)
        if is_prompt:
            meter, stored = (self.prompts, self.stored_prompts)
        if not self.is_floor:
            stored.add(reading.logits, exact.logits)
        meter.add(exact.logits, reading.logits, sample.targets(exact.logits.device), sample.counted)
        if not is_prompt:
            return
        self.chosen.append(reading.logits[sample.before_new].argmax(-1).tolist())
        if not reading.outputs or not exact.outputs:
            return
        self.read.append(sample)
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

    def add_decoded(self, prompts: Sequence[Sample], decoded: Sequence[Tensor], exact: Sequence[Tensor]) -> LogitsMeter:
        """Count the logits of what was written after each prompt, read token by token; return their meter.

        Args:
            exact: the true logits of each prompt.
        """
        self.decoded = LogitsMeter(with_distributions=False)
        self.chosen = []
        for sample, logits, true in zip(prompts, decoded, exact, strict=True):
            self.chosen.append(logits.argmax(-1).tolist())
            if len(logits):
                self.decoded.add(true[sample.before_new], logits)
        return self.decoded

    def _look_for_nan(self, sample: Sample, reading: Reading, exact: Reading) -> None:
        """Keep where the first NaN is. What transformers computes has been checked."""
        if self.is_floor:
            return
        rows = reading.logits.amax(-1).isnan().nonzero()  # a NaN is the largest
        if len(rows):
            self.first_nan = self.first_nan or "the logits"
            number = len(self.prompts.distances) + len(self.windows.distances)
            self.nan = self.nan or NotANumber(number, sample.first + int(rows[0]))
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
    *,
    is_floor: bool = False,
) -> Measures:
    """Return the measures of readings against the exact ones.

    Args:
        dtype, is_floor: as ``Measures`` takes them.
        readings, exact: of the prompts, then of the windows. Each may be read as it is counted.
        norms: the original's, for norms that were read by themselves.
    """
    measures = Measures(dtype, is_floor=is_floor)
    for number, (sample, reading, true) in enumerate(zip(texts.all, readings, exact, strict=True)):
        measures.add(sample, reading, true, norms or {}, is_prompt=number < len(texts.prompts))
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
