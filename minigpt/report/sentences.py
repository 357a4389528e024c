"""The words of a parity report: its verdict, the sentences on it, and its most important figures."""

import re
from collections.abc import Sequence

from minigpt.report.account_fields import Account
from minigpt.report.fields import (
    OWN_NORM,
    BudgetLine,
    Diagnosed,
    ReportFields,
    Unjudged,
    has_norm,
    is_by_file,
    is_near,
    perplexities,
    population,
    text_file,
)
from minigpt.report.noise import FAR_OFF, MOST_NOISE
from minigpt.report.numerals import brief, change, count, format_limit, percent, precise, times
from minigpt.report.part import KeyFigure, Number

WHY_MISSING = {
    Unjudged.PLACES: "the candidate shows none at the original's paths",
    Unjudged.ALONE: "a file cannot be given the original's input",
    Unjudged.DECODED: "the candidate takes no cache of transformers, so it reads whole texts only",
    Unjudged.GRADIENTS: "the candidate has none for the original's Parameters",
}
POOR = 0.1  # of the perplexity of guessing
MOST_APART = 0.1  # of the root of the squares of two errors from that of their sum
ABOUT_BUILT_IN = (
    "These figures are of the short built-in texts, and others give other figures: --text FILE judges on yours."
)
# Which part of a GPT-2 lies before an output, by the name of its place.
LOOK_AT = {
    r"h\.0\.ln_1": r"the embeddings, the positions and the norm \g<0>",
    r"h\.\d+\.ln_1|ln_f": r"the norm \g<0> itself",
    r"h\.(\d+)\.ln_2": r"the attention of block \1, and the norm \g<0>",
    r"h\.(\d+)": r"the MLP of block \1",
}
BY_PARITY = {"PASS": "Parity holds", "FAIL": "Parity does not hold", "DIFFERENT": "A different model"}
BY_FILE = BY_PARITY | {"PASS": "The program is right for the file", "FAIL": "The program is wrong for the file"}
BY_BUDGET = BY_PARITY | {"PASS": "Within the budget", "FAIL": "Over the budget"}


def heading(report: ReportFields) -> str:
    """Return the verdict in words."""
    headings = BY_PARITY if report.budget is None else BY_BUDGET
    if is_by_file(report):
        headings = BY_FILE
    return headings[report.outcome]


def about(report: ReportFields) -> str:
    """Describe what was judged."""
    judged = report.model
    if has_norm(report):
        judged += f" with {pair(report)}"
    norms = f"{report.against_norm} norms"
    if report.against_norm == "fused":
        norms = "LayerNorm"
    against = f"{report.against or 'itself'} with {norms} in transformers"
    how = f"{report.dtype}, {report.attention}, {report.device}, {report.prompts}"
    return f"{judged}, against {against}: {how}"


def pair(report: ReportFields) -> str:
    """Name the norm and the sites of a report, or what was judged if no norm was in question."""
    if not has_norm(report):
        return report.model
    return f"{report.norm} at {', '.join(report.sites)}"


def subject(report: ReportFields) -> str:
    """Name the norm and the model of a report."""
    if not has_norm(report):
        return report.model
    return f"{report.norm} in {report.model}"


def sentences(report: ReportFields) -> list[str]:
    """Return the reasons of the verdict, and what else must be known to read it."""
    lines = []
    if report.budget is not None:
        lines += _of_budget(report, report.budget)
    lines += report.reasons[:1] + diagnosis_lines(report) + report.reasons[1:]
    before, after = perplexities(report)
    is_different = report.outcome == "DIFFERENT"
    if is_different and after < before:
        lines.append("The perplexity is lower than the original's, which is not better here: parity asks for the same.")
    is_measured = is_different or report.budget is not None
    if is_measured and report.built_in and text_file(report) is None:
        lines.append(ABOUT_BUILT_IN)
    if report.account is not None:
        lines += account_lines(report.account)
    if not lines:
        greedy = "agrees" if report.greedy.first_divergence is None else "diverges only within the noise"
        lines = [f"The logits' error is {times(report.logits.ratio)} the noise floor, and greedy decoding {greedy}."]
    guessing = report.coverage.vocabulary
    if (report.built_in or report.perplexity is not None) and before > POOR * guessing:
        lines.append(
            f"The original's own perplexity is {precise(before)}, and guessing among its {guessing:,} tokens has "
            f"{guessing:,}: the original itself does not predict these texts."
        )
    lines += precision_line(report)
    if report.bisect is not None:
        lines.append(_of_bisection(report, report.bisect.sites))
    lines += report.notes
    if report.missing:
        reasons = [f"{part}, since {WHY_MISSING[part]}" for part in report.missing]
        lines.append(f"Not judged: {'; '.join(reasons)}.")
    return lines + _next_step(report)


