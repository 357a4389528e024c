"""The law: when a candidate is the same model, and what a budget allows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from minigpt.errors import ConfigError
from minigpt.report.account_fields import Account
from minigpt.report.fields import (
    PROMPTS,
    BudgetLine,
    LogitsError,
    ParityFigures,
    PlaceOff,
    PromptOff,
    Verdict,
    is_by_file,
    is_shifted,
    perplexities,
    places,
    population,
    text_file,
)
from minigpt.report.noise import FAR_OFF, MOST_DECODING_NOISE, MOST_NOISE, noise_ratio
from minigpt.report.numerals import brief, change, format_limit, percent, precise, uncertain
from minigpt.report.sentences import unexplained

MOST_PLACES = 8  # that a sentence names


def decide(figures: ParityFigures, limits: Mapping[str, float], changes: Sequence[str] = ()) -> Verdict:
    """Return the verdict: by the limits if there are some, else by parity.

    Args:
        limits: of the budget, by quantity.
        changes: what the candidate's code changed in the process.
    """
    budget = None
    notes: list[str] = []
    if limits:
        budget = budget_lines(figures, limits)
        wrong = list(_broken_budget(figures, budget))
    elif figures.account is not None and is_by_file(figures):
        wrong = list(_wrong_arithmetic(figures, figures.account))
    else:
        wrong = list(_wrong_outputs(figures))
    off = _place_off(figures, is_wrong=bool(wrong))
    if not limits:
        gradients = list(_wrong_gradients(figures))
        if not wrong and off is not None:
            error, noise = brief(off.error), brief(off.noise)
            notes.append(
                f"The logits are right, but the output of {off.place} is not: it is off by {error} of its size, "
                f"where transformers' own error is {noise}."
            )
            notes += _new_errors(figures)
        is_fault = figures.exact or changes or figures.nan  # else it is another model, as it says itself
        if not is_fault and (wrong or gradients):
            wrong = list(_difference(figures))
        elif wrong:
            wrong += _where(figures, off)
        if is_fault:
            wrong += gradients
    if changes:
        wrong.insert(0, f"{figures.norm} changes the process: {', '.join(changes)}; the change was undone.")
    return Verdict(
        verdict="fail" if wrong else "pass",
        reasons=wrong,
        budget=budget,
        first_off=off,
        changes=sorted(changes),
        notes=notes,
    )


def budget_lines(figures: ParityFigures, limits: Mapping[str, float]) -> list[BudgetLine]:
    """Return each limit with what was measured. NaN is not kept."""
    lines: list[BudgetLine] = []
    for quantity, limit in limits.items():
        measured = QUANTITIES[quantity](figures)
        text = PROMPTS if quantity in OF_PROMPTS else text_file(figures) or PROMPTS
        lines.append(BudgetLine(quantity, limit, measured, measured <= limit, text))
    return lines


def is_far_off(error: float, noise: float) -> bool:
    """Return whether an output is off beyond any noise; NaN is."""
    ratio = noise_ratio(error, noise)
    return not ratio <= FAR_OFF


def _place_off(figures: ParityFigures, *, is_wrong: bool) -> PlaceOff | None:
    """Return the first place whose error is beyond any noise; else, if the model is wrong, where the error grows."""
    rows = [] if figures.center else places(figures)  # a centred stream is another one
    errors: list[PlaceOff] = []
    for row in rows:
        error, noise = row.propagated_error, row.noise
        place = PlaceOff(row.site, error, noise, noise_ratio(error, noise))
        if is_far_off(error, noise):
            return place
        errors.append(place)
    return largest_jump(errors) if is_wrong else None


def _where(figures: ParityFigures, off: PlaceOff | None) -> Iterator[str]:
    """Yield where the error of wrong outputs begins, as far as that is known."""
    if off is not None and off.ratio_before is None:
        error, noise = brief(off.error), brief(off.noise)
        yield (
            f"The first output that is off is {off.place}'s, by {error} of its size, where transformers' "
            f"own error is {noise}."
        )
    elif off is not None:
        before, after = brief(off.ratio_before), brief(off.ratio)
        yield f"The error grows most at {off.place}: from {before} to {after} times transformers' own."
    yield from _new_errors(figures)
    is_stored = figures.stored is not None and figures.stored.explains
    is_explained = is_stored or is_shifted(figures)
    if off is None and _logits_are_off(figures) and figures.every_place and not is_explained:
        prompt = figures.prompt_off
        cause = "the error is in the head"
        if prompt is not None and prompt.prompts_off != prompt.prompts:
            cause = "these logits are of other ids or positions"
        norms, blocks = len(figures.norm_sites), len(figures.blocks)
        yield f"All {norms} norms and {blocks} blocks are right on the prompts, and the logits are not, so {cause}."


def _logits_are_off(figures: ParityFigures) -> bool:
    """Return whether the logits of whole texts are beyond the noise; NaN is."""
    return not figures.logits.ratio <= MOST_NOISE


def _new_errors(figures: ParityFigures) -> Iterator[str]:
    """Yield the places that add an error of their own, if there are several."""
    places = figures.new_errors
    if len(places) < 2:
        return
    named = ", ".join(places[:MOST_PLACES])
    if len(places) > MOST_PLACES:
        named += f" and {len(places) - MOST_PLACES} more"
    yield f"An error of its own begins at each of {named}."


def largest_jump(places: Sequence[PlaceOff]) -> PlaceOff | None:
    """Return the place beyond twice the noise at which the ratio grows most over the place before it."""
    largest = None
    most = 0.0
    before = 1.0
    for place in places:
        jump = place.ratio / before
        if place.ratio > MOST_NOISE and (largest is None or jump > most):
            largest = replace(place, ratio_before=before)
            most = jump
        before = max(place.ratio, 1.0)
    return largest


def _difference(figures: ParityFigures) -> Iterator[str]:
    """Yield how different the model is, a sentence for each set of tokens, and why that is expected."""
    measured = figures.distribution
    kl = uncertain(measured.kl_mean, measured.kl_mean_se)
    agreement = uncertain(measured.top1_agreement, measured.top1_agreement_se, percent)
    yield (
        f"On {population(figures)} the KL divergence is {kl} nats a token, and {agreement} have the same likeliest "
        "token."
    )
    before, after = perplexities(figures)
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
    floor = f"noise floor of {figures.dtype}"
    yield from _beyond_noise("The logits'", figures.logits, floor, MOST_NOISE)
    decoded = "Decoded a token at a time, the logits'"
    yield from _beyond_noise(decoded, figures.decoding, "noise floor", MOST_DECODING_NOISE)
    if is_shifted(figures):
        left = brief(_without_shift(figures))
        yield (
            "At each position all logits are shifted by one constant, and the distributions are the original's: "
            f"without the shift the error is {left} times the noise floor."
        )
    elif figures.stored is not None and figures.stored.explains:
        dtype, ratio = figures.stored.dtype, brief(figures.stored.ratio)
        yield (
            f"The logits are stored in {dtype}, and storing alone moves the true ones by {ratio} times the noise "
            f"floor, so no smaller error can be seen: write them in float32, or take a record of --dtype {dtype} if "
            "the program computes in that."
        )
    else:
        yield from _wrong_positions(figures)
    yield from _wrong_greedy(figures)


def _wrong_greedy(figures: ParityFigures) -> Iterator[str]:
    """Yield where greedy decoding diverges from the original's, if no noise explains it."""
    parting = figures.greedy.first_divergence
    if parting is None or parting.within_noise:
        return
    stored = 0.0
    if figures.stored is not None and figures.stored.explains:
        stored = 2 * figures.stored.max_abs_error
    if parting.margin > stored:
        margin, noise = brief(parting.margin), brief(parting.noise)
        yield (
            f"Greedy decoding of prompt {parting.prompt} diverges at new token {parting.token}, where the two best "
            f"logits are {margin} apart and the noise is only {noise}."
        )


