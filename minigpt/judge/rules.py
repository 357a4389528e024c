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
    ParityFigures,
    PlaceOff,
    Verdict,
    is_shifted,
    noise_ratio,
    perplexities,
    places,
    population,
)
from minigpt.report.numerals import brief, change, format_limit, percent, precise, uncertain

MOST_PLACES = 8  # that a sentence names
FAR_OFF = 8.0  # an output is off from so many times transformers' own error there on


def decide(figures: ParityFigures, limits: Mapping[str, float], changes: Sequence[str] = ()) -> Verdict:
    """Return the verdict: by the limits if there are some, else by parity.

    Args:
        limits: of the budget, by quantity.
        changes: what the candidate's code changed in the process.
    """
    budget, notes = None, list[str]()
    if limits:
        budget = budget_lines(figures, limits)
        wrong = [*_broken_budget(figures, budget)]
    else:
        wrong = [*_wrong_outputs(figures)]
    off = _place_off(figures, is_wrong=bool(wrong))
    if not limits:
        if wrong:
            wrong += _where(figures, off)
        elif off is not None:
            notes += _right_but_for(figures, off)
        wrong += _wrong_gradients(figures)
    if changes:
        wrong.insert(0, f"{figures.norm} changes the process: {', '.join(changes)}; the change was undone.")
    outcome = outcome_of(passed=not wrong, is_fault=figures.exact or bool(limits or changes or figures.nan))
    if outcome == "DIFFERENT":
        wrong = [*_difference(figures)]
    return Verdict(
        outcome=outcome, reasons=wrong, budget=budget, first_off=off, changes=sorted(changes), notes=notes
    )  # fmt: skip


def outcome_of(*, passed: bool, is_fault: bool) -> str:
    """Return PASS, FAIL, or DIFFERENT for what is no fault of a candidate."""
    if passed:
        return "PASS"
    return "FAIL" if is_fault else "DIFFERENT"


def budget_lines(figures: ParityFigures, limits: Mapping[str, float]) -> list[BudgetLine]:
    """Return each limit with what was measured. NaN is not kept."""
    lines: list[BudgetLine] = []
    for quantity, limit in limits.items():
        measured = QUANTITIES[quantity](figures)
        lines.append(BudgetLine(quantity, limit, measured, kept=measured <= limit))
    return lines


def is_far_off(error: float, noise: float) -> bool:
    """Return whether an output is off beyond any noise; NaN is."""
    return not noise_ratio(error, noise) <= FAR_OFF


def _place_off(figures: ParityFigures, *, is_wrong: bool) -> PlaceOff | None:
    """Return the first place whose error is beyond any noise; else, if the model is wrong, where the error grows."""
    rows = [] if figures.center else places(figures)  # a centred stream is another one
    errors: list[PlaceOff] = []
    for row in rows:
        name, error, noise = row.site, row.propagated_error, row.noise
        if is_far_off(error, noise):
            return PlaceOff(name, error, noise, noise_ratio(error, noise))
        errors.append(PlaceOff(name, error, noise, noise_ratio(error, noise)))
    return largest_jump(errors) if is_wrong else None


def _where(figures: ParityFigures, off: PlaceOff | None) -> Iterator[str]:
    """Yield where the error of wrong outputs begins, as far as that is known."""
    if off is not None:
        yield _place_sentence(off)
    yield from _new_errors(figures)
    logits_are_off = not figures.logits.ratio <= MOST_NOISE
    is_explained = is_shifted(figures) or is_stored(figures)
    if off is None and logits_are_off and figures.every_place and not is_explained:
        prompt = figures.prompt_off
        is_everywhere = prompt is None or prompt.prompts_off == prompt.prompts
        cause = "the error is in the head" if is_everywhere else "these logits are of other ids or positions"
        yield (
            f"All {len(figures.norm_sites)} norms and {len(figures.blocks)} blocks are right on the prompts, and the "
            f"logits are not, so {cause}."
        )


