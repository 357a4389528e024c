"""The law: when a candidate is the same model, and what a budget allows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from minigpt.errors import ConfigError
from minigpt.report.fields import (
    MOST_DECODING_NOISE,
    MOST_NOISE,
    BudgetLine,
    PlaceOff,
    is_shifted,
    noise_ratio,
    perplexities,
    places,
    population,
)
from minigpt.report.numerals import brief, change, format_limit, percent, precise, uncertain
from minigpt.report.parity_report import ParityReport

MOST_PLACES = 8  # that a sentence names
FAR_OFF = 8.0  # an output is off from so many times transformers' own error there on


def decide(report: ParityReport, limits: Mapping[str, float]) -> ParityReport:
    """Return the report with its verdict: by the limits if there are some, else by parity."""
    if limits:
        measured = {name: QUANTITIES[name](report) for name in limits}
        lines = [BudgetLine(name, limits[name], x, kept=x <= limits[name]) for name, x in measured.items()]
        report = replace(report, budget=lines)  # NaN is not kept
    wrong = [*(_broken_budget(report) if limits else _wrong_outputs(report))]
    off = _place_off(report, is_wrong=bool(wrong))
    if not limits:
        if wrong:
            wrong += _where(report, off)
        elif off is not None:
            report = replace(report, notes=[*report.notes, *_right_but_for(report, off)])
        wrong += _wrong_gradients(report)
    if report.changes:
        wrong.insert(0, f"{report.norm} changes the process: {', '.join(report.changes)}; the change was undone.")
    report = replace(report, verdict="fail" if wrong else "pass", first_off=off)
    return replace(report, reasons=[*_difference(report)] if report.outcome == "DIFFERENT" else wrong)


def is_far_off(error: float, noise: float) -> bool:
    """Return whether an output is off beyond any noise; NaN is."""
    return not noise_ratio(error, noise) <= FAR_OFF


def _place_off(report: ParityReport, *, is_wrong: bool) -> PlaceOff | None:
    """Return the first place whose error is beyond any noise; else, if the model is wrong, where the error grows."""
    rows = [] if report.center else places(report)  # a centred stream is another one
    errors: list[PlaceOff] = []
    for name, row in rows:
        error, noise = row["propagated_error"], row["noise"]
        if is_far_off(error, noise):
            return PlaceOff(name, error, noise, noise_ratio(error, noise))
        errors.append(PlaceOff(name, error, noise, noise_ratio(error, noise)))
    return largest_jump(errors) if is_wrong else None


def _where(report: ParityReport, off: PlaceOff | None) -> Iterator[str]:
    """Yield where the error of wrong outputs begins, as far as that is known."""
    if off is not None:
        yield _place_sentence(off)
    yield from _new_errors(report)
    logits_are_off = not report.logits.ratio <= MOST_NOISE
    is_explained = is_shifted(report) or is_stored(report)
    if off is None and logits_are_off and report.every_place and not is_explained:
        prompt = report.prompt_off
        is_everywhere = prompt is None or prompt.prompts_off == prompt.prompts
        cause = "the error is in the head" if is_everywhere else "these logits are of other ids or positions"
        yield (
            f"All {len(report.norm_sites)} norms and {len(report.blocks)} blocks are right on the prompts, and the "
            f"logits are not, so {cause}."
        )


def _new_errors(report: ParityReport) -> Iterator[str]:
    """Yield the places that add an error of their own, if there are several."""
    places = report.new_errors
    if len(places) > 1:
        more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
        yield f"An error of its own begins at each of {', '.join(places[:MOST_PLACES])}{more}."


def _right_but_for(report: ParityReport, off: PlaceOff) -> Iterator[str]:
    """Yield which outputs are off though the logits are right."""
    yield (
        f"The logits are right, but the output of {off.place} is not: it is off by {brief(off.error)} of its size, "
        f"where transformers' own error is {brief(off.noise)}."
    )
    yield from _new_errors(report)


def largest_jump(places: Sequence[PlaceOff]) -> PlaceOff | None:
    """Return the place beyond twice the noise at which the ratio grows most over the place before it."""
    before = [1.0, *(max(place.ratio, 1.0) for place in places)]
    jumps = [replace(place, ratio_before=ratio) for place, ratio in zip(places, before, strict=False)
             if place.ratio > MOST_NOISE]  # fmt: skip
    return max(jumps, key=lambda place: place.ratio / (place.ratio_before or 1.0), default=None)


def _place_sentence(off: PlaceOff) -> str:
    if off.ratio_before is None:
        return (
            f"The first output that is off is {off.place}'s, by {brief(off.error)} of its size, where transformers' "
            f"own error is {brief(off.noise)}."
        )
    return (
        f"The error grows most at {off.place}: from {brief(off.ratio_before)} to {brief(off.ratio)} times "
        "transformers' own."
    )


def _difference(report: ParityReport) -> Iterator[str]:
    """Yield how different the model is, a sentence for each set of tokens, and why that is expected."""
    measured, (before, after) = report.distribution, perplexities(report)
    yield (
        f"On {population(report)} the KL divergence is {uncertain(measured.kl_mean, measured.kl_mean_se)} nats a "
        f"token, and {uncertain(measured.top1_agreement, measured.top1_agreement_se, percent)} have the same likeliest "
        "token."
    )
    if not math.isnan(before):
        text = report.perplexity
        tokens = f"the {text.tokens:,} tokens of {text.file}" if text else "the prompts"
        changed = f"{precise(after)} instead of {precise(before)} ({change(before, after)})"
        yield f"The perplexity of {tokens} is {changed}."
    why = report.difference or f"{report.norm} is not a LayerNorm"
    if report.against is not None:
        why = f"{report.model} is another checkpoint than {report.against}"
    yield f"A difference is expected, since {why}; a budget says how much is allowed."


def _wrong_outputs(report: ParityReport) -> Iterator[str]:
    """Yield why this does not compute what the original does, a sentence each."""
    if report.nan is not None:
        yield f"The logits of text {report.nan.text} are NaN from position {report.nan.position} on."
    yield from _wrong_logits(report)
    if is_shifted(report):
        yield (
            "At each position all logits are shifted by one constant, and the distributions are the original's: "
            f"without the shift the error is {brief(_without_shift(report))} times the noise floor."
        )
    elif is_stored(report):
        yield _stored_sentence(report)
    else:
        yield from _wrong_positions(report)
    parting = report.greedy.first_divergence
    noise = 2 * report.stored.max_abs_error if report.stored is not None and is_stored(report) else 0.0
    if parting is not None and not parting.within_noise and parting.margin > noise:
        yield (
            f"Greedy decoding of prompt {parting.prompt} parts at new token {parting.token}, where the two best logits "
            f"are {brief(parting.margin)} apart and the noise is only {brief(parting.noise)}."
        )


def _wrong_logits(report: ParityReport) -> Iterator[str]:
    """Yield how far whole texts' logits are off, and those that are decoded a token at a time."""
    for when, logits, floor, most in (
        ("The", report.logits, f"noise floor of {report.dtype}", MOST_NOISE),
        ("Decoded a token at a time, the", report.decoding, "noise floor", MOST_DECODING_NOISE),
    ):
        if logits is not None and not logits.ratio <= most:  # written so that NaN fails
            yield (
                f"{when} logits' RMS error is {brief(logits.rms_error)}, {brief(logits.ratio)} times the {floor}; "
                f"at most {most:g} times is parity."
            )


