"""What a parity run found, and its verdict. Every class here is an object in the report's JSON."""

import dataclasses
import html
import io
import math
import sys
from pathlib import Path
from typing import Any, Literal

from minigpt.json_file import finite
from minigpt.measure.numerals import brief, change, percent, precise

MOST_NOISE = 2.0  # a candidate may be this many times as far from the truth as transformers itself
MOST_DECODING_NOISE = 4.0  # the same for tokens read one by one: of few tokens the floor may be small by chance


@dataclasses.dataclass(frozen=True)
class Bitwise:
    """Reference arithmetic with fused norms against transformers, same attention and dtype."""

    equal: bool
    max_abs_error: float


@dataclasses.dataclass(frozen=True)
class Logits:
    """Distance from transformers in float64: the candidate's, and transformers' own at this dtype, the noise floor.

    For ``decoding`` both read a token at a time, from a cache; the floor is at least that of whole texts.
    """

    max_abs_error: float
    rms_error: float
    scale: float  # RMS of the true logits
    noise_floor_max: float
    noise_floor_rms: float
    ratio: float = dataclasses.field(init=False)  # the candidate's RMS error over the noise floor

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.over_noise(self.rms_error))

    def over_noise(self, rms_error: float) -> float:
        """An RMS error as a multiple of the noise floor."""
        floor = self.noise_floor_rms or 8 * sys.float_info.epsilon * self.scale  # at least the truth's own rounding
        if floor == 0:
            return 1.0 if rms_error == 0 else math.inf
        return rms_error / floor

    @property
    def greedy_noise(self) -> float:
        """Noise can swap two logits this close: each may be off by the noise floor's maximum."""
        return 2 * self.noise_floor_max


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The candidate's next-token distributions against the float64 truth; KL(truth || candidate) in nats."""

    top1_agreement: float
    top5_agreement: float  # share of the five likeliest tokens that both have
    kl_mean: float
    kl_median: float
    kl_p999: float
    kl_max: float
    perplexity_reference: float
    perplexity_candidate: float


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where greedy decoding first chose another token than transformers at this dtype."""

    prompt: int
    token: int  # index among the new tokens
    candidate_id: int
    reference_id: int
    margin: float  # between the two best true logits there
    noise: float  # margins up to this are within the noise
    prompt_text: str | None = None
    candidate_text: str | None = None  # of the new tokens
    reference_text: str | None = None

    @property
    def within_noise(self) -> bool:
        return self.margin <= self.noise


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Greedy continuations of all prompts, compared token by token up to the first difference in each."""

    tokens_compared: int
    first_divergence: Divergence | None  # the first that noise does not explain, else the first


@dataclasses.dataclass(frozen=True)
class NormSite:
    """Relative RMS errors at one norm: its own, given the true input, and that of its output in the running model."""

    site: str
    local_error: float
    propagated_error: float
    swapped: bool
    local_first: float  # at the first token alone, which carries the massive activations
    local_rest: float
    propagated_first: float
    propagated_rest: float
    noise: float  # what transformers itself, at this dtype, deviates there


@dataclasses.dataclass(frozen=True)
class BlockDrift:
    """Relative RMS error of the residual stream after one block."""

    block: str
    error: float
    error_first: float
    error_rest: float
    noise: float


@dataclasses.dataclass(frozen=True)
class OrdinaryDifference:
    """A harmless change in the logits of the shortest prompt, e.g. from another dtype."""

    difference: str
    rms_error: float
    share: float | None  # the candidate's RMS error on that prompt over this; None if the two do not differ


@dataclasses.dataclass(frozen=True)
class TokenDrift:
    """KL in nats along one prompt and its continuation; entry i is of the prediction made at token i."""

    prompt: int
    pieces: list[str]
    kl: list[float]
    new_from: int


@dataclasses.dataclass(frozen=True)
class SiteSensitivity:
    """RMS change of the logits when this site alone is swapped, and that as a multiple of the noise floor."""

    site: str
    rms_error: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class RemovalStep:
    """The model after one more site is swapped, against the model with its own norms."""

    site: str
    kl_mean: float  # nats a token
    loss: float  # nats a token
    rms_error: float  # of the logits


@dataclasses.dataclass(frozen=True)
class Removal:
    """Sites in the order in which they are swapped, the least harmful first, and what the model is after each."""

    loss: float  # with no site swapped
    steps: list[RemovalStep]

    def summary(self, budget: "list[BudgetLine] | None") -> str:
        """Say how many sites the budget's KL divergence allows, and on what the figures are measured."""
        measured = "The least harmful site is swapped first; figures are of one text"
        limit = next((line.limit for line in budget or [] if line.quantity == "kl"), None)
        if limit is None:
            return f"{measured}:"
        allowed = sum(step.kl_mean <= limit for step in self.steps)
        return f"A KL divergence of {limit:g} allows {allowed} sites. {measured}:"


@dataclasses.dataclass(frozen=True)
class Bisection:
    """The swapped sites that must have their own norm back for the verdict to be a pass.

    No site if it passes, or if it fails without them too.
    """

    sites: list[str]  # in the order data meets them
    sets: list[list[str]]  # the same sites, as sets that each break it and would not with any one site left out
    verdicts: int  # how many sets were tried