def _wrong_arithmetic(figures: ParityFigures, account: Account) -> Iterator[str]:
    """Yield why a program is wrong for its file: more is left than noise, or other texts are further off."""
    if not account.explains:
        yield unexplained(account)
        yield from _wrong_positions(figures)
    others = {"Decoded a token at a time": figures.decoding, "On longer texts": figures.text and figures.text.logits}
    for where, logits in others.items():
        least = max(MOST_NOISE, figures.logits.ratio)
        if logits is not None and not logits.ratio <= MOST_NOISE * least:
            yield f"{where}, the error is {brief(logits.ratio)} times transformers' own, and {brief(least)} on prompts."


def _beyond_noise(whose: str, logits: LogitsError | None, floor: str, most: float) -> Iterator[str]:
    """Yield how far logits are off, if it is more than ``most`` times the noise floor."""
    if logits is not None and not logits.ratio <= most:  # written so that NaN fails
        error, ratio = brief(logits.rms_error), brief(logits.ratio)
        yield f"{whose} RMS error is {error}, {ratio} times the {floor}; at most {most:g} times is parity."


def _without_shift(figures: ParityFigures) -> float:
    """Return the largest ratio that is left without a shift, where logits are off."""
    errors = [figures.logits]
    if figures.decoding is not None:
        errors.append(figures.decoding)
    if figures.text is not None:
        errors.append(figures.text.logits)
    return max(error.ratio_without_shift for error in errors)


