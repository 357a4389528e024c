"""Figures of a report: a candidate's measures compared with the noise floor.

T tokens, V vocabulary, C embedding.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minigpt.judge.candidate import Claim
from minigpt.judge.gradients import gradient_rows
from minigpt.judge.measures import (
    Distance,
    LogitsMeter,
    Measures,
    against_noise_floor,
    mean_by_rows,
)
from minigpt.judge.original_data import OriginalData
from minigpt.judge.runners import Runner
from minigpt.judge.texts import BUILT_IN
from minigpt.judge.verdict import is_far_off
from minigpt.precision import dtype_name
from minigpt.report import fields
from minigpt.report.noise import MOST_NOISE, noise_ratio
from minigpt.scoring import Scored, perplexity_of

SLACK = 1.1  # an error that is so many times what storing does is explained by it
LAST_TOKENS = 12  # of a text, which the report shows


def all_figures(
    measures: Measures,
    original: OriginalData,
    claim: Claim,
    sites: list[str],
    losses: Sequence[Scored] | None,
    missing: list[fields.Unjudged],
    writer: Runner | None,
) -> fields.ParityFigures:
    """Return the figures of a candidate's measures.

    Args:
        sites: those that hold the norm in question now.
        losses: on the whole text file, if there is one.
        missing: the parts that the candidate does not give.
        writer: continues the prompt where the candidate parts from transformers; None if nobody reads its text.
    """
    facts = original.facts
    floor = original.floor
    texts = original.texts
    prompts = measures.prompts
    shown = list(claim.sites)
    if len(sites) < len(claim.swapped):  # a search has left some out
        shown = [site for site in facts.sites if site in sites]
    rows = None
    if measures.gradients is not None:
        rows = gradient_rows(measures.gradients, floor.gradients)
    places = Places(measures, original)
    error = floor.bitwise
    notes = [*facts.notes, *claim.notes]
    if texts.why_random is not None:
        notes.append(f"The texts are random ids, since {texts.why_random}.")
    return fields.ParityFigures(
        model=claim.name,
        against=None if claim.name == facts.source else facts.source,
        norm=claim.norm,
        against_norm=facts.norm,
        sites=shown,
        device=str(facts.device),
        dtype=dtype_name(facts.dtype),
        attention=claim.attention or facts.attention,
        quantize=claim.quantize,
        center=claim.center,
        difference=claim.difference,
        exact=claim.is_exact,
        versions=facts.versions,
        prompts=texts.described,
        built_in=texts.described == BUILT_IN,
        bitwise=fields.Bitwise(error.largest == 0, error.largest) if error.count else None,
        logits=against_noise_floor(prompts.distance, prompts.without_shift, floor.prompts),
        distribution=distribution(measures, original),
        greedy=greedy(measures.chosen, original, writer),
        decoding=decoding_error(measures, original),
        text=text_error(measures, original),
        perplexity=perplexity_change(losses, original),
        prompt_off=first_prompt_off(prompts, original),
        stored=stored_logits(measures, original),
        norm_sites=places.sites(sites),
        blocks=places.blocks(),
        new_errors=places.grown() if claim.adds_errors else [],
        every_place=(len(measures.read), len(places.errors)) == (len(texts.prompts), len(facts.places)),
        tokens=along_the_longest(measures, original),
        coverage=coverage(original),
        nan=measures.nan,
        gradients=rows,
        fit=claim.fits,
        missing=missing,
        notes=[*notes, *places.notes()],
    )


# Logits


def decoding_error(measures: Measures, original: OriginalData) -> fields.LogitsError | None:
    """Return the error of the logits that were read token by token, if they were."""
    decoded = measures.decoded
    if decoded is None:
        return None
    floor = original.floor.decoded
    if original.floor.prompts.rms > floor.rms:  # of few tokens the reference's error may be small by chance
        floor = original.floor.prompts
    return against_noise_floor(decoded.distance, decoded.without_shift, floor)


def distribution(measures: Measures, original: OriginalData) -> fields.Distribution:
    """Return how next-token distributions differ: on the text file if there is one, else on the prompts."""
    texts, meter = original.texts.prompts, measures.prompts
    if original.texts.file is not None:
        texts, meter = original.texts.windows, measures.windows
    window, row = meter.worst
    text = texts[window]
    position = text.first + row
    last = original.texts.decode(text.ids[: position + 1][-LAST_TOKENS:])
    return meter.distribution(fields.WorstPosition(window, position, last))


def text_error(measures: Measures, original: OriginalData) -> fields.TextError | None:
    """Return the error of the windows' logits, and the first window and position where they are off."""
    if not original.texts.windows:
        return None
    meter, floor = measures.windows, original.floor
    off = first_off(meter, [max(window.rms, floor.longer.rms) for window in floor.windows], floor.position)
    position = None
    if off is not None:
        text = original.texts.windows[off.number]
        row = text.first + off.row
        position = fields.PositionOff(off.number, row, text.start + row, off.error, floor.position, off.ratio)
    return fields.TextError(
        file=original.texts.file,
        tokens=len(meter.column("kl")),
        windows=len(original.texts.windows),
        window=original.facts.shape.window,
        logits=against_noise_floor(meter.distance, meter.without_shift, floor.longer),
        first_off=position,
    )


