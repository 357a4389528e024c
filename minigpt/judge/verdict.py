"""Is it still the same model? A candidate held against an original, part by part."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.errors import ConfigError
from minigpt.judge.candidate import Candidate, HostCandidate, Reading
from minigpt.judge.gradients import gradient_errors
from minigpt.judge.measures import Distance, LogitsMeter, RowDistance, against_noise_floor, mean_by_rows, perplexity_of
from minigpt.judge.new_errors import new_errors
from minigpt.judge.prompts import BUILT_IN
from minigpt.judge.reference import milliseconds
from minigpt.judge.rules import decide, is_far_off
from minigpt.judge.search import Search, SiteSwap, bisect_sites
from minigpt.judge.stored import Stored
from minigpt.judge.truth import Sample, Truth
from minigpt.norms.registry import require_on
from minigpt.precision import dtype_name
from minigpt.report import fields
from minigpt.report.parity_report import ParityReport

SLACK = 1.1  # an error that is so many times what storing does is explained by it
LAST_TOKENS = 12  # of a text, which the report shows


class Judgement:
    """One candidate under judgement. Its methods only read it, but for the sites of a search.

    Args:
        limits: of the budget, by quantity.
        say: called with a few words as a step begins.
    """

    def __init__(
        self, truth: Truth, candidate: Candidate, limits: dict[str, float], say: Callable[[str], None]
    ) -> None:
        self.truth, self.candidate, self.limits, self.say = truth, candidate, limits, say

    def search(
        self, file: str | Path | None, gradients: bool, *, sensitivity: bool, remove: bool, bisect: bool
    ) -> ParityReport:
        """Search the sites, then return the report without the verdict.

        Raises:
            ConfigError: if the candidate is no model of minigpt.
        """
        candidate, sites = self.candidate, self.candidate.swapped
        if not isinstance(candidate, HostCandidate):
            name = "sensitivity" if sensitivity else "remove" if remove else "bisect"
            raise ConfigError("needs a model whose norms can be swapped: a source, or a GPT2 of minigpt", argument=name)
        parts: dict[str, Any] = {}
        with Search(self.truth, candidate, file) as search:
            if sensitivity or remove:
                self.say("swapping one site at a time")
                parts["sensitivity"] = search.sensitivity()
            if remove:
                parts["removal"] = removal = search.removal(self.limits.get("kl", torch.inf), self.say)
                if self.limits:
                    sites = self._allowed(search.swap, [step.site for step in removal.steps])
                    parts["removal"] = dataclasses.replace(removal, allowed=len(sites))
            with search.swap.only(sites):
                report = self.report(sites, gradients)
            if candidate.fits is not None and sites != candidate.swapped:
                parts["fit"] = [search.swap.fits[site] for site in sites]
            if bisect:
                self.say("searching for the sites that break it")
                parts["bisect"] = bisect_sites(candidate.swapped, lambda sites: self._fails(search.swap, sites))
        return dataclasses.replace(report, **parts)

    def _allowed(self, swap: SiteSwap, sites: list[str]) -> list[str]:
        """Return the longest beginning of a list of sites that the budget allows on all texts."""
        most_kl = self.limits.get("kl", torch.inf)
        self.say(f"checking {len(sites)} sites on all texts")
        while sites and self._fails(swap, sites, most_kl):
            sites = sites[:-1]
            self.say(f"checking {len(sites)} sites on all texts")
        return sites

    def _fails(self, swap: SiteSwap, sites: list[str], most_kl: float = torch.inf) -> bool:
        """Return whether the report fails with the norm at these of its sites only."""
        with swap.only(sites):
            measured = Measured(self.truth, self.candidate)
            report = ParityReport(**self._about(sites), **measured.figures())
        return not decide(report, self.limits).passed or not measured.largest_kl <= most_kl

    def report(self, sites: list[str], gradients: bool) -> ParityReport:
        """Return the report without the verdict.

        Args:
            sites: those that hold the norm in question now.
        """
        truth, candidate = self.truth, self.candidate
        self.say("comparing logits and norms")
        measured = Measured(truth, candidate, at_places=True)
        if truth.text_file:
            self.say(f"perplexity of {truth.text_file}")
        figures, gradient_rows = measured.figures(continuing=True), None
        if gradients:
            self.say("comparing gradients")
            if (after := candidate.gradients()) is not None:
                gradient_rows = gradient_errors(after, truth.gradients or {}, truth.gradient_noise)
        require_on(candidate.norm, truth.device)
        lacking = {
            "norms and blocks": not measured.propagated,
            "norms by themselves": bool(truth.sites and measured.propagated) and not measured.local,
            "tokens one by one": any(prompt.written for prompt in truth.prompts) and measured.decoded is None,
            "gradients": gradients and gradient_rows is None,
        }
        about = self._about(sites)
        about["notes"] += measured.notes
        candidate_ms = milliseconds(lambda: candidate.logits(truth.longest), truth.device)
        return ParityReport(
            **about, **figures, **measured.places(sites), new_errors=measured.new_errors(),
            every_place=measured.has_every_place, tokens=measured.along_the_longest(),
            speed=fields.Speed(candidate_ms, truth.reference_ms), gradients=gradient_rows,
            missing=[part for part, is_lacking in lacking.items() if is_lacking],
        )  # fmt: skip

    def _about(self, sites: list[str]) -> dict[str, Any]:
        """Return what is judged."""
        truth, candidate = self.truth, self.candidate
        is_part = len(sites) < len(candidate.swapped)
        read = {token for sample in truth.samples for token in sample.ids}
        longest, config, error = max(len(sample.ids) for sample in truth.samples), truth.config, truth.bitwise_error
        return dict(
            model=candidate.name, against=None if candidate.name == truth.source else truth.source,
            norm=candidate.norm, against_norm=truth.norm, quantize=candidate.quantize, center=candidate.center,
            sites=[site for site in truth.sites if site in sites] if is_part else list(candidate.sites),
            device=str(truth.device), dtype=dtype_name(truth.dtype), attention=candidate.attention or truth.attention,
            versions=truth.versions, prompts=truth.described, built_in=truth.described == BUILT_IN,
            exact=candidate.is_exact, difference=candidate.difference, fit=candidate.fits,
            notes=[*candidate.notes, *_of_texts(truth)],
            bitwise=fields.Bitwise(error.largest == 0, error.largest) if error.count else None,
            coverage=fields.Coverage(longest, config.n_positions, len(read), config.vocab_size),
        )  # fmt: skip


def _of_texts(truth: Truth) -> list[str]:
    """Return what a reader should know of the texts."""
    if truth.why_random is None:
        return []
    return [f"The texts are random ids, since {truth.why_random}."]


class Measured:
    """What a candidate computes on all texts, held against the truth.

    Args:
        at_places: also at each norm, by itself (``local``) and after everything before it (``propagated``), and in the
            residual stream after each block.
    """

    def __init__(self, truth: Truth, candidate: Candidate, *, at_places: bool = False) -> None:
        self.truth, self.candidate = truth, candidate
        self.local: defaultdict[str, RowDistance] = defaultdict(RowDistance)
        self.propagated: defaultdict[str, RowDistance] = defaultdict(RowDistance)
        self.prompts, self.windows = LogitsMeter(), LogitsMeter()
        self.stored = [Stored(truth.dtype, Distance) for _ in ("prompts", "windows")]
        self.stored_places: dict[str, Stored[RowDistance]] = {}
        self.read: list[Sample] = []  # the prompts on which norms and blocks were read
        self.nan: fields.NotANumber | None = None
        self.chosen: list[list[int]] = []
        for number, sample in enumerate(truth.samples):
            is_prompt = number < len(truth.prompts)
            reading = candidate.read(sample) if is_prompt and at_places else Reading(candidate.logits(sample))
            if reading.logits.isnan().any():
                candidate.refuse_nan("the logits")
                row = int(reading.logits.isnan().any(-1).nonzero()[0])
                self.nan = self.nan or fields.NotANumber(number, sample.compared.start + row)
            if is_prompt:
                if reading.outputs:
                    self._add_places(sample, reading.outputs)
                self.chosen.append(reading.logits[sample.before_new].argmax(-1).tolist())
            meter, stored = (self.prompts, self.stored[0]) if is_prompt else (self.windows, self.stored[1])
            stored.add(reading.logits, sample.truth)
            meter.add(sample.truth, reading.logits, truth.targets(sample), sample.counted)
        self.decoded = candidate.decode()
        if self.decoded is not None:
            self.chosen = [logits.argmax(-1).tolist() for logits in self.decoded]

    def _add_places(self, sample: Sample, outputs: Mapping[str, Tensor]) -> None:
        """Count the outputs of norms and blocks on a text.

        Raises:
            NormError: if a norm returned NaN where the truth is a number.
        """
        exact_outputs = self.truth.true_outputs(sample)
        if exact_outputs:
            self.read.append(sample)
        for place, exact in exact_outputs.items():
            if (output := outputs.get(place)) is not None:
                if output.isnan().any():
                    self.candidate.refuse_nan(f"the outputs of {place}")
                self.propagated[place].add(output, exact)
                stored = self.stored_places.setdefault(place, Stored(self.truth.dtype, RowDistance))
                stored.add(output, exact)
        for site, x in sample.inputs.items():
            if site in outputs:
                rounded = x[None].to(outputs[site].dtype)  # (1, T, C)
                output = self.candidate.normalize(site, rounded.clone())
                if output is not None and site in self.truth.norms:
                    self.local[site].add(output[0], self.truth.norms[site](rounded[0]))

    def places(self, swapped: list[str]) -> dict[str, Any]:
        """Return the error at every norm, and in the residual stream after every block, in the order of the data."""
        blocks: list[fields.BlockError] = []
        sites: list[fields.NormSiteError] = []
        for place in self.truth.noise:
            if place not in self.propagated:
                continue
            error = self.propagated[place].relative
            noise = self._noise_at(place)
            if place in self.truth.blocks:
                blocks.append(fields.BlockError(place, error, noise))
            else:
                alone = self.local[place].relative if place in self.local else None
                sites.append(fields.NormSiteError(place, alone, error, noise, place in swapped))
        return {"norm_sites": sites, "blocks": blocks}

    def _noise_at(self, place: str) -> float:
        """Return the noise at a norm or block: transformers' own, or what storing has rounded, if that is more."""
        return max(self.truth.noise[place], self._rounding(place))

    def _rounding(self, place: str) -> float:
        """Return the relative error of true outputs that are stored as the program's are; 0 if that is not narrower."""
        stored = self.stored_places[place].coarsest
        return 0.0 if stored is None else stored[1].relative

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how norms and blocks were stored."""
        names: set[str] = set()
        for place, stored in self.stored_places.items():
            if stored.coarsest is not None and self._rounding(place) > self.truth.noise[place]:
                names.add(dtype_name(stored.coarsest[0]))
        if not names:
            return []
        return [
            f"Norms and blocks are stored in {' and '.join(sorted(names))}; what that rounds counts as noise there."
        ]

    def stored_logits(self) -> fields.StoredLogits | None:
        """Return what storing the true logits as the candidate's are does to them, if that is beyond the noise."""
        stored = self.stored[0].coarsest
        if stored is None:
            return None
        dtype, rounding = stored
        ratio = fields.noise_ratio(rounding.rms, self.truth.noise_floor.rms, rounding.scale)
        explains = self.prompts.distance.rms <= SLACK * rounding.rms
        if self.windows.distances:
            of_windows = self.stored[1].errors.get(dtype)
            explains = explains and of_windows is not None and self.windows.distance.rms <= SLACK * of_windows.rms
        if not ratio > fields.MOST_NOISE:
            return None
        return fields.StoredLogits(dtype_name(dtype), rounding.rms, rounding.largest, ratio, explains)

    def new_errors(self) -> list[str]:
        """Return the norms and blocks that add an error beyond any noise to what was off before them."""
        noise: dict[str, float] = {}
        for place, distance in self.propagated.items():
            floor = self._noise_at(place)
            if is_far_off(distance.relative, floor):
                noise[place] = floor
        if not noise or not self.candidate.adds_errors:
            return []
        texts = [(sample, self.candidate.read(sample).outputs) for sample in self.read]
        found = new_errors(self.truth, texts)
        if not found:
            return self._grown()
        places: list[str] = []
        for place in self.truth.noise:
            if place in noise and is_far_off(found.get(place, 0.0), noise[place]):
                places.append(place)
        return places

    def _grown(self) -> list[str]:
        """Return the places at which the error, in units of the noise, is far above that at every place before."""
        largest, places = 1.0, list[str]()
        for place in self.truth.noise:
            if place in self.propagated:
                ratio = fields.noise_ratio(self.propagated[place].relative, self._noise_at(place))
                if is_far_off(ratio, largest):
                    places.append(place)
                largest = max(largest, ratio)
        return places

    @property
    def has_every_place(self) -> bool:
        """Whether every norm and block was read on every prompt."""
        return len(self.read) == len(self.truth.prompts) and self.propagated.keys() >= self.truth.noise.keys()

    @property
    def largest_kl(self) -> float:
        """The larger mean KL divergence, of the prompts or of the windows."""
        return max(meter.mean("kl")["kl"] for meter in (self.prompts, self.windows) if meter.columns)

    def figures(self, *, continuing: bool = False) -> dict[str, Any]:
        """Return the parts that the verdict depends on.

        Args:
            continuing: whether to let the candidate write where its greedy tokens part from the original's.
        """
        truth = self.truth
        samples, meter = (truth.windows, self.windows) if truth.text_file else (truth.prompts, self.prompts)
        window, row = meter.worst
        position = samples[window].compared.start + row
        text = truth.text(samples[window].ids[: position + 1][-LAST_TOKENS:])
        return dict(
            logits=against_noise_floor(self.prompts.distance, self.prompts.without_shift, truth.noise_floor),
            distribution=meter.distribution(fields.WorstPosition(window, position, text)),
            greedy=_compare_greedy(truth, self.candidate if continuing else None, self.chosen),
            decoding=self._decoding(),
            text=_compare_windows(truth, self.windows),
            prompt_off=_first_prompt_off(truth, self.prompts),
            stored=self.stored_logits(),
            perplexity=self._perplexity(),
            nan=self.nan,
        )

    def _decoding(self) -> fields.LogitsError | None:
        if self.decoded is None:
            return None
        meter = LogitsMeter()
        for prompt, logits in zip(self.truth.prompts, self.decoded, strict=True):
            if len(logits):
                meter.add(prompt.truth[prompt.before_new], logits, self.truth.targets(prompt)[:0])
        # Of few tokens the reference's error may be small by chance.
        floor = max(self.truth.decoding_floor, self.truth.noise_floor, key=lambda distance: distance.rms)
        return against_noise_floor(meter.distance, meter.without_shift, floor)

    def _perplexity(self) -> fields.PerplexityChange | None:
        """Return the perplexity of the whole text file before and after, by windows that overlap."""
        truth = self.truth
        if truth.text_file is None or (rows := self.candidate.window_losses()) is None:
            return None
        before, losses = [loss for _, loss in truth.losses], [row.loss for row in rows]
        counts, window = [row.tokens for row in rows], truth.config.window
        change, change_se = mean_by_rows([b - a for a, b in zip(before, losses, strict=True)], counts)
        return fields.PerplexityChange(
            file=truth.text_file, tokens=len(truth.text_ids), window=window, stride=max(1, window // 2),
            reference=perplexity_of(sum(before), sum(counts)), candidate=perplexity_of(sum(losses), sum(counts)),
            loss_se=mean_by_rows(losses, counts)[1], loss_change=change, loss_change_se=change_se,
            entropy=sum(row.entropy for row in rows) / sum(counts), rows=[[row.tokens, row.loss] for row in rows],
        )  # fmt: skip

    def along_the_longest(self) -> fields.TextDivergence:
        """Return the KL divergence along the longest prompt and its continuation."""
        truth, longest = self.truth, self.truth.longest
        number = truth.prompts.index(longest)
        pieces = [truth.text([token]) or f"#{token} " for token in longest.ids]
        return fields.TextDivergence(number, pieces, self.prompts.columns[number]["kl"].tolist(), longest.new_from)


def _compare_windows(truth: Truth, meter: LogitsMeter) -> fields.TextError | None:
    """Compare the logits of each window of a text; name the first window and position where they are off."""
    if not truth.windows:
        return None
    total, first_off = sum(truth.window_floors, Distance()), None
    for i, (sample, distance, floor) in enumerate(
        zip(truth.windows, meter.distances, truth.window_floors, strict=True)
    ):
        ratio = fields.noise_ratio(distance.rms, max(floor.rms, total.rms), distance.scale)
        if not ratio <= fields.MOST_NOISE:  # written so that NaN is off
            errors = meter.columns[i]["error"]
            row = _first_over(errors, fields.MOST_NOISE * truth.position_noise)
            position = sample.compared.start + row
            first_off = fields.PositionOff(
                i, position, sample.start + position, float(errors[row]), truth.position_noise, ratio
            )
            break
    return fields.TextError(
        file=truth.text_file, tokens=len(meter.column("kl")), windows=len(truth.windows),
        window=truth.config.window, logits=against_noise_floor(meter.distance, meter.without_shift, total),
        first_off=first_off,
    )  # fmt: skip


def _first_prompt_off(truth: Truth, meter: LogitsMeter) -> fields.PromptOff | None:
    """Name the first prompt and position where the logits are off, and count the prompts that are."""
    floor, noise = truth.noise_floor, truth.position_noise
    first: fields.PromptOff | None = None
    prompts_off = 0
    for number, distance in enumerate(meter.distances):
        ratio = fields.noise_ratio(distance.rms, floor.rms, distance.scale)
        if ratio <= fields.MOST_NOISE:
            continue
        prompts_off += 1
        if first is None:
            errors = meter.columns[number]["error"]
            position = _first_over(errors, fields.MOST_NOISE * noise)
            error = float(errors[position])
            first = fields.PromptOff(number, position, error, noise, ratio, 1, len(meter.distances))
    return None if first is None else dataclasses.replace(first, prompts_off=prompts_off)


def _first_over(errors: Tensor, limit: float) -> int:
    """Return the first position (T) whose error is over a limit or NaN; if there is none, that of the largest."""
    for position, error in enumerate(errors.tolist()):
        if not error <= limit:
            return position
    return int(errors.argmax())


def _compare_greedy(truth: Truth, candidate: Candidate | None, chosen: list[list[int]]) -> fields.Greedy:
    """Compare what a candidate chooses, given the tokens before, with what transformers wrote.

    Args:
        candidate: writes what follows the first difference; None for no such text.
    """
    compared, partings = 0, []
    noise = 2 * truth.noise_floor.largest  # can swap two logits this close: each may be off by the floor's maximum
    for i, (prompt, tokens) in enumerate(zip(truth.prompts, chosen, strict=True)):
        pairs = enumerate(zip(tokens, prompt.written, strict=True))
        j = next((j for j, (token, expected) in pairs if token != expected), None)
        compared += len(prompt.written) if j is None else j + 1
        if j is not None:
            best, second = prompt.truth[prompt.before_new][j].topk(2).values.tolist()
            margin = best - second
            partings.append(fields.Divergence(i, j, tokens[j], prompt.written[j], margin, noise, margin <= noise))
    first = min(partings, key=lambda parting: parting.within_noise, default=None)
    if first is not None and candidate is not None:
        prompt = truth.prompts[first.prompt]
        new = candidate.continue_prompt(prompt) or [*prompt.written[: first.token], first.candidate_id]
        first = dataclasses.replace(
            first, prompt_text=truth.text(prompt.prompt), candidate_text=truth.text(new),
            reference_text=truth.text(prompt.written),
        )  # fmt: skip
    return fields.Greedy(compared, first)
