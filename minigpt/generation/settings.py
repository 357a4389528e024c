"""What to generate, in the names and with the meanings of a Hugging Face generation config."""

import dataclasses
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from minigpt.config import GPT2Config
from minigpt.errors import GenerationError


class _OfTheConfig:
    """Stands for "what the model's config says", which None cannot: None means that there is none."""

    def __repr__(self) -> str:
        return "<the config's>"


OF_THE_CONFIG: Any = _OfTheConfig()
OVERFLOWS = ("refuse", "slide")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How to continue a prompt.

    Attributes:
        max_new_tokens: tokens to add at most, 1 or more.
        do_sample: draw from the distribution; otherwise take the likeliest token (greedy).
        temperature: divides the logits before drawing; 0 is greedy.
        top_k: draw only from the k likeliest tokens.
        top_p: draw only from the smallest set of tokens whose probabilities reach p, within (0, 1].
        min_p: draw only from tokens at least min_p times as likely as the likeliest, within [0, 1].
        typical_p: draw only from the tokens nearest to the expected surprise that reach p together, within (0, 1].
        seed: makes the draw repeatable; row i of a batch uses seed + i, so a row draws alike alone and in company.
        min_new_tokens: tokens to add before an eos_token_id may come.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens already in the text.
        presence_penalty: subtracted from the logit of every token that has been added.
        frequency_penalty: subtracted from a token's logit for each time that it has been added.
        logit_bias: numbers to add to the logits of ids.
        no_repeat_ngram_size: no run of so many tokens comes twice, the prompt's included; 0 permits all.
        bad_words_ids: runs of ids that are not to be completed; a run that is an eos_token_id alone is permitted.
        suppress_tokens: ids that never come.
        eos_token_id: id or ids that end a row, by default the config's; None to end none.
        pad_token_id: fills the rows that ended; by default the config's, else the first eos.
        stop_strings: texts that end a row once they appear in what it has added.
        num_return_sequences: texts for each prompt, which is read once for all of them.
        use_cache: keep keys and values; without it the whole text is read again for each token.
        prompt_lookup_num_tokens: tokens to copy from the text so far as a draft, verified in one forward; 0 for none.
        overflow: what to do where the context is too short: "refuse", or "slide": each token then sees the
            tokens before it that fit, read anew since their positions change.
        slide_stride: tokens that a sliding window forgets at a time; more is faster, and sees less.
        output_scores: return the processed logits of every step.
        output_logprobs: return each new token's log-probability in the distribution that it was taken from.

    Raises:
        GenerationError: values are out of range or contradict each other; one error names all of them.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    eos_token_id: int | Sequence[int] | None = OF_THE_CONFIG
    pad_token_id: int | None = OF_THE_CONFIG
    stop_strings: str | Sequence[str] | None = None
    num_return_sequences: int = 1
    use_cache: bool = True
    prompt_lookup_num_tokens: int | None = None
    overflow: str = "refuse"
    slide_stride: int = 1
    output_scores: bool = False
    output_logprobs: bool = False

    def __post_init__(self) -> None:
        wrong = _out_of_range(vars(self))
        right = {name: None if name in wrong else value for name, value in vars(self).items()}
        if complaints := [*wrong.values(), *_contradictions(right)]:
            raise GenerationError("; ".join(complaints))

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

    @property
    def depends_on_row(self) -> bool:
        """Whether a row's logits are changed by what the row has written."""
        return any(self.active(name) is not None for name in DEPENDS_ON_ROW)

    @property
    def depends_on_tokens(self) -> bool:
        """Whether it matters which tokens a row has written, and not just how many."""
        runs = self.active("bad_words_ids") or ()
        return any(self.active(name) is not None for name in DEPENDS_ON_TOKENS) or any(len(run) > 1 for run in runs)

    @cached_property
    def choice(self) -> str:
        """What decides how tokens are chosen: rows of equal ``choice`` are chosen for together."""
        shaping = {name: self.active(name) for name in NEUTRAL}
        return f"{self.samples} {self.output_scores} {self.output_logprobs} {shaping}"

    def active(self, name: str) -> Any:
        """The value of a setting that changes logits, or None where it changes nothing."""
        value = getattr(self, name)
        idle = value is None or value in NEUTRAL[name] or (name in SHAPES_A_DRAW and not self.samples)
        return None if idle else value

    @property
    def draft_tokens(self) -> int:
        return self.prompt_lookup_num_tokens or 0

    def end_ids(self, config: GPT2Config) -> tuple[int, ...]:
        """Every id that ends a row."""
        return config.eos_token_ids if self.eos_token_id is OF_THE_CONFIG else self.given_end_ids

    @property
    def given_end_ids(self) -> tuple[int, ...]:
        """Those that the settings themselves name."""
        ends = self.eos_token_id
        if ends is None or ends is OF_THE_CONFIG:
            return ()
        return tuple(ends) if isinstance(ends, Sequence) else (ends,)

    def fill_id(self, config: GPT2Config) -> int:
        """The id that fills a row which has ended."""
        given = config.pad_token_id if self.pad_token_id is OF_THE_CONFIG else self.pad_token_id
        return given if given is not None else next(iter(self.end_ids(config)), 0)

    def require_known_ids(self, vocab_size: int) -> None:
        """Refuse ids to exclude that no token has.

        Raises:
            GenerationError: all of them are named.
        """
        named = {
            "bad_words_ids": [i for run in self.bad_words_ids or () for i in run],
            "suppress_tokens": self.suppress_tokens or (),
            "logit_bias": list(self.logit_bias or ()),
        }
        complaints = [
            f"{name} holds {', '.join(map(str, wrong))}, outside the vocabulary of {vocab_size}"
            for name, ids in named.items()
            if (wrong := sorted({i for i in ids if i >= vocab_size}))
        ]
        if complaints:
            raise GenerationError("; ".join(complaints))