@dataclasses.dataclass(frozen=True)
class SiteFit:
    """The share of a norm's output in the original model that the norm at its site explains (R squared)."""

    site: str
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class TextPerplexity:
    """Perplexity of a text file with the original (reference) and with the candidate."""

    file: str
    tokens: int
    window: int
    stride: int
    reference: float
    candidate: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """Median time of one forward over the longest text, both interleaved, in milliseconds."""

    candidate_ms: float
    reference_ms: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """The norms' share of the candidate's time."""

    prefill_tokens: int
    prefill_ms: float
    prefill_norm_ms: float
    decode_ms: float
    decode_norm_ms: float
    prefill_norm_share: float = dataclasses.field(init=False)
    decode_norm_share: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        for phase in ("prefill", "decode"):
            share = min(1.0, getattr(self, f"{phase}_norm_ms") / getattr(self, f"{phase}_ms"))
            object.__setattr__(self, f"{phase}_norm_share", share)


@dataclasses.dataclass(frozen=True)
class BudgetLine:
    """One limit of a budget, and whether it was kept."""

    quantity: str
    limit: float
    measured: float
    kept: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", self.measured <= self.limit)  # NaN is not kept


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ParityReport:
    """Is the candidate still the same model as the original, as transformers computes it?

    ``print`` shows it as ``minigpt parity`` does, and a notebook as the page of ``--html``.
    """

    model: str
    norm: str
    sites: list[str]
    device: str
    dtype: str
    attention: str
    versions: dict[str, Any]
    prompts: str
    bitwise: Bitwise
    logits: Logits
    distribution: Distribution
    greedy: Greedy
    norm_sites: list[NormSite]
    speed: Speed
    against: str | None = None  # the original, if it is another checkpoint
    quantize: str | None = None
    center: bool = False  # whether the candidate was centred first
    exact: bool = True  # whether the candidate claims to be the same model; an RMSNorm or int8 weights do not
    notes: list[str] = dataclasses.field(default_factory=list)  # e.g. that the norm's class has another eps
    blocks: list[BlockDrift] = dataclasses.field(default_factory=list)
    decoding: Logits | None = None  # None if no token was written
    tokens: TokenDrift | None = None
    cost: Cost | None = None
    fit: list[SiteFit] | None = None
    noise: list[OrdinaryDifference] | None = None
    sensitivity: list[SiteSensitivity] | None = None
    removal: Removal | None = None
    bisect: Bisection | None = None
    perplexity: TextPerplexity | None = None
    budget: list[BudgetLine] | None = None

    @property
    def passed(self) -> bool:
        """Whether the budget is kept; if there is none, whether parity holds."""
        return not (self.broken_parity if self.budget is None else self.broken_budget)

    @property
    def outcome(self) -> Literal["PASS", "FAIL", "DIFFERENT"]:
        """The verdict. DIFFERENT is a fail of a candidate that does not claim to be the same model."""
        if self.passed:
            return "PASS"
        return "FAIL" if self.exact or self.budget is not None else "DIFFERENT"

    @property
    def reasons(self) -> list[str]:
        """Why it did not pass, a sentence each; empty if it did."""
        if self.budget is not None:
            return self.broken_budget
        return [self.difference, self._why_different] if self.outcome == "DIFFERENT" else self.broken_parity

    @property
    def difference(self) -> str:
        """How different the model is, in a sentence."""
        found, (before, after) = self.distribution, self.perplexities
        told = f"perplexity {precise(after)} instead of {precise(before)} ({change(before, after)}), "
        return (
            f"KL divergence {brief(found.kl_mean)} nats a token, {'' if math.isnan(before) else told}"
            f"the same likeliest token for {percent(found.top1_agreement)} of the tokens."
        )

    @property
    def _why_different(self) -> str:
        if self.against is not None:
            why = f"{self.model} is another checkpoint than {self.against}"
        elif self.quantize is not None:
            why = f"{self.quantize} weights are other weights"
        else:
            why = f"{self.norm} is not a LayerNorm"
        return f"A difference is expected, since {why}; a budget says how much is allowed."

    @property
    def broken_parity(self) -> list[str]:
        """Why this is not the same model, a sentence each."""
        found, logits = [], self.logits
        if not logits.ratio <= MOST_NOISE:  # written so that NaN fails
            found.append(
                f"The logits' RMS error is {brief(logits.rms_error)}, {brief(logits.ratio)} times the noise floor of "
                f"{self.dtype}; at most {MOST_NOISE:g} times is parity."
            )
        if self.decoding is not None and not self.decoding.ratio <= MOST_DECODING_NOISE:
            found.append(
                f"Decoded a token at a time, the logits' RMS error is {brief(self.decoding.rms_error)}, "
                f"{brief(self.decoding.ratio)} times the noise floor; at most {MOST_DECODING_NOISE:g} times is parity."
            )
        parting = self.greedy.first_divergence
        if parting is not None and not parting.within_noise:
            found.append(
                f"Greedy decoding of prompt {parting.prompt} parts at new token {parting.token}, where the two best "
                f"logits are {brief(parting.margin)} apart and the noise is only {brief(parting.noise)}."
            )
        return found

    @property
    def broken_budget(self) -> list[str]:
        """The limits that were not kept, a sentence each."""
        return [
            f"The budget allows {line.quantity} {line.limit:g}, and it is {brief(line.measured)}."
            for line in self.budget or []
            if not line.kept
        ]

    @property
    def perplexities(self) -> tuple[float, float]:
        """The original's and the candidate's: on the text file if there is one, else on the prompts."""
        if self.perplexity is not None:
            return self.perplexity.reference, self.perplexity.candidate
        return self.distribution.perplexity_reference, self.distribution.perplexity_candidate

    @property
    def perplexity_change(self) -> float:
        """Relative change of perplexity, up or down."""
        before, after = self.perplexities
        return abs(after / before - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types; a number that is not finite is null."""
        verdict = {"verdict": "pass" if self.passed else "fail", "reasons": self.reasons}
        return finite(dataclasses.asdict(self) | verdict)

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