def first_prompt_off(meter: LogitsMeter, original: OriginalData) -> fields.PromptOff | None:
    """Return the first prompt whose logits are off, the first position there, and how many prompts are off."""
    floor, texts = original.floor, len(meter.distances)
    off = first_off(meter, [floor.prompts.rms] * texts, floor.position)
    if off is None:
        return None
    return fields.PromptOff(off.number, off.row, off.error, floor.position, off.ratio, off.texts, texts)


class FirstOff(NamedTuple):
    """The first text whose logits are off, the first row there and its error, and how many texts are off."""

    number: int
    ratio: float
    row: int
    error: float
    texts: int


def first_off(meter: LogitsMeter, floors: Sequence[float], noise: float) -> FirstOff | None:
    """Return where the logits of texts are off first; None if they are not.

    Args:
        floors: the RMS error of transformers on each text.
        noise: its largest RMS error at a position. If no position is off, the row is that of the largest error.
    """
    off: list[tuple[int, float]] = []
    for number, (distance, floor) in enumerate(zip(meter.distances, floors, strict=True)):
        ratio = noise_ratio(distance.rms, floor, distance.scale)
        if not ratio <= MOST_NOISE:  # written so that NaN is off
            off.append((number, ratio))
    if not off:
        return None
    number, ratio = off[0]
    errors = meter.columns[number]["error"]
    is_off = ~(errors <= MOST_NOISE * noise)
    row = int(is_off.long().argmax() if is_off.any() else errors.argmax())
    return FirstOff(number, ratio, row, float(errors[row]), len(off))


def stored_logits(measures: Measures, original: OriginalData) -> fields.StoredLogits | None:
    """Return what storing the true logits as the candidate's are does to them, if that is beyond the noise."""
    coarsest = measures.stored_prompts.coarsest
    if coarsest is None:
        return None
    dtype, rounding = coarsest
    ratio = noise_ratio(rounding.rms, original.floor.prompts.rms, rounding.scale)
    if not ratio > MOST_NOISE:
        return None
    explains = is_explained(measures.prompts, rounding)
    if measures.windows.distances:
        explains = explains and is_explained(measures.windows, measures.stored_windows.errors.get(dtype))
    return fields.StoredLogits(dtype_name(dtype), rounding.rms, rounding.largest, ratio, explains)


def is_explained(meter: LogitsMeter, rounding: Distance | None) -> bool:
    """Return whether logits are off by no more than storing them has rounded."""
    return rounding is not None and meter.distance.rms <= SLACK * rounding.rms


def along_the_longest(measures: Measures, original: OriginalData) -> fields.TextDivergence:
    """Return the KL divergence along the longest prompt and its continuation."""
    prompts = original.texts.prompts
    number = max(range(len(prompts)), key=lambda number: len(prompts[number].ids))
    longest = prompts[number]
    pieces = [original.texts.decode([token]) or f"#{token} " for token in longest.ids]
    return fields.TextDivergence(number, pieces, measures.prompts.columns[number]["kl"].tolist(), longest.new_from)


# Greedy decoding, perplexity


def greedy(chosen: Sequence[Sequence[int]], original: OriginalData, writer: Runner | None = None) -> fields.Greedy:
    """Compare what a candidate chooses, given the tokens before, with what transformers wrote.

    Args:
        writer: writes the text where the two part, which is shown beside transformers'.
    """
    compared, partings = 0, list[fields.Divergence]()
    noise = 2 * original.floor.prompts.largest  # can swap two logits this close: each may be off by the floor's maximum
    for number, (prompt, tokens) in enumerate(zip(original.texts.prompts, chosen, strict=True)):
        is_right = [token == right for token, right in zip(tokens, prompt.written, strict=True)]
        if all(is_right):
            compared += len(prompt.written)
            continue
        first = is_right.index(False)
        compared += first + 1
        best, second = original.logits(prompt)[prompt.before_new][first].topk(2).values.tolist()
        margin = best - second
        partings.append(
            fields.Divergence(
                number, first, tokens[first], prompt.written[first], margin, noise, within_noise=margin <= noise
            )
        )
    if not partings:
        return fields.Greedy(compared, None)
    parting = next((parting for parting in partings if not parting.within_noise), partings[0])
    if writer is not None:
        prompt = original.texts.prompts[parting.prompt]
        new = [*prompt.written[: parting.token], parting.candidate_id]
        for text, _ in writer.write([prompt.prompt], len(prompt.written), original.facts.shape.eos_token_ids):
            new = text.written
        parting = replace(
            parting,
            prompt_text=original.texts.decode(prompt.prompt),
            candidate_text=original.texts.decode(new),
            reference_text=original.texts.decode(prompt.written),
        )
    return fields.Greedy(compared, parting)