def _of_bisection(report: ReportFields, sites: Sequence[str]) -> str:
    broken = "the budget"
    if report.budget is None:
        broken = "parity"
    named = ", ".join(sites) or "no set of the swapped sites, on the texts as transformers wrote them"
    return f"What breaks {broken}: {named}."


def _of_budget(report: ReportFields, budget: Sequence[BudgetLine]) -> list[str]:
    """Return the sentences on the budget: how many sites it allows, and that it is no parity."""
    limits = ", ".join(f"{line.quantity}={format_limit(line.quantity, line.limit)}" for line in budget)
    removal, ratio = report.removal, report.logits.ratio
    lines = []
    if removal is not None and removal.allowed is not None:
        steps = removal.steps[: removal.allowed]
        sites = ", ".join(step.site for step in steps) or "none"
        lines.append(f"The budget {limits} allows {removal.allowed} of {len(report.norm_sites)} sites: {sites}.")
    if report.passed and not ratio <= MOST_NOISE:
        lines.append(
            f"The budget {limits} decides. By parity it is another model: its logits' error is {times(ratio)} the "
            "noise floor."
        )
    return lines


def _next_step(report: ReportFields) -> list[str]:
    """Return the commands that find the cause, after a FAIL."""
    is_of_removal = report.removal is not None and report.removal.allowed is not None
    if report.outcome != "FAIL" or is_of_removal:
        return []
    steps = _look_at(report)
    if report.exact and report.norm not in ("fused", OWN_NORM):
        steps.append(f"minigpt norms --check {report.norm} names a mistake in the norm")
    if report.bisect is None and any(site.swapped for site in report.norm_sites):
        steps.append("--bisect names the sites that break it")
    is_explained = report.account is not None and report.account.is_by_rounding
    if report.diagnosis is None and report.exact and not is_explained:
        steps.append("--diagnose names the mistake, if it is a known one")
    if not steps:
        return []
    return [f"Next: {'; '.join(steps)}."]


def _look_at(report: ReportFields) -> list[str]:
    """Return which part of a GPT-2 lies between the first output that is off and the one before it."""
    if report.first_off is None:
        return []
    place = report.first_off.place
    sites = {site.site: site for site in report.norm_sites}
    if place in sites:
        error = sites[place].local_error
        if error is not None and not error <= FAR_OFF * sites[place].noise:
            return [f"look at the norm {place} itself"]
    elif f"{place}.ln_2" not in sites:  # the output before it is the block before
        return [f"look at the attention and the MLP of {place}"]
    for pattern, parts in LOOK_AT.items():
        if match := re.fullmatch(pattern, place):
            return [f"look at {match.expand(parts)}"]
    return []


# --- The error ---


def precision_line(report: ReportFields) -> list[str]:
    """Return the sentence on the precision that the error is like, if there is one and nothing else explains it."""
    precision = report.precision
    if precision is None or not is_near(precision):
        return []
    is_meant_to_differ = not report.exact and report.logits.ratio > MOST_NOISE
    is_explained = report.account is not None and report.account.is_by_rounding
    if is_meant_to_differ or is_explained or report.outcome == "DIFFERENT" or report.diagnosis:
        return []
    name = precision.like
    how = f"{brief(precision.ratio)} times transformers' own at {name}"
    if report.passed or report.diagnosis is not None:
        return [f"The candidate computes in {name}: its error is {how}."]
    return [f"The candidate may compute in {name}: its error is {how}."]


def diagnosis_lines(report: ReportFields) -> list[str]:
    """Return the sentences on the mistakes that explain the error, or that there is none."""
    if report.diagnosis is None:
        return []
    rows = report.diagnosis
    if not rows and precision_line(report):
        return []  # the precision explains the error
    if not rows:
        sentence = "No mistake that is known gives these logits."
        if Unjudged.PLACES in report.missing:
            sentence += (
                " Write the outputs of norms and blocks under the record's names: the report then names the place."
            )
        return [sentence]
    names = " and with ".join(row.mistake for row in rows)
    last = rows[-1]
    ratio = brief(last.ratio)
    if report.account is not None and not report.account.blames_file:
        agree = f"a typical position agrees to {ratio} times the noise"
        return [f"With {names} and the program's arithmetic in the file's model, {agree}{_rest(last)}."]
    if last.explains:
        kind = "model" if report.bitwise is None else "GPT-2"
        put = f"With {('that', 'both', 'all three')[len(rows) - 1]} put into the original"
        agree = f"{put}, the logits agree to {ratio} times transformers' own error."
        return [" ".join([f"It is this {kind} with {names}.", agree, *(row.cure for row in rows if row.cure)])]
    fall = f"With {names} the error falls from {brief(report.logits.ratio)} to {ratio} times transformers' own"
    return [f"{fall}{_rest(last)}."]


