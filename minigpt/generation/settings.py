"""Settings of generation, in the names and with the meanings of a Hugging Face generation config.

``Options`` and its kinds are the keyword arguments of the public functions, for type checkers. ``GenerationSettings``
holds their values at run time and checks them. The settings that change logits live in ``processors``.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from minigpt.config import GPT2Config
from minigpt.errors import GenerationError
from minigpt.generation.processors import PROCESSORS
from minigpt.generation.values import at_least, is_flag, is_int


class Options(TypedDict, total=False):
    """The optional settings.

    Keys:
        do_sample: draw from the distribution; otherwise take the likeliest token (greedy).
        temperature: divides the logits before drawing; 0 is greedy.
        top_k: draw only from the k likeliest tokens.
        top_p: draw only from the smallest set of tokens whose probabilities reach p, within (0, 1].
        min_p: draw only from tokens at least min_p times as likely as the likeliest, within [0, 1].
        typical_p: draw only from the tokens nearest to the expected surprise that reach p together, within (0, 1].
        seed: makes the draw repeatable. Row i of a batch uses seed + i, so a row draws alike alone and in a batch.
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
        stop: text or texts that end a row once they appear in what it has added.
        stop_strings: transformers' name for ``stop``; give only one of them.
        num_return_sequences: texts for each prompt, which is read once for all of them.
        use_cache: keep keys and values; without it the whole text is read again for each token.
        prompt_lookup_num_tokens: tokens to copy from the text so far as a draft, verified in one forward; 0 for none.
        overflow: what to do where the context is too short: "refuse", or "slide": each token then sees the
            tokens before it that fit, read anew since their positions change.
        slide_stride: tokens that a sliding window forgets at a time; more is faster, and sees less.
    """

    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    seed: int | None
    min_new_tokens: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    no_repeat_ngram_size: int | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    stop: str | Sequence[str] | None
    stop_strings: str | Sequence[str] | None
    num_return_sequences: int
    use_cache: bool
    prompt_lookup_num_tokens: int | None
    overflow: str
    slide_stride: int


class TextSettings(Options):
    """The settings of functions that return text: max_new_tokens, 1 or more, is required."""

    max_new_tokens: int


class Settings(TextSettings, total=False):
    """All settings.

    Keys:
        output_scores: return the processed logits of every step.
        output_logprobs: return each new token's log-probability in the distribution that it was taken from.
    """

    output_scores: bool
    output_logprobs: bool


class _OfTheConfig:
    """The default of eos_token_id and pad_token_id: what the model's config says. None means that there is none."""

    def __repr__(self) -> str:
        return "<the config's>"


OF_THE_CONFIG: Any = _OfTheConfig()
OVERFLOWS = ("refuse", "slide")
DEFAULTS: dict[str, Any] = {  # of the settings whose default is not None
    "do_sample": False, "temperature": 1.0, "eos_token_id": OF_THE_CONFIG, "pad_token_id": OF_THE_CONFIG,
    "num_return_sequences": 1, "use_cache": True, "overflow": "refuse", "slide_stride": 1, "output_scores": False,
    "output_logprobs": False,
}  # fmt: skip