def _without_shift(report: ParityReport) -> float:
    """Return the largest ratio that is left without a shift, where logits are off."""
    ratios: list[float] = []
    for error in (report.logits, report.decoding, report.text.logits if report.text is not None else None):
        if error is not None:
            ratios.append(error.ratio_without_shift)
    return max(ratios)


def is_stored(report: ParityReport) -> bool:
    """Return whether the logits are off by no more than storing them has rounded."""
    return report.stored is not None and report.stored.explains


def _stored_sentence(report: ParityReport) -> str:
    """Return that storing explains the error, and how to have more than that judged."""
    assert report.stored is not None
    dtype, ratio = report.stored.dtype, brief(report.stored.ratio)
    return (
        f"The logits are stored in {dtype}, and storing alone moves the true ones by {ratio} times the noise floor, "
        f"so no smaller error can be seen: write them in float32, or take a record of --dtype {dtype} if the program "
        "computes in that."
    )


def _wrong_positions(report: ParityReport) -> Iterator[str]:
    """Yield the first prompt and the first window that are off, with the position."""
    if report.stored is not None and not report.logits.ratio <= MOST_NOISE:
        yield (
            f"The logits are stored in {report.stored.dtype}, which explains {brief(report.stored.ratio)} of these "
            "times, and not the rest."
        )
    window = report.text.first_off if report.text is not None else None
    prompt = report.prompt_off
    if prompt is not None and not report.logits.ratio <= MOST_NOISE:
        right = prompt.prompts - prompt.prompts_off
        if right or window is None:
            others = f" {right} of the {prompt.prompts} prompts are right." if right else ""
            yield (
                f"In prompt {prompt.prompt}, from position {prompt.position} on, the logits are off: the RMS error "
                f"there is {brief(prompt.error)}, and transformers' own nowhere above {brief(prompt.noise)}.{others}"
            )
    if window is not None and report.text is not None:
        yield (
            f"In window {window.window} of {report.text.file or 'the built-in texts'}, from position "
            f"{window.position} on, the logits are off: the RMS error there is {brief(window.error)}, and "
            f"transformers' own nowhere above {brief(window.noise)}; the window's is {brief(window.ratio)} times the "
            "noise floor."
        )


