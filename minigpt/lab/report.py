"""What a parity run found, and its verdict."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bitwise:
    """Reference arithmetic with fused norms against transformers, same attention and dtype."""

    equal: bool
    max_abs_error: float


@dataclasses.dataclass(frozen=True)
class Logits:
    """Distance from transformers in float64: the candidate's, and, the noise floor, transformers' own at this dtype."""

    max_abs_error: float
    rms_error: float
    scale: float  # RMS of the true logits
    noise_floor_max: float
    noise_floor_rms: float

    @property
    def ratio(self) -> float:
        """The candidate's RMS error over the noise floor's."""
        if self.noise_floor_rms == 0:
            return 1.0 if self.rms_error == 0 else math.inf
        return self.rms_error / self.noise_floor_rms


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The candidate's next-token distributions against the float64 truth; KL(truth || candidate) in nats."""

    top1_agreement: float
    kl_mean: float
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
    noise: float  # margins up to this are within the noise: each of the two may be off by the noise floor's maximum

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


@dataclasses.dataclass(frozen=True)
class Speed:
    """Median time of one forward over the longest prompt, both interleaved, in milliseconds."""

    candidate_ms: float
    reference_ms: float


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """Is the candidate still the same model as transformers makes of the same weights?"""

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

    MOST_NOISE = 2.0  # a candidate may be this many times as far from the truth as transformers itself

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why parity does not hold, a sentence each; empty where it holds."""
        found = []
        if not self.logits.ratio <= self.MOST_NOISE:  # so written that NaN fails
            found.append(
                f"The logits' RMS error is {self.logits.rms_error:.3g}, {self.logits.ratio:.3g} times the noise floor "
                f"of {self.dtype}; at most {self.MOST_NOISE:g} times is parity."
            )
        parting = self.greedy.first_divergence
        if parting is not None and not parting.within_noise:
            found.append(
                f"Greedy decoding of prompt {parting.prompt} parts at new token {parting.token}, where the two best "
                f"logits are {parting.margin:.3g} apart and the noise is only {parting.noise:.3g}."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON's own types; a number that is not finite is null."""
        fields = dataclasses.asdict(self)
        fields["logits"]["ratio"] = self.logits.ratio
        fields["verdict"], fields["reasons"] = "pass" if self.passed else "fail", self.reasons
        return _finite(fields)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