def _new_errors(figures: ParityFigures) -> Iterator[str]:
    """Yield the places that add an error of their own, if there are several."""
    places = figures.new_errors
    if len(places) > 1:
        more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
        yield f"An error of its own begins at each of {', '.join(places[:MOST_PLACES])}{more}."


def _right_but_for(figures: ParityFigures, off: PlaceOff) -> Iterator[str]:
    """Yield which outputs are off though the logits are right."""
    yield (
        f"The logits are right, but the output of {off.place} is not: it is off by {brief(off.error)} of its size, "
        f"where transformers' own error is {brief(off.noise)}."
    )
    yield from _new_errors(figures)


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


def _difference(figures: ParityFigures) -> Iterator[str]:
    """Yield how different the model is, a sentence for each set of tokens, and why that is expected."""
    measured, (before, after) = figures.distribution, perplexities(figures)
    yield (
        f"On {population(figures)} the KL divergence is {uncertain(measured.kl_mean, measured.kl_mean_se)} nats a "
        f"token, and {uncertain(measured.top1_agreement, measured.top1_agreement_se, percent)} have the same likeliest "
        "token."
    )
    if not math.isnan(before):
        text = figures.perplexity
        tokens = f"the {text.tokens:,} tokens of {text.file}" if text else "the prompts"
        changed = f"{precise(after)} instead of {precise(before)} ({change(before, after)})"
        yield f"The perplexity of {tokens} is {changed}."
    why = figures.difference or f"{figures.norm} is not a LayerNorm"
    if figures.against is not None:
        why = f"{figures.model} is another checkpoint than {figures.against}"
    yield f"A difference is expected, since {why}; a budget says how much is allowed."


def _wrong_outputs(figures: ParityFigures) -> Iterator[str]:
    """Yield why this does not compute what the original does, a sentence each."""
    if figures.nan is not None:
        yield f"The logits of text {figures.nan.text} are NaN from position {figures.nan.position} on."
    yield from _wrong_logits(figures)
    if is_shifted(figures):
        yield (
            "At each position all logits are shifted by one constant, and the distributions are the original's: "
            f"without the shift the error is {brief(_without_shift(figures))} times the noise floor."
        )
    elif is_stored(figures):
        yield _stored_sentence(figures)
    else:
        yield from _wrong_positions(figures)
    parting = figures.greedy.first_divergence
    noise = 2 * figures.stored.max_abs_error if figures.stored is not None and is_stored(figures) else 0.0
    if parting is not None and not parting.within_noise and parting.margin > noise:
        yield (
            f"Greedy decoding of prompt {parting.prompt} parts at new token {parting.token}, where the two best logits "
            f"are {brief(parting.margin)} apart and the noise is only {brief(parting.noise)}."
        )


def _wrong_logits(figures: ParityFigures) -> Iterator[str]:
    """Yield how far whole texts' logits are off, and those that are decoded a token at a time."""
    for when, logits, floor, most in (
        ("The", figures.logits, f"noise floor of {figures.dtype}", MOST_NOISE),
        ("Decoded a token at a time, the", figures.decoding, "noise floor", MOST_DECODING_NOISE),
    ):
        if logits is not None and not logits.ratio <= most:  # written so that NaN fails
            yield (
                f"{when} logits' RMS error is {brief(logits.rms_error)}, {brief(logits.ratio)} times the {floor}; "
                f"at most {most:g} times is parity."
            )


def _without_shift(figures: ParityFigures) -> float:
    """Return the largest ratio that is left without a shift, where logits are off."""
    ratios: list[float] = []
    for error in (figures.logits, figures.decoding, figures.text.logits if figures.text is not None else None):
        if error is not None:
            ratios.append(error.ratio_without_shift)
    return max(ratios)


def is_stored(figures: ParityFigures) -> bool:
    """Return whether the logits are off by no more than storing them has rounded."""
    return figures.stored is not None and figures.stored.explains


