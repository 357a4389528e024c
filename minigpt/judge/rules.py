"""The law: when a candidate is the same model, and what a budget allows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from minigpt.errors import ConfigError
from minigpt.report.fields import MOST_NOISE, BudgetLine, PlaceOff, noise_ratio, perplexities, places, population
from minigpt.report.numerals import brief, change, format_limit, percent, precise, uncertain
from minigpt.report.parity_report import ParityReport

MOST_DECODING_NOISE = 4.0  # for tokens read one by one, of which few are read, so that the floor may be small
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
        wrong += [*([_place_sentence(off)] if wrong and off else []), *_wrong_gradients(report)]
    if report.changes:
        wrong.insert(0, f"{report.norm} changes the process: {', '.join(report.changes)}; the change was undone.")
    report = replace(report, verdict="fail" if wrong else "pass", first_off=off)
    return replace(report, reasons=[*_difference(report)] if report.outcome == "DIFFERENT" else wrong)


def _place_off(report: ParityReport, *, is_wrong: bool) -> PlaceOff | None:
    """Return the first place whose error is beyond any noise; else, if the model is wrong, where the error grows."""
    rows = [] if report.center else places(report)  # a centred stream is another one
    errors = [
        PlaceOff(name, row["propagated_error"], row["noise"], noise_ratio(row["propagated_error"], row["noise"]))
        for name, row in rows
    ]
    far_off = next((place for place in errors if not place.ratio <= FAR_OFF), None)  # written so that NaN is off
    return far_off or (largest_jump(errors) if is_wrong else None)


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
    if report.text is not None and (off := report.text.first_off) is not None:
        yield (
            f"In window {off.window} of {report.text.file or 'the built-in texts'}, from position {off.position} on, "
            f"the logits are off: the RMS error there is {brief(off.error)}, and transformers' own nowhere above "
            f"{brief(off.noise)}; the window's is {brief(off.ratio)} times the noise floor."
        )
    parting = report.greedy.first_divergence
    if parting is not None and not parting.within_noise:
        yield (
            f"Greedy decoding of prompt {parting.prompt} parts at new token {parting.token}, where the two best logits "
            f"are {brief(parting.margin)} apart and the noise is only {brief(parting.noise)}."
        )


def _wrong_logits(report: ParityReport) -> Iterator[str]:
    wrong = []
    for when, logits, floor, most in (
        ("The", report.logits, f"noise floor of {report.dtype}", MOST_NOISE),
        ("Decoded a token at a time, the", report.decoding, "noise floor", MOST_DECODING_NOISE),
    ):
        if logits is not None and not logits.ratio <= most:  # written so that NaN fails
            wrong.append(logits)
            yield (
                f"{when} logits' RMS error is {brief(logits.rms_error)}, {brief(logits.ratio)} times the {floor}; "
                f"at most {most:g} times is parity."
            )
    if wrong and all(logits.ratio_without_shift <= MOST_NOISE for logits in wrong):
        yield (
            "At each position all logits are shifted by one constant, and the distributions are the original's: "
            f"without the shift the error is {brief(wrong[0].ratio_without_shift)} times the noise floor."
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
