"""The law: when a candidate is the same model, and what a budget allows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from minigpt.errors import ConfigError
from minigpt.report.fields import (
    MOST_NOISE,
    BudgetLine,
    LogitsError,
    PlaceOff,
    perplexities,
    population,
)
from minigpt.report.numerals import brief, change, format_limit, percent, precise, uncertain
from minigpt.report.parity_report import ParityReport

MOST_DECODING_NOISE = 4.0  # for tokens read one by one, of which few are read, so that the floor may be small
FAR_OFF = 8.0  # an output is off from so many times transformers' own error there on


def decide(report: ParityReport, limits: Mapping[str, float], places: Sequence[PlaceOff] = ()) -> ParityReport:
    """Return the report with its verdict: by the limits if there are some, else by parity.

    Args:
        places: the error at each norm and block, in the order of the data.
    """
    if limits:
        measured = {name: QUANTITIES[name](report) for name in limits}
        lines = [BudgetLine(name, limits[name], x, kept=x <= limits[name]) for name, x in measured.items()]
        report = replace(report, budget=lines)  # NaN is not kept
    wrong = _wrong_outputs(report) if report.budget is None else _broken_budget(report)
    off = first_off(places) or (largest_jump(places) if wrong else None)
    if report.budget is None:
        wrong += [*([_place_sentence(off)] if wrong and off else []), *_wrong_gradients(report)]
    if report.changes:
        wrong.insert(0, f"{report.norm} changes the process: {', '.join(report.changes)}; the change was undone.")
    report = replace(report, verdict="fail" if wrong else "pass", first_off=off)
    is_different = report.outcome == "DIFFERENT"
    return replace(report, reasons=[*_difference(report), _why_different(report)] if is_different else wrong)


def first_off(places: Sequence[PlaceOff]) -> PlaceOff | None:
    """Return the first place whose error is beyond any noise."""
    return next((place for place in places if not place.ratio <= FAR_OFF), None)  # written so that NaN is off


def largest_jump(places: Sequence[PlaceOff]) -> PlaceOff | None:
    """Return the place beyond twice the noise at which the ratio grows most over the place before it."""
    ratios = [1.0, *(max(place.ratio, 1.0) for place in places)]
    jumps = [(place.ratio / before, before, place) for before, place in zip(ratios, places, strict=False)
             if place.ratio > MOST_NOISE]  # fmt: skip
    if not jumps:
        return None
    _, before, place = max(jumps, key=lambda jump: jump[0])
    return replace(place, ratio_before=before)


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


def _difference(report: ParityReport) -> list[str]:
    """Return how different the model is, a sentence for each set of tokens."""
    measured, (before, after) = report.distribution, perplexities(report)
    sentences = [
        f"On {population(report)} the KL divergence is {uncertain(measured.kl_mean, measured.kl_mean_se)} nats a "
        f"token, and {uncertain(measured.top1_agreement, measured.top1_agreement_se, percent)} have the same likeliest "
        "token."
    ]
    if not math.isnan(before):
        text = report.perplexity
        tokens = f"the {text.tokens:,} tokens of {text.file}" if text else "the prompts"
        sentences.append(
            f"The perplexity of {tokens} is {precise(after)} instead of {precise(before)} ({change(before, after)})."
        )
    return sentences


def _why_different(report: ParityReport) -> str:
    if report.against is not None:
        why = f"{report.model} is another checkpoint than {report.against}"
    elif report.difference is not None:
        why = report.difference
    else:
        why = f"{report.norm} is not a LayerNorm"
    return f"A difference is expected, since {why}; a budget says how much is allowed."


def _wrong_outputs(report: ParityReport) -> list[str]:
    """Return why this does not compute what the original does, a sentence each."""
    return [*_not_a_number(report), *_wrong_logits(report), *_wrong_text(report), *_wrong_greedy(report)]


def _not_a_number(report: ParityReport) -> list[str]:
    if report.nan is None:
        return []
    return [f"The logits of text {report.nan.text} are NaN from position {report.nan.position} on."]


def _wrong_logits(report: ParityReport) -> list[str]:
    reasons, wrong = [], list[LogitsError]()
    for when, logits, floor, most in (
        ("The", report.logits, f"noise floor of {report.dtype}", MOST_NOISE),
        ("Decoded a token at a time, the", report.decoding, "noise floor", MOST_DECODING_NOISE),
    ):
        if logits is not None and not logits.ratio <= most:  # written so that NaN fails
            wrong.append(logits)
            reasons.append(
                f"{when} logits' RMS error is {brief(logits.rms_error)}, {brief(logits.ratio)} times the {floor}; "
                f"at most {most:g} times is parity."
            )
    if wrong and all(logits.ratio_without_shift <= MOST_NOISE for logits in wrong):
        reasons.append(
            "At each position all logits are shifted by one constant, and the distributions are the original's: "
            f"without the shift the error is {brief(wrong[0].ratio_without_shift)} times the noise floor."
        )
    return reasons


def _wrong_text(report: ParityReport) -> list[str]:
    if report.text is None or (off := report.text.first_off) is None:
        return []
    where = report.text.file or "the built-in texts"
    return [
        f"In window {off.window} of {where}, from position {off.position} on, the logits are off: the RMS error "
        f"there is {brief(off.error)}, and transformers' own nowhere above {brief(off.noise)}; the window's is "
        f"{brief(off.ratio)} times the noise floor."
    ]


def _wrong_greedy(report: ParityReport) -> list[str]:
    parting = report.greedy.first_divergence
    if parting is None or parting.within_noise:
        return []
    return [
        f"Greedy decoding of prompt {parting.prompt} parts at new token {parting.token}, where the two best logits "
        f"are {brief(parting.margin)} apart and the noise is only {brief(parting.noise)}."
    ]


def _wrong_gradients(report: ParityReport) -> list[str]:
    """Return a sentence on the gradients that are off, if there are some."""
    wrong = [row for row in report.gradients or () if not row.ratio <= MOST_NOISE]
    if not wrong:
        return []
    return [
        f"The gradients of {len(wrong)} of {len(report.gradients or ())} Parameters are off, most that of "
        f"{wrong[0].parameter}: by {brief(wrong[0].relative_error)} of its size, {brief(wrong[0].ratio)} times "
        f"transformers' own error at {report.dtype}; at most {MOST_NOISE:g} times is parity."
    ]


def _broken_budget(report: ParityReport) -> list[str]:
    """Return the limits that were not kept, a sentence each."""
    removal = report.removal
    if removal is not None and removal.allowed is not None:
        return [] if removal.allowed else ["The budget allows no site."]
    return [
        f"The budget allows {line.quantity} {format_limit(line.quantity, line.limit)}, and it is "
        f"{format_limit(line.quantity, line.measured)}."
        for line in report.budget or ()
        if not line.kept
    ]


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