def _rest(row: Diagnosed) -> str:
    """Return what the rest of an error is like, if it is like a precision."""
    rest = row.rest
    if rest is None or not is_near(rest):
        return ""
    return f"; the rest is {brief(rest.ratio)} times its own at {rest.like}"


# --- Another program's file ---


def account_lines(account: Account) -> list[str]:
    """Return the sentences on where the difference of a file comes from."""
    lines = [f"{sentence}." for sentence in account.strange]
    types = f" ({'; '.join(account.types)})" if account.types else ""
    whole, weights, added = brief(account.total.kl), brief(account.weights.kl), brief(account.own.kl)
    if account.weights.ratio <= MOST_NOISE:
        lines.append(f"The file's weights{types} are the original's. The program's arithmetic makes {added} nats.")
    else:
        lines.append(f"Of {whole} nats the file's weights{types} make {weights}, and the program's arithmetic {added}.")
        if abs(account.together - 1) > MOST_APART:
            lines.append(
                f"That does not add up: both errors together are {times(account.together)} that of the program. So it "
                "does not compute with the weights that are read from this file."
            )
    if account.explains:
        lines.append(explained_by(account))
        if account.own.ratio > MOST_NOISE:
            lines.append(
                f"With that in transformers, its error is {_at_best(account)}. In all it falls from "
                f"{brief(account.own.ratio)} to {brief(account.left)} times, where {brief(account.noise)} times are "
                "noise: a number that is rounded the other way changes what follows."
            )
    elif not account.decides:
        lines.append(unexplained(account))
    return lines


def explained_by(account: Account) -> str:
    """Return that a program is right for its file, and by what arithmetic."""
    right = f"{account.program} is right for this file"
    if account.own.ratio <= MOST_NOISE:
        return f"{right}: with the file's weights its error is {times(account.own.ratio)} transformers' own."
    return f"{right}. What it adds is explained by {_arithmetic(account)}."


def unexplained(account: Account) -> str:
    """Return that a program is not right for its file, or that nothing is known of its arithmetic."""
    error = f"with the file's weights its error is {times(account.own.ratio)} transformers' own"
    if not account.steps:
        return f"{account.program} documents no arithmetic for this file that is known here: {error}."
    return (
        f"{account.program} is not right for this file: {error}. With {_arithmetic(account)} in transformers it is "
        f"{brief(account.left)} times, where {brief(account.noise)} times are noise. It is {_at_best(account)}, where "
        f"noise is {brief(account.calm_noise)} times."
    )


def _arithmetic(account: Account) -> str:
    return " and ".join(step.part for step in account.steps)


def _at_best(account: Account) -> str:
    return (
        f"{times(account.calm_left)} transformers' own at the {account.calm} of {account.positions} positions that "
        "agree best"
    )


# --- Key figures ---


def tiles(report: ReportFields) -> list[KeyFigure]:
    """Return the most important figures: a name, a number, and the words below it."""
    distribution = report.distribution
    top5 = percent(distribution.top5_agreement)
    return [
        _perplexity_tile(report) if report.outcome == "DIFFERENT" else _noise_tile(report),
        (
            f"KL divergence, nats, of {population(report)}",
            Number(distribution.kl_mean),
            f"mean, largest {brief(distribution.kl_max)}",
        ),
        ("same likeliest token", Number(distribution.top1_agreement, percent), f"the five likeliest: {top5}"),
        _greedy_tile(report),
    ]


def _perplexity_tile(report: ReportFields) -> KeyFigure:
    texts = "prompts" if report.perplexity is None else "text"
    before, after = perplexities(report)
    words = f"the original's {precise(before)}, change {change(before, after)}"
    return f"perplexity of the {texts}", Number(after, precise), words


def _noise_tile(report: ReportFields) -> KeyFigure:
    logits = report.logits
    words = f"RMS error {brief(logits.rms_error)}, noise floor {brief(logits.noise_floor_rms)}"
    return "of the noise floor", Number(logits.ratio, times), words


def _greedy_tile(report: ReportFields) -> KeyFigure:
    greedy = report.greedy
    parting = greedy.first_divergence
    if parting is None:
        return "greedy tokens compared", Number(greedy.tokens_compared, count), "all the same"
    words = f"of prompt {parting.prompt}, {parting.where} the noise"
    return "new token where greedy decoding diverges", Number(parting.token, count), words