def _wrong_positions(figures: ParityFigures) -> Iterator[str]:
    """Yield the first prompt and the first window that are off, with the position."""
    stored = figures.stored
    if stored is not None and _logits_are_off(figures):
        ratio = brief(stored.ratio)
        yield f"The logits are stored in {stored.dtype}, which explains {ratio} of these times, and not the rest."
    text = figures.text
    is_window_off = text is not None and text.first_off is not None
    prompt = figures.prompt_off
    if prompt is not None and _logits_are_off(figures):
        is_any_right = prompt.prompts_off < prompt.prompts
        if is_any_right or not is_window_off:
            yield _prompt_sentence(prompt)
    if text is not None and text.first_off is not None:
        window, file = text.first_off, text.file or "the built-in texts"
        error, noise, ratio = brief(window.error), brief(window.noise), brief(window.ratio)
        yield (
            f"In window {window.window} of {file}, from position {window.position} on, the logits are off: the RMS "
            f"error there is {error}, and transformers' own nowhere above {noise}; the window's is {ratio} times the "
            "noise floor."
        )


def _prompt_sentence(prompt: PromptOff) -> str:
    """Return where the logits of a prompt begin to be off, and how many prompts are right."""
    error, noise = brief(prompt.error), brief(prompt.noise)
    sentence = (
        f"In prompt {prompt.prompt}, from position {prompt.position} on, the logits are off: the RMS error "
        f"there is {error}, and transformers' own nowhere above {noise}."
    )
    right = prompt.prompts - prompt.prompts_off
    if right:
        sentence += f" {right} of the {prompt.prompts} prompts are right."
    return sentence


def _wrong_gradients(figures: ParityFigures) -> Iterator[str]:
    """Yield a sentence on the gradients that are off, if there are some."""
    rows = figures.gradients or ()
    wrong = [row for row in rows if not row.ratio <= MOST_NOISE]
    if not wrong:
        return
    worst = wrong[0]
    error, ratio = brief(worst.relative_error), brief(worst.ratio)
    yield (
        f"The gradients of {len(wrong)} of {len(rows)} Parameters are off, most that of {worst.parameter}: by "
        f"{error} of its size, {ratio} times transformers' own error at {figures.dtype}; "
        f"at most {MOST_NOISE:g} times is parity."
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
            limit = format_limit(line.quantity, line.limit)
            measured = format_limit(line.quantity, line.measured)
            yield f"The budget allows {line.quantity} {limit}, and it is {measured} on {line.text}."


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
OF_PROMPTS = ("rms", "max", "ratio")  # the others are of the text file, if there is one


def parse_budget(text: str | None) -> dict[str, float]:
    """Parse limits by quantity, e.g. "kl=1e-6,perplexity=0.01%"; 1% is 0.01. None has no limits.

    kl, kl_max: nats. perplexity: relative change, up or down. top1, top5: share of tokens that disagree, below a half.
    rms, max: error of the logits, on whole texts or as they are decoded, whichever is larger. ratio: the same RMS error
    over the noise floor.

    Raises:
        ConfigError: if it cannot be parsed; the message names the part and the known quantities.
    """
    limits: dict[str, float] = {}
    if text is None:
        return limits
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip()
        limit = _parse_limit(value.strip())
        most = 0.5 if name in ("top1", "top5") else math.inf  # 99% would mean the tokens that agree
        if name not in QUANTITIES or name in limits or not 0 <= limit < most:
            raise ConfigError(
                f"cannot read {part!r} in the budget; write each of {', '.join(QUANTITIES)} once at most, with a limit "
                "of 0 or more, e.g. kl=1e-6 or top1=1%; top1 and top5 limit the share that differs, to below 50%"
            )
        limits[name] = limit
    return limits


def _parse_limit(text: str) -> float:
    """Return a number, or a hundredth of one before %; NaN if it is none."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return math.nan
    return number / 100 if text.endswith("%") else number
