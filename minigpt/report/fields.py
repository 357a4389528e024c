"""The parts of a parity report, and questions to them. A report's JSON has the same names.

Errors of norms and blocks are relative: the root of the mean, over tokens, of |difference|^2 / |truth|^2. KL divergence
and loss are in nats a token. A field that ends in ``_se`` is a standard error.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from minigpt.report.account_fields import Account
from minigpt.report.noise import MOST_DECODING_NOISE, MOST_NOISE, NEAR
from minigpt.report.numerals import count, digits, percent, precise, times
from minigpt.report.part import Shown

PROMPTS = "the prompts"
OWN_NORM = "its own"  # of a candidate that is no model of ours, and of another architecture than GPT-2


class Unjudged(StrEnum):
    """A part of a judgement that a candidate may not give what it needs for."""

    PLACES = "norms and blocks"
    ALONE = "norms by themselves"
    DECODED = "tokens one by one"
    GRADIENTS = "gradients"
    __repr__ = str.__repr__  # as a list of them is printed


@dataclass(frozen=True, kw_only=True)
class LogitsError:
    """The distance of logits from the truth.

    Attributes:
        max_abs_error, rms_error: of the candidate.
        scale: RMS of the true logits.
        noise_floor_max, noise_floor_rms: the same errors of transformers at the dtype.
        ratio: rms_error over noise_floor_rms.
        ratio_without_shift: the same ratio after each position's mean difference is subtracted. A shift by one number
            changes no probability.
    """

    rms_error: Annotated[float, Shown("RMS error")]
    noise_floor_rms: Annotated[float, Shown("noise floor")]
    ratio: Annotated[float, Shown("ratio", times)]
    max_abs_error: Annotated[float, Shown("largest error")]
    noise_floor_max: Annotated[float, Shown("its noise floor")]
    scale: Annotated[float, Shown("RMS of the truth")]
    ratio_without_shift: float


@dataclass(frozen=True)
class WorstPosition:
    """The position with the largest KL divergence.

    Attributes:
        window: the number of the window, or of the prompt.
        position: in that window, from 0.
        text: the last tokens up to that position; None without a tokenizer.
    """

    window: int
    position: int
    text: str | None


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Next-token distributions against the truth: on the text file if there is one, else on the prompts.

    Attributes:
        top1_agreement: the share of positions with the same likeliest token.
        top5_agreement: the share of the five likeliest tokens that both have.
        kl_p90, kl_p99, kl_p999: percentiles of the KL divergence over positions.
        perplexity_reference, perplexity_candidate: of these tokens.
        loss_change: candidate minus truth.
    """

    kl_mean: Annotated[float, Shown("KL divergence, mean")]
    kl_mean_se: float
    kl_median: Annotated[float, Shown("KL divergence, median")]
    kl_p90: Annotated[float, Shown("KL divergence, 90th percentile")]
    kl_p99: Annotated[float, Shown("KL divergence, 99th percentile")]
    kl_p999: Annotated[float, Shown("KL divergence, 99.9th percentile")]
    kl_max: Annotated[float, Shown("KL divergence, largest")]
    top1_agreement: Annotated[float, Shown("same likeliest token", percent)]
    top1_agreement_se: float
    top5_agreement: Annotated[float, Shown("five likeliest tokens in common", percent)]
    loss_change: Annotated[float, Shown("change of loss, nats a token")]
    loss_change_se: float
    perplexity_candidate: Annotated[float, Shown("perplexity", precise)]
    perplexity_reference: Annotated[float, Shown("perplexity of the original", precise)]
    tokens: Annotated[int, Shown("tokens", count)]
    worst: WorstPosition


