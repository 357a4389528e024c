"""What a judgement found, with its verdict: the object of ``minigpt parity --json``, and the budget that may decide."""

import html
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.errors import ConfigError
from minigpt.files import finite
from minigpt.report.numerals import brief, change, percent, precise, uncertain

Report = dict[str, Any]  # of parity, in JSON's own types

MOST_NOISE = 2.0  # a candidate may be this many times as far from the truth as transformers itself
MOST_DECODING_NOISE = 4.0  # the same for tokens read one by one: of few tokens the floor may be small by chance


class Fields(dict[str, Any]):
    """A dict whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name}") from None


class ParityReport(Fields):
    """Is the candidate still the same model as the original, as transformers computes it?

    It holds the fields of ``minigpt parity --json``, as keys and as attributes. ``print`` shows it as the command does,
    and a notebook as the page of ``--html``. Errors of sites and blocks are relative RMS errors; KL divergence is in
    nats. What was not asked for is None.

    Attributes:
        model, against, norm, sites, device, dtype, attention, quantize, center, prompts, versions: what was judged.
        against_norm: the norm that transformers computes there: "fused", or "frozen" by a huge eps.
        verdict, reasons: "pass" or "fail", and why it did not pass, a sentence each.
        exact: whether the candidate claims to be the same model; an RMSNorm or int8 weights do not.
        changes: what the candidate's code changed in the process; any is a fault.
        missing: what the candidate does not give, so that it was not judged.
        notes: e.g. that the norm's class has another eps.
        bitwise: reference arithmetic with fused norms against transformers, same attention and dtype.
        logits: distance from transformers in float64, on the prompts. ``noise_floor_*`` is that of transformers at this
            dtype, and ``ratio`` the candidate's RMS error over it; ``scale`` is the RMS of the true logits.
        decoding: the same where both read a token at a time; its floor is at least that of whole texts.
        text: the same for the windows of the text file, or of the built-in text that fills the context. ``first_off``
            is the first window and position that are off.
        distribution: next-token distributions against the truth, on the text file if there is one, else on the prompts.
            ``top5_agreement`` is the share of the five likeliest tokens that both have, ``loss_change`` candidate minus
            truth in nats a token. ``*_se`` are standard errors by texts or windows.
        greedy: what the candidate chooses token by token, up to the first difference in each text.
            ``first_divergence`` is the first that noise does not explain, else the first; ``margin`` is between the two
            best true logits there.
        norm_sites: for each norm, ``local_error`` is its own given the true input, ``propagated_error`` that of its
            output in the running model, and ``noise`` that of transformers. Each token is measured by its own size.
        blocks: the residual stream after each block.
        first_off: the first norm or block whose output is off.
        gradients: of the texts' loss, for every Parameter and the embedded input, the worst ``ratio`` first.
        tokens: KL divergence along one prompt and its continuation, which begins at ``new_from``.
        speed: of one forward over the longest text, once; ``minigpt bench`` measures time.
        fit: R squared of each swapped norm before and after it was fitted.
        sensitivity: what each site alone does to the logits, most first.
        removal: the sites in the order in which they are swapped, and what the model is after each; ``allowed`` is how
            many of them the budget allows, and the report is of the model with those.
        bisect: the swapped sites that must have their own norm back for a pass. ``sets`` are the same sites, as sets
            that each break it and would not with any one site left out; ``verdicts`` is how many sets were tried.
        perplexity: of the whole text file, with the original (``reference``) and with the candidate.
        budget: the limits that decide in place of parity.
    """

    @property
    def passed(self) -> bool:
        """Whether the budget is kept; if there is none, whether parity holds."""
        return self.verdict == "pass"

    @property
    def outcome(self) -> str:
        """PASS, FAIL, or DIFFERENT, as ``outcome_of`` says."""
        return outcome_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types; a number that is not finite is null."""
        return finite(self)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained page."""
        from minigpt.report.page import report_page

        Path(path).write_text(report_page(self.to_dict()), encoding="utf-8")

    def __repr__(self) -> str:
        return f"<ParityReport {self.outcome}: {self.norm} at {', '.join(self.sites)} in {self.model}>"

    def __str__(self) -> str:
        from rich.console import Console

        from minigpt.report.parity_summary import parity_summary

        console = Console(file=io.StringIO(), width=max(80, Console().width))
        with console.capture() as caught:
            console.print(parity_summary(self))
        return caught.get().rstrip()

    def _repr_html_(self) -> str:
        """Return the page in a frame, for its styles must not reach the notebook."""
        from minigpt.report.page import report_page

        page = html.escape(report_page(self.to_dict()))
        return f'<iframe title="{html.escape(repr(self))}" srcdoc="{page}" width="100%" height="800"></iframe>'


def judged(fields: Mapping[str, Any], limits: Mapping[str, float]) -> ParityReport:
    """Return the report of these fields with its verdict: by the limits if there are some, else by parity."""
    report = ParityReport(fields, budget=None)
    if limits:
        measured = {name: QUANTITIES[name](report) for name in limits}
        report["budget"] = [
            Fields(quantity=name, limit=limits[name], measured=x, kept=x <= limits[name])  # NaN is not kept
            for name, x in measured.items()
        ]
    broken = _broken_parity(report) if report.budget is None else _broken_budget(report)
    if report.changes:
        broken.insert(0, f"{report.norm} changes the process: {', '.join(report.changes)}; the change was undone.")
    report["verdict"] = "fail" if broken else "pass"
    report["reasons"] = [*_difference(report), _why_different(report)] if report.outcome == "DIFFERENT" else broken
    return report


def outcome_of(report: Mapping[str, Any]) -> str:
    """Return PASS, FAIL, or DIFFERENT: a fail of a candidate that does not claim to be the same model."""
    if report["verdict"] == "pass":
        return "PASS"
    is_fault = report.get("exact", True) or report.get("budget") or report.get("changes")
    return "FAIL" if is_fault else "DIFFERENT"


def perplexities(report: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the original's and the candidate's: on the text file if there is one, else on the prompts."""
    if (text := report.get("perplexity")) is not None:
        return text["reference"], text["candidate"]
    return report["distribution"]["perplexity_reference"], report["distribution"]["perplexity_candidate"]