def _wrong_gradients(report: ParityReport) -> Iterator[str]:
    """Yield a sentence on the gradients that are off, if there are some."""
    rows = report.gradients or ()
    if wrong := [row for row in rows if not row.ratio <= MOST_NOISE]:
        yield (
            f"The gradients of {len(wrong)} of {len(rows)} Parameters are off, most that of {wrong[0].parameter}: by "
            f"{brief(wrong[0].relative_error)} of its size, {brief(wrong[0].ratio)} times transformers' own error at "
            f"{report.dtype}; at most {MOST_NOISE:g} times is parity."
        )


def _broken_budget(report: ParityReport) -> Iterator[str]:
    """Yield the limits that were not kept, a sentence each."""
    removal = report.removal
    if removal is not None and removal.allowed is not None:
        if not removal.allowed:
            yield "The budget allows no site."
        return
    for line in report.budget or ():
        if not line.kept:
            limit, measured = (format_limit(line.quantity, x) for x in (line.limit, line.measured))
            yield f"The budget allows {line.quantity} {limit}, and it is {measured}."


def _perplexity_change(report: ParityReport) -> float:
    before, after = perplexities(report)
    return abs(after / before - 1)


def _worst(report: ParityReport, figure: str) -> float:
    """Return a figure of the logits, on whole texts or as they are decoded, whichever is larger; NaN if one is."""
    return float(np.max([part[figure] for part in (report.logits, report.decoding) if part is not None]))


QUANTITIES: dict[str, Callable[[ParityReport], float]] = {
    "kl": lambda report: report.distribution.kl_mean,
    "kl_max": lambda report: report.distribution.kl_max,
    "perplexity": _perplexity_change,
    "top1": lambda report: 1 - report.distribution.top1_agreement,
    "top5": lambda report: 1 - report.distribution.top5_agreement,
    "rms": lambda report: _worst(report, "rms_error"),
    "max": lambda report: _worst(report, "max_abs_error"),
    "ratio": lambda report: _worst(report, "ratio"),
}


def parse_budget(text: str | None) -> dict[str, float]:
    """Parse limits by quantity, e.g. "kl=1e-6,perplexity=0.01%"; 1% is 0.01. None has no limits.

    kl, kl_max: nats. perplexity: relative change, up or down. top1, top5: share of tokens that disagree, below a half.
    rms, max: error of the logits, on whole texts or as they are decoded, whichever is larger. ratio: the same RMS error
    over the noise floor.

    Raises:
        ConfigError: if it cannot be parsed; the message names the part and the known quantities.
    """
    limits: dict[str, float] = {}
    for part in () if text is None else text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            limit = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            limit = math.nan
        most = 0.5 if name in ("top1", "top5") else math.inf  # 99% would mean the tokens that agree
        if name not in QUANTITIES or name in limits or not 0 <= limit < most:
            raise ConfigError(
                f"cannot read {part!r} in the budget; write each of {', '.join(QUANTITIES)} once at most, with a limit "
                "of 0 or more, e.g. kl=1e-6 or top1=1%; top1 and top5 limit the share that differs, to below 50%"
            )
        limits[name] = limit
    return limits