@dataclass(frozen=True)
class Divergence:
    """A position at which the candidate chooses another token than transformers.

    Attributes:
        prompt, token: the number of the prompt, and of the new token.
        margin: between the two best true logits there.
        noise: the margin that noise can turn over.
    """

    prompt: Annotated[int, Shown("prompt that diverges", count)]
    token: Annotated[int, Shown("new token", count)]
    candidate_id: Annotated[int, Shown("id chosen by the candidate", digits)]
    reference_id: Annotated[int, Shown("id chosen by transformers", digits)]
    margin: Annotated[float, Shown("margin between the two best true logits there")]
    noise: Annotated[float, Shown("margin that noise can turn over")]
    within_noise: bool
    prompt_text: str | None = None
    candidate_text: str | None = None
    reference_text: str | None = None

    @property
    def where(self) -> str:
        """ "within" or "beyond" the noise."""
        return "within" if self.within_noise else "beyond"


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens, up to the first difference in each text.

    Attributes:
        first_divergence: the first that noise does not explain, else the first.
    """

    tokens_compared: int
    first_divergence: Divergence | None


@dataclass(frozen=True)
class NormSiteError:
    """The error at a norm.

    Attributes:
        local_error: of its output for the true input; None if the candidate cannot be asked.
        propagated_error: of its output in the running model.
        noise: the propagated error of transformers at the dtype.
    """

    site: str
    local_error: Annotated[float | None, Shown("own error")]
    propagated_error: Annotated[float, Shown("error of its output")]
    noise: Annotated[float, Shown("transformers' own")]
    swapped: bool


@dataclass(frozen=True)
class BlockError:
    """The error of the residual stream after a block, and that of transformers at the dtype."""

    block: str
    error: float
    noise: float


@dataclass(frozen=True)
class PlaceOff:
    """A norm or block whose output is off.

    Attributes:
        ratio: error over noise.
        ratio_before: the ratio of the place before it; None if the error is beyond any noise.
    """

    place: str
    error: float
    noise: float
    ratio: float
    ratio_before: float | None = None


@dataclass(frozen=True)
class PositionOff:
    """The first window and position of a text whose logits are off.

    Attributes:
        token: the number of the token in the text.
        error: RMS of the logits' error there.
        noise: the largest of transformers at any position.
        ratio: the window's RMS error over its noise floor.
    """

    window: Annotated[int, Shown("window", count)]
    position: Annotated[int, Shown("position", count)]
    token: Annotated[int, Shown("token of the text", count)]
    error: Annotated[float, Shown("RMS error there")]
    noise: Annotated[float, Shown("largest of transformers at a position")]
    ratio: Annotated[float, Shown("ratio of that text", times)]


@dataclass(frozen=True)
class PromptOff:
    """The first prompt and position whose logits are off.

    Attributes:
        error: RMS of the logits' error there.
        noise: the largest of transformers at any position.
        ratio: the prompt's RMS error over the noise floor.
        prompts_off, prompts: how many prompts are off, of how many.
    """

    prompt: Annotated[int, Shown("prompt", count)]
    position: Annotated[int, Shown("position", count)]
    error: Annotated[float, Shown("RMS error there")]
    noise: Annotated[float, Shown("largest of transformers at a position")]
    ratio: Annotated[float, Shown("ratio of that text", times)]
    prompts_off: Annotated[int, Shown("prompts that are off", count)]
    prompts: Annotated[int, Shown("prompts", count)]


@dataclass(frozen=True)
class StoredLogits:
    """The change of the true logits by storing them at the narrow dtype in which all of the candidate's can be stored.

    Attributes:
        ratio: rms_error over the noise floor.
        explains: whether the candidate's error is no larger.
    """

    dtype: str
    rms_error: float
    max_abs_error: float
    ratio: float
    explains: bool


@dataclass(frozen=True)
class TextError:
    """Logits on a longer text, in windows of the context; of built-in texts if ``file`` is None."""

    file: str | None
    tokens: int
    windows: int
    window: int
    logits: LogitsError
    first_off: PositionOff | None


@dataclass(frozen=True, kw_only=True)
class PerplexityChange:
    """The perplexity of a whole text file, in windows that overlap: of the original and of the candidate.

    Attributes:
        entropy: of the candidate's predictions, in nats, a mean over tokens.
        rows: for each window, the tokens that count and the sum of their loss.
    """

    file: str
    candidate: Annotated[float, Shown("perplexity", precise)]
    reference: Annotated[float, Shown("perplexity of the original", precise)]
    loss_change: Annotated[float, Shown("change of loss, nats a token")]
    loss_change_se: float
    loss_se: Annotated[float, Shown("standard error of the loss")]
    entropy: Annotated[float, Shown("entropy of the predictions, nats")]
    tokens: Annotated[int, Shown("tokens", count)]
    window: Annotated[int, Shown("window", count)]
    stride: Annotated[int, Shown("stride", count)]
    rows: list[list[float]]


@dataclass(frozen=True)
class GradientError:
    """The relative error of the gradient for a Parameter, that of transformers at the dtype, and their ratio."""

    parameter: str
    relative_error: Annotated[float, Shown("relative error")]
    noise: Annotated[float, Shown("transformers' own")]
    ratio: Annotated[float, Shown("ratio", times)]


@dataclass(frozen=True)
class Bitwise:
    """Reference arithmetic with the original's norms against transformers, same attention and dtype."""

    equal: bool
    max_abs_error: float


@dataclass(frozen=True)
class NotANumber:
    """The first NaN among a candidate's logits: the number of the text, and the position."""

    text: int
    position: int


@dataclass(frozen=True)
class Coverage:
    """The share of the context's positions, and of the vocabulary's tokens, that the texts reach."""

    positions: int
    context: int
    tokens: int
    vocabulary: int