def perplexity_change(losses: Sequence[Scored] | None, original: OriginalData) -> fields.PerplexityChange | None:
    """Return the perplexity of the whole text file before and after, by windows that overlap."""
    if original.texts.file is None or losses is None:
        return None
    counts = [row.tokens for row in losses]
    before, after = [loss for _, loss in original.floor.losses], [row.loss for row in losses]
    changes = [b - a for a, b in zip(before, after, strict=True)]
    change, change_se = mean_by_rows(changes, counts)
    scored, window = sum(counts), original.facts.shape.window
    return fields.PerplexityChange(
        file=original.texts.file,
        tokens=len(original.texts.file_ids),
        window=window,
        stride=max(1, window // 2),
        reference=perplexity_of(sum(before), scored),
        candidate=perplexity_of(sum(after), scored),
        loss_se=mean_by_rows(after, counts)[1],
        loss_change=change,
        loss_change_se=change_se,
        entropy=sum(row.entropy for row in losses) / scored,
        rows=[[row.tokens, row.loss] for row in losses],
    )


# Texts


def coverage(original: OriginalData) -> fields.Coverage:
    """Return what the texts reach."""
    shape = original.facts.shape
    tokens: set[int] = set()
    longest = 0
    for text in original.texts.all:
        tokens.update(text.ids)
        longest = max(longest, len(text.ids))
    return fields.Coverage(longest, shape.n_positions, len(tokens), shape.vocab_size)


# Norms and blocks


class Places:
    """The errors of norms and blocks, and the noise there.

    Attributes:
        errors: of the output of each norm and block, in the order of the data.
        noise: transformers' own error, or what storing has rounded, if that is more.
        stored: the dtypes, by name, whose rounding is more.
    """

    def __init__(self, measures: Measures, original: OriginalData) -> None:
        self.measures, self.original = measures, original
        self.errors: dict[str, float] = {}
        self.noise: dict[str, float] = {}
        self.stored: set[str] = set()
        for place in original.facts.places:
            if place not in measures.places:
                continue
            self.errors[place] = measures.places[place].relative
            noise = original.floor.places.get(place, 0.0)
            coarsest = measures.stored_places[place].coarsest
            if coarsest is not None and coarsest[1].relative > noise:
                dtype, rounding = coarsest
                noise = rounding.relative
                self.stored.add(dtype_name(dtype))
            self.noise[place] = noise

    def sites(self, swapped: Sequence[str]) -> list[fields.NormSiteError]:
        """Return the errors of the norms.

        Args:
            swapped: the sites that hold the norm in question.
        """
        rows: list[fields.NormSiteError] = []
        for site, error in self.errors.items():
            if site in self.original.facts.blocks:
                continue
            alone = self.measures.alone.get(site)
            local = None if alone is None else alone.relative
            rows.append(fields.NormSiteError(site, local, error, self.noise[site], site in swapped))
        return rows

    def blocks(self) -> list[fields.BlockError]:
        """Return the errors of the stream after each block."""
        rows: list[fields.BlockError] = []
        for place, error in self.errors.items():
            if place in self.original.facts.blocks:
                rows.append(fields.BlockError(place, error, self.noise[place]))
        return rows

    def grown(self) -> list[str]:
        """Return the places at which the error, in units of the noise, is far above that at every place before."""
        largest, places = 1.0, list[str]()
        for place, error in self.errors.items():
            ratio = noise_ratio(error, self.noise[place])
            if is_far_off(ratio, largest):
                places.append(place)
            largest = max(largest, ratio)
        return places

    def notes(self) -> list[str]:
        """Return what a reader should know of how norms and blocks were stored."""
        if not self.stored:
            return []
        names = " and ".join(sorted(self.stored))
        return [f"Norms and blocks are stored in {names}; what that rounds counts as noise there."]