def known_settings() -> list[str]:
    """The names of all settings."""
    return [field.name for field in dataclasses.fields(GenerationSettings)]


def parse_settings(**settings: Any) -> GenerationSettings:
    """Settings by name.

    Raises:
        GenerationError: names are unknown, values out of range or at odds, or max_new_tokens is missing: all of it
            in one error.
    """
    known = known_settings()
    given = {name: value for name, value in settings.items() if name in known}
    complaints = []
    if unknown := sorted(settings.keys() - set(known)):
        complaints.append(f"unknown generation settings: {', '.join(unknown)}; known are {', '.join(known)}")
    if "max_new_tokens" not in given:
        complaints.append("max_new_tokens must be given")
    if complaints:
        raise GenerationError("; ".join([*complaints, *_out_of_range(given).values()]))
    return GenerationSettings(**given)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) <= sys.float_info.max


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: _is_int(value) and value >= least


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_at_least(0), value))


def _is_unicode(text: str) -> bool:
    """Whether it is whole characters, which a text in UTF-8 can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


# what each setting must be, where it is given; None is always "not given" but for those in NEVER_NONE
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (_at_least(1), "be 1 or more"),
    "do_sample": (_is_flag, "be True or False"),
    "temperature": (
        lambda t: _is_number(t) and (t == 0 or 1e-30 <= t <= sys.float_info.max),
        "be 0 (greedy), or finite and not below 1e-30",
    ),
    "top_k": (_at_least(1), "be 1 or more"),
    "top_p": (lambda p: _is_number(p) and 0 < p <= 1, "lie within (0, 1]"),
    "min_p": (lambda p: _is_number(p) and 0 <= p <= 1, "lie within [0, 1]"),
    "typical_p": (lambda p: _is_number(p) and 0 < p <= 1, "lie within (0, 1]"),
    "seed": (lambda seed: _is_int(seed) and 0 <= seed < 2**63, "lie within [0, 2^63)"),
    "min_new_tokens": (_at_least(0), "be 0 or more"),
    "repetition_penalty": (lambda r: _is_number(r) and 0 < r <= sys.float_info.max, "be finite and above 0"),
    "presence_penalty": (_is_finite, "be a finite number"),
    "frequency_penalty": (_is_finite, "be a finite number"),
    "logit_bias": (
        lambda bias: isinstance(bias, Mapping) and _is_ids(list(bias)) and all(map(_is_finite, bias.values())),
        "map ids to finite numbers",
    ),
    "no_repeat_ngram_size": (_at_least(0), "be 0 or more"),
    "bad_words_ids": (
        lambda runs: (
            isinstance(runs, Sequence) and len(runs) > 0 and all(_is_ids(run) and len(run) > 0 for run in runs)
        ),
        "be a list of lists of ids, none of them empty",
    ),
    "suppress_tokens": (_is_ids, "be a list of ids"),
    "eos_token_id": (
        lambda end: end is OF_THE_CONFIG or _is_int(end) or (isinstance(end, Sequence) and all(map(_is_int, end))),
        "be an id or a list of ids",
    ),
    "pad_token_id": (
        lambda pad: pad is OF_THE_CONFIG or (_is_int(pad) and -(2**31) <= pad < 2**31),
        "be an id, or another number of 32 bits",
    ),
    "num_return_sequences": (_at_least(1), "be 1 or more"),
    "use_cache": (_is_flag, "be True or False"),
    "prompt_lookup_num_tokens": (_at_least(0), "be 0 or more"),
    "overflow": (lambda how: isinstance(how, str) and how in OVERFLOWS, f"be one of {', '.join(OVERFLOWS)}"),
    "slide_stride": (_at_least(1), "be 1 or more"),
    "output_scores": (_is_flag, "be True or False"),
    "output_logprobs": (_is_flag, "be True or False"),
}
NEVER_NONE = {field.name for field in dataclasses.fields(GenerationSettings) if field.default is not None}
NEVER_NONE -= {"eos_token_id", "pad_token_id"}

NEUTRAL: dict[str, tuple[Any, ...]] = {  # the values with which a setting changes no logits
    "temperature": (0, 1), "top_k": (), "top_p": (1,), "min_p": (0,), "typical_p": (1,), "repetition_penalty": (1,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "no_repeat_ngram_size": (0,),
    "bad_words_ids": (), "min_new_tokens": (0,), "suppress_tokens": ([], ()),
}  # fmt: skip
SHAPES_A_DRAW = ("temperature", "top_k", "top_p", "min_p", "typical_p")
DEPENDS_ON_TOKENS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
DEPENDS_ON_ROW = (*DEPENDS_ON_TOKENS, "bad_words_ids", "min_new_tokens")


def _out_of_range(given: dict[str, Any]) -> dict[str, str]:
    """What is to be said of each setting that cannot be what it is."""
    wrong = {
        name: f"{name} must {requirement}, not {given[name]!r:.200}"
        for name, (fits, requirement) in RANGES.items()
        if name in given and (given[name] is not None or name in NEVER_NONE) and not fits(given[name])
    }
    said = _wrong_stops(given.get("stop_strings"))
    return wrong if said is None else wrong | {"stop_strings": said}


def _wrong_stops(stops: Any) -> str | None:
    texts = [stops] if isinstance(stops, str) else [] if stops is None else stops
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        return f"stop_strings must be a text or a list of texts, not {stops!r:.200}"
    if not all(texts):
        return "a stop string must not be empty"
    if wrong := [text for text in texts if not _is_unicode(text)]:
        return f"a stop string must be valid Unicode, which no text matches else, not {wrong[0]!r}"
    return None


def _contradictions(given: dict[str, Any]) -> Iterator[str]:
    """What settings say against one another; None stands for one that says nothing."""
    new, least = given["max_new_tokens"], given["min_new_tokens"]
    if None not in (new, least) and least > new:
        yield f"min_new_tokens {least} is more than max_new_tokens {new}"
    copies, samples = given["num_return_sequences"], given["do_sample"] is not False and given["temperature"] != 0
    where = "without do_sample" if given["do_sample"] is False else "at temperature 0"
    if copies not in (None, 1) and not samples:
        yield f"num_return_sequences {copies} {where} would be the same text {copies} times"
    chances = [name for name in SHAPES_A_DRAW if given[name] is not None and given[name] not in NEUTRAL[name]]
    if chances and not samples:
        yield f"{', '.join(chances)} shape{'s' * (len(chances) == 1)} a draw, and {where} nothing is drawn"
    if given["prompt_lookup_num_tokens"] and given["use_cache"] is False:
        yield "prompt_lookup_num_tokens needs the cache that use_cache=False forgoes"
    if given["slide_stride"] not in (None, 1) and given["overflow"] == "refuse":
        yield "slide_stride is for overflow='slide' only"