@dataclass(frozen=True)
class TextDivergence:
    """KL divergence along a prompt and its continuation, which begins at ``new_from``."""

    prompt: int
    pieces: list[str]
    kl: list[float]
    new_from: int


@dataclass(frozen=True)
class SiteFit:
    """R squared of a swapped norm before and after it was fitted."""

    site: str
    before: Annotated[float, Shown("as it is", percent)]
    after: Annotated[float, Shown("fitted", percent)]


@dataclass(frozen=True)
class SiteChange:
    """The change of the logits by a site that is swapped alone; ``ratio`` is over the noise floor of the same texts."""

    site: str
    rms_error: Annotated[float, Shown("RMS change")]
    ratio: Annotated[float, Shown("of the noise floor", times)]


@dataclass(frozen=True)
class RemovalStep:
    """The model with its norms swapped at the sites up to this one."""

    site: str
    kl_mean: Annotated[float, Shown("KL divergence")]
    kl_mean_se: float
    loss: Annotated[float, Shown("loss", precise)]
    loss_change: Annotated[float, Shown("change of loss")]
    loss_change_se: float


@dataclass(frozen=True)
class Removal:
    """The sites in the order in which they are swapped, the least harmful first.

    Attributes:
        loss, tokens: of the model with its own norms, on the texts of the trials.
        allowed: how many of the steps the budget allows; None without a budget.
    """

    loss: float
    tokens: int
    steps: list[RemovalStep]
    allowed: int | None = None


@dataclass(frozen=True)
class Bisection:
    """The swapped sites that must have their own norm back for a pass.

    Attributes:
        sets: the same sites, as sets that each break it and would not with any one site left out.
        verdicts: how many sets were tried.
    """

    sites: list[str]
    sets: list[list[str]]
    verdicts: int


@dataclass(frozen=True)
class Precision:
    """The dtype whose own error in transformers is nearest to the candidate's, and the candidate's over that error."""

    like: str
    ratio: float


@dataclass(frozen=True)
class Diagnosed:
    """A mistake that explains the error.

    Attributes:
        mistake: a noun phrase.
        ratio: the error over the noise floor once this mistake, and those before it, are in the truth.
        explains: whether that is parity.
        rest: the precision that the rest of the error is like.
        cure: what to write in place of the mistake, as a sentence; "" where that is no plain phrase.
    """

    mistake: str
    ratio: Annotated[float, Shown("error with it", times)]
    explains: bool
    rest: Precision | None = None
    cure: str = ""