class GenerationSettings:
    """Valid settings of generation: ``Settings`` with the defaults filled in.

    Raises:
        GenerationError: if a setting is unknown or out of range, settings contradict each other, or max_new_tokens is
            missing; one error names all of it.
    """

    max_new_tokens: int
    do_sample: bool
    temperature: float
    seed: int | None
    min_new_tokens: int | None
    logit_bias: Mapping[int, float] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    stop: str | Sequence[str] | None
    num_return_sequences: int
    use_cache: bool
    prompt_lookup_num_tokens: int | None
    overflow: str
    slide_stride: int
    output_scores: bool
    output_logprobs: bool

    def __init__(self, **settings: Unpack[Settings]) -> None:
        if complaints := complaints_about(settings):
            raise GenerationError("; ".join(complaints.values()))
        vars(self).update(_filled_in(settings))

    def replace(self, **changes: Any) -> "GenerationSettings":
        """Return settings with these values changed."""
        return GenerationSettings(**{**vars(self), **changes})

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random."""
        return self.do_sample and self.temperature > 0

    @property
    def depends_on_row(self) -> bool:
        """True if a row's logits depend on what the row has written."""
        return any(known.looks_back and self.active(name) is not None for name, known in PROCESSORS.items())

    @property
    def depends_on_tokens(self) -> bool:
        """True if it matters which tokens a row has written, and not only how many."""
        look = any(known.looks_back == "tokens" and self.active(name) is not None for name, known in PROCESSORS.items())
        return look or any(len(run) > 1 for run in self.bad_words_ids or ())

    @property
    def choice(self) -> str:
        """What decides how tokens are chosen. Rows of equal ``choice`` are served together."""
        shaping = {name: self.active(name) for name in PROCESSORS}
        return f"{self.samples} {self.output_scores} {self.output_logprobs} {shaping}"

    def active(self, name: str) -> Any:
        """Return the value of a processor's setting, or None if it changes no logits."""
        value, known = getattr(self, name), PROCESSORS[name]
        idle = value is None or value in known.neutral or (known.shapes_draw and not self.samples)
        return None if idle else value

    @property
    def draft_tokens(self) -> int:
        return self.prompt_lookup_num_tokens or 0

    def end_ids(self, config: GPT2Config) -> tuple[int, ...]:
        """Return every id that ends a row."""
        return config.eos_token_ids if self.eos_token_id is OF_THE_CONFIG else self.given_end_ids

    @property
    def given_end_ids(self) -> tuple[int, ...]:
        """The ids that end a row according to the settings alone."""
        ends = self.eos_token_id
        if ends is None or ends is OF_THE_CONFIG:
            return ()
        return tuple(ends) if isinstance(ends, Sequence) else (ends,)

    def fill_id(self, config: GPT2Config) -> int:
        """Return the id that fills a row after its end."""
        given = config.pad_token_id if self.pad_token_id is OF_THE_CONFIG else self.pad_token_id
        return given if given is not None else next(iter(self.end_ids(config)), 0)

    def require_known_ids(self, vocab_size: int) -> None:
        """Check that the ids to exclude are in the vocabulary.

        Raises:
            GenerationError: if some are not; the message names all of them.
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
    """Return the names of all settings."""
    return list(dict.fromkeys((*RANGES, *PROCESSORS, "stop", "stop_strings")))


def parse_settings(**settings: Any) -> GenerationSettings:
    """Return settings given by names that no type checker has seen.

    Raises:
        GenerationError: as ``GenerationSettings``.
    """
    return GenerationSettings(**settings)


# What each setting must be that is not a processor's.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (at_least(1), "be 1 or more"),
    "do_sample": (is_flag, "be True or False"),
    "seed": (lambda seed: is_int(seed) and 0 <= seed < 2**63, "be within [0, 2^63)"),
    "eos_token_id": (
        lambda end: end is OF_THE_CONFIG or is_int(end) or (isinstance(end, Sequence) and all(map(is_int, end))),
        "be an id or a list of ids",
    ),
    "pad_token_id": (
        lambda pad: pad is OF_THE_CONFIG or (is_int(pad) and -(2**31) <= pad < 2**31),
        "be an id, or another number of 32 bits",
    ),
    "num_return_sequences": (at_least(1), "be 1 or more"),
    "use_cache": (is_flag, "be True or False"),
    "prompt_lookup_num_tokens": (at_least(0), "be 0 or more"),
    "overflow": (lambda how: isinstance(how, str) and how in OVERFLOWS, f"be one of {', '.join(OVERFLOWS)}"),
    "slide_stride": (at_least(1), "be 1 or more"),
    "output_scores": (is_flag, "be True or False"),
    "output_logprobs": (is_flag, "be True or False"),
}
NEVER_NONE = {"max_new_tokens", *DEFAULTS} - {"eos_token_id", "pad_token_id"}


def complaints_about(settings: Settings | dict[str, Any]) -> dict[tuple[str, ...], str]:
    """Return what is wrong with settings, as sentences by the names of the settings concerned."""
    given, known = dict(settings), known_settings()
    found: dict[tuple[str, ...], str] = {}
    if unknown := sorted(given.keys() - set(known)):
        found[tuple(unknown)] = _unknown(unknown, known)
    if "max_new_tokens" not in given:
        found["max_new_tokens",] = "max_new_tokens must be given"
    is_complete = not found
    ranges = RANGES | {name: (processor.accepts, processor.requirement) for name, processor in PROCESSORS.items()}
    wrong = {
        name: f"{name} must {requirement}, not {given[name]!r:.200}"
        for name, (fits, requirement) in ranges.items()
        if name in given and (given[name] is not None or name in NEVER_NONE) and not fits(given[name])
    }
    wrong |= {name: said for name in ("stop", "stop_strings") if (said := _wrong_stop(name, given.get(name)))}
    found |= {(name,): said for name, said in wrong.items()}
    if given.get("stop") is not None and given.get("stop_strings") is not None:
        found["stop", "stop_strings"] = "stop and stop_strings are the same setting; give one of them"
    if is_complete:
        found |= _contradictions(_filled_in({name: None if name in wrong else given[name] for name in given}))
    return found


def more_than_one_text(settings: Settings | dict[str, Any]) -> dict[tuple[str, ...], str]:
    """Return which settings ask for more than one text, as ``complaints_about`` does."""
    found: dict[tuple[str, ...], str] = {}
    if settings.get("num_return_sequences", 1) > 1:
        found["num_return_sequences",] = "a stream is one text; num_return_sequences must be 1"
    if kept := tuple(name for name in ("output_scores", "output_logprobs") if settings.get(name)):
        found[kept] = f"a stream returns only text; {' and '.join(kept)} must be False"
    return found


def _filled_in(given: Any) -> dict[str, Any]:
    settings = dict.fromkeys(known_settings()) | DEFAULTS | dict(given)
    stop_strings = settings.pop("stop_strings")
    return settings | ({} if stop_strings is None else {"stop": stop_strings})


def _unknown(names: list[str], known: list[str]) -> str:
    meant = [near[0] for name in names if (near := difflib.get_close_matches(name, known, n=1, cutoff=0.75))]
    hint = f"did you mean {', '.join(meant)}?" if meant else f"known are {', '.join(known)}"
    return f"unknown generation settings: {', '.join(names)}; {hint}"


def _wrong_stop(name: str, stops: Any) -> str | None:
    texts = [stops] if isinstance(stops, str) else [] if stops is None else stops
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        return f"{name} must be a text or a list of texts, not {stops!r:.200}"
    if not all(texts):
        return f"{name} must not be an empty text"
    if wrong := [text for text in texts if any("\ud800" <= character <= "\udfff" for character in text)]:
        return f"{name} must be valid Unicode, or it would match no text, not {wrong[0]!r}"
    return None


def _contradictions(given: dict[str, Any]) -> dict[tuple[str, ...], str]:
    """Return the settings that contradict each other, as ``complaints_about`` does; None stands for a wrong value."""
    found: dict[tuple[str, ...], str] = {}
    new, least = given["max_new_tokens"], given["min_new_tokens"]
    if None not in (new, least) and least > new:
        found["min_new_tokens", "max_new_tokens"] = f"min_new_tokens {least} is more than max_new_tokens {new}"
    if given["do_sample"] is False or given["temperature"] == 0:
        found |= _without_a_draw(given)
    if given["prompt_lookup_num_tokens"] and given["use_cache"] is False:
        found["prompt_lookup_num_tokens", "use_cache"] = "prompt_lookup_num_tokens needs use_cache=True"
    if given["slide_stride"] not in (None, 1) and given["overflow"] == "refuse":
        found["slide_stride", "overflow"] = "slide_stride is for overflow='slide' only"
    return found


def _without_a_draw(given: dict[str, Any]) -> dict[tuple[str, ...], str]:
    """Return the settings that have no effect since no token is drawn at random."""
    found: dict[tuple[str, ...], str] = {}
    cause, where = ("temperature", "at temperature 0")
    if given["do_sample"] is False:
        cause, where = ("do_sample", "without do_sample")
    if (copies := given["num_return_sequences"]) not in (None, 1):
        said = f"num_return_sequences {copies} {where} would be the same text {copies} times"
        found["num_return_sequences", cause] = said
    idle = [
        name
        for name, processor in PROCESSORS.items()
        if processor.shapes_draw and given[name] is not None and given[name] not in processor.neutral
    ]
    idle += ["seed"] if given["seed"] is not None else []
    if idle:
        said = f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect {where}, since nothing is drawn"
        found[*idle, cause] = said
    return found