def _stored_sentence(figures: ParityFigures) -> str:
    """Return that storing explains the error, and how to have more than that judged."""
    assert figures.stored is not None
    dtype, ratio = figures.stored.dtype, brief(figures.stored.ratio)
    return (
        f"The logits are stored in {dtype}, and storing alone moves the true ones by {ratio} times the noise floor, "
        f"so no smaller error can be seen: write them in float32, or take a record of --dtype {dtype} if the program "
        "computes in that."
    )


def _wrong_positions(figures: ParityFigures) -> Iterator[str]:
    """Yield the first prompt and the first window that are off, with the position."""
    if figures.stored is not None and not figures.logits.ratio <= MOST_NOISE:
        yield (
            f"The logits are stored in {figures.stored.dtype}, which explains {brief(figures.stored.ratio)} of these "
            "times, and not the rest."
        )
    window = figures.text.first_off if figures.text is not None else None
    prompt = figures.prompt_off
    if prompt is not None and not figures.logits.ratio <= MOST_NOISE:
        right = prompt.prompts - prompt.prompts_off
        if right or window is None:
            others = f" {right} of the {prompt.prompts} prompts are right." if right else ""
            yield (
                f"In prompt {prompt.prompt}, from position {prompt.position} on, the logits are off: the RMS error "
                f"there is {brief(prompt.error)}, and transformers' own nowhere above {brief(prompt.noise)}.{others}"
            )
    if window is not None and figures.text is not None:
        yield (
            f"In window {window.window} of {figures.text.file or 'the built-in texts'}, from position "
            f"{window.position} on, the logits are off: the RMS error there is {brief(window.error)}, and "
            f"transformers' own nowhere above {brief(window.noise)}; the window's is {brief(window.ratio)} times the "
            "noise floor."
        )


def _wrong_gradients(figures: ParityFigures) -> Iterator[str]:
    """Yield a sentence on the gradients that are off, if there are some."""
    rows = figures.gradients or ()
    if wrong := [row for row in rows if not row.ratio <= MOST_NOISE]:
        yield (
            f"The gradients of {len(wrong)} of {len(rows)} Parameters are off, most that of {wrong[0].parameter}: by "
            f"{brief(wrong[0].relative_error)} of its size, {brief(wrong[0].ratio)} times transformers' own error at "
            f"{figures.dtype}; at most {MOST_NOISE:g} times is parity."
        )


def _broken_budget(figures: ParityFigures, budget: Sequence[BudgetLine]) -> Iterator[str]:
    """Yield the limits that were not kept, a sentence each."""
    removal = figures.removal
    if removal is not None and removal.allowed is not None:
        if not removal.allowed:
            yield "The budget allows no site."
        return
    for line in budget:
        if not line.kept:
            limit, measured = (format_limit(line.quantity, x) for x in (line.limit, line.measured))
            yield f"The budget allows {line.quantity} {limit}, and it is {measured}."


def _perplexity_change(figures: ParityFigures) -> float:
    before, after = perplexities(figures)
    return abs(after / before - 1)


def _worst(figures: ParityFigures, figure: str) -> float:
    """Return a figure of the logits, on whole texts or as they are decoded, whichever is larger; NaN if one is."""
    parts = [figures.logits]
    if figures.decoding is not None:
        parts.append(figures.decoding)
    return float(np.max([getattr(part, figure) for part in parts]))


QUANTITIES: dict[str, Callable[[ParityFigures], float]] = {
    "kl": lambda figures: figures.distribution.kl_mean,
    "kl_max": lambda figures: figures.distribution.kl_max,
    "perplexity": _perplexity_change,
    "top1": lambda figures: 1 - figures.distribution.top1_agreement,
    "top5": lambda figures: 1 - figures.distribution.top5_agreement,
    "rms": lambda figures: _worst(figures, "rms_error"),
    "max": lambda figures: _worst(figures, "max_abs_error"),
    "ratio": lambda figures: _worst(figures, "ratio"),
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