@dataclass(frozen=True)
class BudgetLine:
    """A limit that decides, and what was measured on ``text``: the text file, or the prompts."""

    quantity: str
    limit: float
    measured: float
    kept: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class ParityFigures:
    """The candidate, and all of its measures. Parts that the caller did not ask for are None.

    Attributes:
        model, against, norm, sites, device, dtype, attention, quantize, center, prompts, versions: what was judged.
        against_norm: the norm that transformers computes there: "fused", or "frozen" by a huge eps.
        difference: why the candidate is another model by an option of opening, as int8 weights are.
        built_in: whether the prompts are the built-in texts.
        exact: whether the candidate claims to be the same model; an RMSNorm or int8 weights do not.
        bitwise: our own loading and network, against transformers; None of another architecture, which is its own.
        logits, distribution, greedy: on the prompts and what transformers writes after them.
        decoding: the logits where both read a token at a time; its floor is at least that of whole texts.
        text: the logits on the windows of the text file, or of built-in texts.
        perplexity: of the whole text file.
        prompt_off: the first prompt whose logits are off; ``text`` has the first window.
        stored: what storing the logits at a narrow dtype does, where that is beyond the noise.
        norm_sites, blocks: the error of each norm, and of the stream after each block.
        new_errors: of another program, the norms and blocks at which the error grows far above that at all before them.
        every_place: whether every norm and block was read on every prompt.
        tokens: KL divergence along one prompt.
        coverage: the positions and tokens that the texts reach.
        nan: the first NaN of the logits.
        gradients: of the texts' loss, for every Parameter and the embedded input, the worst ratio first.
        fit: how well each fitted norm explains the one that it replaces.
        sensitivity: what each site alone does to the logits, most first.
        removal, bisect: which sites a budget or parity allows.
        account: of another program's file, where its difference comes from.
        missing: parts that were not judged, since the candidate does not give them.
        notes: e.g. that the norm's class has another eps.
    """

    model: str
    against: str | None = None
    norm: str
    against_norm: str = "fused"
    sites: list[str]
    device: str
    dtype: str
    attention: str
    quantize: str | None = None
    center: bool = False
    difference: str | None = None
    exact: bool = True
    versions: dict[str, Any]
    prompts: str
    built_in: bool = False
    bitwise: Bitwise | None
    logits: LogitsError
    distribution: Distribution
    greedy: Greedy
    decoding: LogitsError | None = None
    text: TextError | None = None
    perplexity: PerplexityChange | None = None
    prompt_off: PromptOff | None = None
    stored: StoredLogits | None = None
    norm_sites: list[NormSiteError] = field(default_factory=list)
    blocks: list[BlockError] = field(default_factory=list)
    new_errors: list[str] = field(default_factory=list)
    every_place: bool = False
    tokens: TextDivergence | None = None
    coverage: Coverage
    nan: NotANumber | None = None
    gradients: list[GradientError] | None = None
    fit: list[SiteFit] | None = None
    sensitivity: list[SiteChange] | None = None
    removal: Removal | None = None
    bisect: Bisection | None = None
    account: Account | None = None
    missing: list[Unjudged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision on a candidate, and the reasons for it.

    Attributes:
        verdict: "pass" if the budget is kept; without a budget, if parity holds. Else "fail".
        reasons: a sentence for each.
        budget: the limits that decide in place of parity.
        first_off: where the error begins.
        changes: what the candidate's code changed in the process; any is a fault.
        notes: which outputs are off though the logits are right.
    """

    verdict: str
    reasons: list[str]
    budget: list[BudgetLine] | None = None
    first_off: PlaceOff | None = None
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if the budget is kept; without a budget, if parity holds."""
        return self.verdict == "pass"


@dataclass(frozen=True, kw_only=True)
class Causes:
    """The causes of a verdict.

    Attributes:
        precision: the dtype whose own error in transformers is nearest to the candidate's; None if the first block is
            right, or if known mistakes take most of the error away.
        diagnosis: mistakes that give the candidate's logits, one on top of the other; empty if no known one does; None
            if none was sought.
        notes: why there is no diagnosis, though one was due.
    """

    precision: Precision | None = None
    diagnosis: list[Diagnosed] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ReportFields(Causes, Verdict, ParityFigures):
    """The fields of a report: its figures, the verdict and the causes."""

    @property
    def outcome(self) -> str:
        """PASS, FAIL, or DIFFERENT: a fail of a candidate that does not claim to be the same model."""
        if self.passed:
            return "PASS"
        is_fault = self.exact or self.budget or self.changes or self.nan
        return "FAIL" if is_fault else "DIFFERENT"


def is_near(precision: Precision | None) -> bool:
    """Return whether an error is so near to transformers' own at a dtype that it is like it."""
    return precision is not None and 1 / NEAR <= precision.ratio <= NEAR


def has_norm(figures: ParityFigures) -> bool:
    """Return whether a norm was in question; another program's file, a function or a module has its own."""
    return figures.norm != OWN_NORM


def is_by_file(figures: ParityFigures) -> bool:
    """Return whether the verdict is on a program and its file, and not on the original."""
    return figures.account is not None and figures.account.decides


def perplexities(figures: ParityFigures) -> tuple[float, float]:
    """Return the original's and the candidate's: on the text file if there is one, else on the prompts."""
    text, prompts = figures.perplexity, figures.distribution
    if text is not None:
        return text.reference, text.candidate
    return prompts.perplexity_reference, prompts.perplexity_candidate


def is_shifted(figures: ParityFigures) -> bool:
    """Return whether logits are off by one constant at each position, and by nothing else."""
    errors = [(figures.logits, MOST_NOISE)]
    if figures.decoding is not None:
        errors.append((figures.decoding, MOST_DECODING_NOISE))
    if figures.text is not None:
        errors.append((figures.text.logits, MOST_NOISE))
    off = [(error, most) for error, most in errors if not error.ratio <= most]  # written so that NaN is off
    return bool(off) and all(error.ratio_without_shift <= most for error, most in off)


def population(figures: ParityFigures) -> str:
    """Describe the tokens that the distribution was measured on."""
    return f"{figures.distribution.tokens:,} tokens of {text_file(figures) or 'the ' + figures.prompts}"


def places(figures: ParityFigures) -> list[NormSiteError]:
    """Return each norm, and each block behind its norms, in the order of the data.

    A block is a site without an error of its own, that nothing was swapped at.
    """
    rows = list(figures.norm_sites)
    end = 0
    for block in figures.blocks:
        for number, row in enumerate(rows):
            if row.site.startswith(f"{block.block}."):
                end = number + 1
        rows.insert(end, NormSiteError(block.block, None, block.error, block.noise, False))
        end += 1
    return rows


def text_file(figures: ParityFigures) -> str | None:
    """Return the text file that the models read; None if they read prompts alone."""
    return None if figures.text is None else figures.text.file
