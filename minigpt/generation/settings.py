"""What to generate, in the names and with the meanings of a Hugging Face generation config."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from minigpt.config import GPT2Config
from minigpt.errors import GenerationError


class _OfTheConfig:
    """Stands for "what the model's config says", which None cannot: None means that there is none."""

    def __repr__(self) -> str:
        return "<the config's>"


OF_THE_CONFIG: Any = _OfTheConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How to continue a prompt.

    Attributes:
        max_new_tokens: tokens to add at most, 1 or more.
        do_sample: draw from the distribution; otherwise take the likeliest token (greedy).
        temperature: divides the logits before drawing; 0 is greedy.
        top_k: draw only from the k likeliest tokens.
        top_p: draw only from the smallest set of tokens whose probabilities reach p, within (0, 1].
        seed: makes the draw repeatable; row i of a batch uses seed + i, so a row draws alike alone and in company.
        eos_token_id: id or ids that end a row, by default the config's; None to end none.
        pad_token_id: fills the rows that ended; by default the config's, else the first eos.
        stop_strings: texts that end a row once they appear in what it has added.

    Raises:
        GenerationError: a value is out of range.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    eos_token_id: int | Sequence[int] | None = OF_THE_CONFIG
    pad_token_id: int | None = OF_THE_CONFIG
    stop_strings: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        _require(
            self.temperature == 0 or 1e-30 <= self.temperature < float("inf"),
            f"temperature must be 0 (greedy), or finite and not below 1e-30, not {self.temperature}",
        )
        _require(self.top_k is None or self.top_k >= 1, f"top_k must be 1 or more, not {self.top_k}")
        _require(self.top_p is None or 0 < self.top_p <= 1, f"top_p must lie within (0, 1], not {self.top_p}")
        _require(self.seed is None or 0 <= self.seed < 2**63, f"seed must lie within [0, 2^63), not {self.seed}")
        _require(all(self.stop_texts), "a stop string must not be empty")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings, none, one or several, as a tuple."""
        if self.stop_strings is None:
            return ()
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)

    @property
    def samples(self) -> bool:
        """Whether chance has a say."""
        return self.do_sample and self.temperature > 0

    def end_ids(self, config: GPT2Config) -> tuple[int, ...]:
        """Every id that ends a row."""
        if self.eos_token_id is OF_THE_CONFIG:
            return config.eos_token_ids
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)

    def fill_id(self, config: GPT2Config) -> int:
        """The id that fills a row which has ended."""
        given = config.pad_token_id if self.pad_token_id is OF_THE_CONFIG else self.pad_token_id
        return given if given is not None else next(iter(self.end_ids(config)), 0)


def parse_settings(**settings: Any) -> GenerationSettings:
    """Settings by name.

    Raises:
        GenerationError: a name is unknown, a value out of range, or max_new_tokens is missing.
    """
    known = [field.name for field in dataclasses.fields(GenerationSettings)]
    unknown = sorted(settings.keys() - set(known))
    _require(not unknown, f"unknown generation settings: {', '.join(unknown)}; known are {', '.join(known)}")
    _require("max_new_tokens" in settings, "max_new_tokens must be given")
    return GenerationSettings(**settings)


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise GenerationError(complaint)