def population(report: Mapping[str, Any]) -> str:
    """Return of which tokens the distribution is."""
    tokens, text = report["distribution"].get("tokens"), report.get("text") or {}
    what = text.get("file") or f"the {report.get('prompts') or 'prompts'}"
    return what if tokens is None else f"{tokens:,} tokens of {what}"


def unit(report: Mapping[str, Any]) -> str:
    """Return over what the standard errors of the distribution are."""
    return "window" if (report.get("text") or {}).get("file") else "text"


def _difference(report: ParityReport) -> list[str]:
    """How different the model is, a sentence for each set of tokens."""
    measured, (before, after) = report.distribution, perplexities(report)
    sentences = [
        f"On {population(report)} the KL divergence is {uncertain(measured.kl_mean, measured.kl_mean_se)} nats a "
        f"token, and {uncertain(measured.top1_agreement, measured.top1_agreement_se, percent)} have the same likeliest "
        "token."
    ]
    if not math.isnan(before):
        text = report.perplexity
        of_what = f"the {text.tokens:,} tokens of {text.file}" if text else "the prompts"
        sentences.append(
            f"The perplexity of {of_what} is {precise(after)} instead of {precise(before)} ({change(before, after)})."
        )
    return sentences


def _why_different(report: ParityReport) -> str:
    if report.against is not None:
        why = f"{report.model} is another checkpoint than {report.against}"
    elif report.quantize is not None:
        why = f"{report.quantize} weights are other weights"
    else:
        why = f"{report.norm} is not a LayerNorm"
    return f"A difference is expected, since {why}; a budget says how much is allowed."


def _broken_parity(report: ParityReport) -> list[str]:
    """Why this is not the same model, a sentence each."""
    reasons = []
    for when, logits, floor, most in (
        ("The", report.logits, f"noise floor of {report.dtype}", MOST_NOISE),
        ("Decoded a token at a time, the", report.decoding, "noise floor", MOST_DECODING_NOISE),
    ):
        if logits is not None and not logits.ratio <= most:  # written so that NaN fails
            reasons.append(
                f"{when} logits' RMS error is {brief(logits.rms_error)}, {brief(logits.ratio)} times the {floor}; "
                f"at most {most:g} times is parity."
            )
    if report.text is not None and (off := report.text.first_off) is not None:
        what = report.text.file or "the built-in text that fills the context"
        reasons.append(
            f"In window {off.window} of {what}, from position {off.position} on, the logits are off: the RMS error "
            f"there is {brief(off.error)}, and transformers' own nowhere above {brief(off.noise)}; the window's is "
            f"{brief(off.ratio)} times the noise floor."
        )
    parting = report.greedy.first_divergence
    if parting is not None and not parting.within_noise:
        reasons.append(
            f"Greedy decoding of prompt {parting.prompt} parts at new token {parting.token}, where the two best logits "
            f"are {brief(parting.margin)} apart and the noise is only {brief(parting.noise)}."
        )
    if (off := report.first_off) is not None and reasons:
        reasons.append(
            f"The first output that is off is {off.place}'s, by {brief(off.error)} of its size, where transformers' "
            f"own error is {brief(off.noise)}."
        )
    return reasons + _broken_gradients(report)


def _broken_gradients(report: ParityReport) -> list[str]:
    """Return a sentence on the gradients that are off, if there are some."""
    wrong = [row for row in report.gradients or () if not row.ratio <= MOST_NOISE]
    if not wrong:
        return []
    return [
        f"The gradients of {len(wrong)} of {len(report.gradients)} Parameters are off, most that of "
        f"{wrong[0].parameter}: by {brief(wrong[0].relative_error)} of its size, {brief(wrong[0].ratio)} times "
        f"transformers' own error at {report.dtype}; at most {MOST_NOISE:g} times is parity."
    ]


def _broken_budget(report: ParityReport) -> list[str]:
    """The limits that were not kept, a sentence each."""
    removal = report.removal
    if removal is not None and removal.allowed is not None:
        return [] if removal.allowed else ["The budget allows no site."]
    return [
        f"The budget allows {line.quantity} {in_kind(line.quantity, line.limit)}, and it is "
        f"{in_kind(line.quantity, line.measured)}."
        for line in report.budget
        if not line.kept
    ]


def in_kind(quantity: str, x: float) -> str:
    """Format a figure of a budget: shares as percent, the others as numbers."""
    return percent(x) if quantity in ("perplexity", "top1", "top5") else brief(x)


def _perplexity_change(report: ParityReport) -> float:
    before, after = perplexities(report)
    return abs(after / before - 1)


def _worst(report: ParityReport, figure: str) -> float:
    """A figure of the logits, on whole texts or as they are decoded, whichever is larger; NaN if one is."""
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
