"""Settings of generation, in the names and with the meanings of a Hugging Face generation config.

``Options`` and its kinds are the keyword arguments of the public functions, for type checkers. ``GenerationSettings``
holds their values at run time and checks them. The settings that change logits live in ``processors``.
"""

import difflib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypedDict, Unpack

from minigpt.config import GPT2Config
from minigpt.errors import GenerationError
from minigpt.generation.processors import PROCESSORS
from minigpt.generation.values import FLAG, Rule, at_least, is_int


class Options(TypedDict, total=False):
    """The optional settings.

    Keys:
        do_sample: draw from the distribution; otherwise take the likeliest token (greedy).
        temperature: divides the logits before drawing; 0 is greedy.
        top_k: draw only from the k likeliest tokens.
        top_p: draw only from the smallest set of tokens whose probabilities reach p, within (0, 1].
        min_p: draw only from tokens at least min_p times as likely as the likeliest, within [0, 1].
        seed: makes the draw repeatable. Row i of a batch uses seed + i, so a row draws the same alone and in a batch.
        min_new_tokens: tokens to add before an eos_token_id is allowed.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens already in the text.
        presence_penalty: subtracted from the logit of every token that has been added.
        frequency_penalty: subtracted from a token's logit for each time that it has been added.
        logit_bias: numbers to add to the logits of ids.
        no_repeat_ngram_size: no sequence of this many tokens appears twice in prompt and text; 0 allows all.
        bad_words_ids: sequences of ids that never appear; a sequence that is only an eos_token_id is allowed.
        suppress_tokens: ids that are never chosen.
        eos_token_id: id or ids that end a row; by default the config's; None ends no row.
        pad_token_id: fills the rows that have ended; by default the config's, else the first eos_token_id.
        stop: text or texts that end a row when they appear in what it has added.
        stop_strings: transformers' name for ``stop``; give only one of them.
        num_return_sequences: texts for each prompt, which is read once for all of them.
        use_cache: keep keys and values; without a cache the model reads the whole text again for each token.
        prompt_lookup_num_tokens: tokens to copy from the text so far as a draft, verified in one step; 0 for none.
        draft: "int8" lets the model's own form in eight bits draft tokens, which the model verifies in one step. The
            text is the same and comes sooner; it takes memory for the rounded weights. Drafts are made while a single
            text is in progress. It needs the decoding kernel; None drafts nothing.
        overflow: what happens when the text exceeds the context: "refuse" raises an error, "slide" lets each token
            see the last tokens that fit. The model reads them again, since their positions change.
        slide_stride: tokens that a sliding window drops at a time; more is faster, and sees less.
    """

    do_sample: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
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
    draft: Literal["int8"] | None
    overflow: str
    slide_stride: int


class TextSettings(Options):
    """The settings of functions that return text: max_new_tokens, 1 or more, is required."""

    max_new_tokens: int


class Settings(TextSettings, total=False):
    """All settings.

    Keys:
        output_scores: return the processed logits of every step.
        output_logprobs: return each new token's log-probability in the distribution it was drawn from.
    """

    output_scores: bool
    output_logprobs: bool


FROM_CONFIG: Any = "the config's"  # the default of eos_token_id and pad_token_id; None means no such id


class GenerationSettings(SimpleNamespace):
    """Valid settings of generation: ``Settings`` with the defaults filled in, as attributes.

    ``stop`` is a tuple of texts, and ``eos_token_id`` one of ids or ``FROM_CONFIG``.

    Raises:
        GenerationError: if a setting is unknown or out of range, if settings contradict each other, or if
            max_new_tokens is missing. One error names every setting with the same kind of mistake.
    """

    def __init__(self, **settings: Unpack[Settings]) -> None:
        if complaints := complaints_about(settings):
            raise GenerationError("; ".join(complaints.values()))
        super().__init__(**_with_defaults(settings))

    def replace(self, **changes: Any) -> "GenerationSettings":
        """Return settings with these values changed."""
        return GenerationSettings(**{**vars(self), **changes})

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random."""
        return self.do_sample and self.temperature != 0

    @property
    def active(self) -> dict[str, Any]:
        """The settings that change logits, in the order of their processors."""
        asked = {name: (getattr(self, name), known) for name, known in PROCESSORS.items()}
        return {
            name: value
            for name, (value, known) in asked.items()
            if value is not None and value not in known.neutral and (self.samples or not known.shapes_draw)
        }

    @property
    def depends_on_row(self) -> bool:
        """True if a row's logits depend on the text of the row."""
        return any(PROCESSORS[name].looks_back for name in self.active)

    @property
    def changes_logits(self) -> bool:
        """True if logits change before a draw is shaped, so that every token may be excluded."""
        return not all(PROCESSORS[name].shapes_draw for name in self.active)

    @property
    def choice(self) -> str:
        """A key of everything that decides how tokens are chosen. Rows with equal keys are processed together."""
        return f"{self.samples} {self.output_scores} {self.output_logprobs} {self.active}"

    @property
    def drafts(self) -> bool:
        """True if tokens are guessed and verified."""
        return bool(self.prompt_lookup_num_tokens or self.draft)

    def end_ids(self, config: GPT2Config) -> tuple[int, ...]:
        """Return every id that ends a row."""
        return config.eos_token_ids if self.eos_token_id is FROM_CONFIG else self.eos_token_id

    def fill_id(self, config: GPT2Config) -> int:
        """Return the id that fills a row after its end."""
        given = config.pad_token_id if self.pad_token_id is FROM_CONFIG else self.pad_token_id
        return given if given is not None else next(iter(self.end_ids(config)), 0)

    def require_known_ids(self, vocab_size: int) -> None:
        """Check that the ids in the settings are in the vocabulary.

        Raises:
            GenerationError: if some are not; the message names them.
        """
        named = {
            "bad_words_ids": [i for run in self.bad_words_ids or () for i in run],
            "suppress_tokens": self.suppress_tokens or (),
            "logit_bias": self.logit_bias or (),
        }
        for name, ids in named.items():
            if wrong := sorted({i for i in ids if i >= vocab_size}):
                said = ", ".join(map(str, wrong))
                raise GenerationError(f"{name} holds {said}, outside the vocabulary of {vocab_size}")


parse_settings: Any = GenerationSettings  # for names that no type checker has seen


def known_settings() -> list[str]:
    """Return the names of all settings."""
    return list(SETTINGS | PROCESSORS)


def _is_id_or_ids(value: Any) -> bool:
    return value is FROM_CONFIG or is_int(value) or (isinstance(value, Sequence) and all(map(is_int, value)))


def _is_text_or_texts(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, Sequence) and all(isinstance(text, str) and text for text in texts)


TEXTS = Rule(_is_text_or_texts, "be a text or a list of texts, none of them empty")
SETTINGS: dict[str, tuple[Rule, Any]] = {  # of those that are not a processor's, what they must be and the default
    "max_new_tokens": (at_least(1), None),
    "do_sample": (FLAG, False),
    "seed": (Rule(lambda seed: is_int(seed) and 0 <= seed < 2**63, "be within [0, 2^63)"), None),
    "eos_token_id": (Rule(_is_id_or_ids, "be an id or a list of ids"), FROM_CONFIG),
    "pad_token_id": (Rule(lambda pad: pad is FROM_CONFIG or is_int(pad), "be an id"), FROM_CONFIG),
    "num_return_sequences": (at_least(1), 1),
    "use_cache": (FLAG, True),
    "prompt_lookup_num_tokens": (at_least(0), None),
    "draft": (Rule(lambda how: how == "int8", 'be None or "int8"'), None),
    "overflow": (Rule(lambda how: how in ("refuse", "slide"), "be one of refuse, slide"), "refuse"),
    "slide_stride": (at_least(1), 1),
    "output_scores": (FLAG, False),
    "output_logprobs": (FLAG, False),
    "stop": (TEXTS, None),
    "stop_strings": (TEXTS, None),
}

ONE_TEXT = "a stream is one text; num_return_sequences must be 1"

Complaints = dict[tuple[str, ...], str]  # sentences by the names of the settings that they are about


def complaints_about(settings: Settings | dict[str, Any], one_text: bool = False) -> Complaints:
    """Return what is wrong with settings: unknown names; if there are none, wrong values; else contradictions."""
    given: dict[str, Any] = dict(settings)
    if unknown := sorted(given.keys() - set(known_settings())):
        return {tuple(unknown): _unknown(unknown)}
    if given.get("max_new_tokens") is None:
        return {("max_new_tokens",): "max_new_tokens must be given"}
    if wrong := _wrong_values(given):
        return wrong
    several = {("num_return_sequences",): ONE_TEXT} if one_text and given.get("num_return_sequences", 1) > 1 else {}
    return _contradictions(given) or several


def _with_defaults(given: Any) -> dict[str, Any]:
    """Return all settings, ``stop`` and ``eos_token_id`` as tuples."""
    defaults = {name: default for name, (_, default) in SETTINGS.items()}
    settings = dict.fromkeys(PROCESSORS) | defaults | dict(given)
    texts, ends = settings.pop("stop_strings") or settings["stop"] or (), settings["eos_token_id"]
    settings["stop"] = (texts,) if isinstance(texts, str) else tuple(texts)
    if ends is not FROM_CONFIG:
        settings["eos_token_id"] = (ends,) if is_int(ends) else tuple(ends or ())
    return settings


def _unknown(names: list[str]) -> str:
    known = known_settings()
    meant = [near[0] for name in names if (near := difflib.get_close_matches(name, known, n=1, cutoff=0.75))]
    hint = f"did you mean {', '.join(meant)}?" if meant else f"known are {', '.join(known)}"
    return f"unknown generation settings: {', '.join(names)}; {hint}"


def _wrong_values(given: dict[str, Any]) -> Complaints:
    table = SETTINGS | {name: (known.rule, None) for name, known in PROCESSORS.items()}
    judged = {name for name, value in given.items() if value is not None or table[name][1] not in (None, FROM_CONFIG)}
    return {
        (name,): f"{name} must {rule.requirement}, not {given[name]!r:.200}"
        for name, (rule, _) in table.items()
        if name in judged and not rule.accepts(given[name])
    }


def _contradictions(given: dict[str, Any]) -> Complaints:
    """Return the settings that contradict each other; each value by itself is valid."""
    chosen = _with_defaults(given)
    found: Complaints = {}
    new, least, copies = chosen["max_new_tokens"], chosen["min_new_tokens"] or 0, chosen["num_return_sequences"]
    if least > new:
        found["min_new_tokens", "max_new_tokens"] = f"min_new_tokens {least} is more than max_new_tokens {new}"
    if None not in (given.get("stop"), given.get("stop_strings")):
        found["stop", "stop_strings"] = "stop and stop_strings are the same setting; give one of them"
    for name in ("prompt_lookup_num_tokens", "draft"):
        if chosen[name] and not chosen["use_cache"]:
            found[name, "use_cache"] = f"{name} needs use_cache=True"
    if chosen["slide_stride"] != 1 and chosen["overflow"] == "refuse":
        found["slide_stride", "overflow"] = "slide_stride needs overflow slide"
    if chosen["do_sample"] and chosen["temperature"] != 0:
        return found
    cause, where = ("temperature", "at temperature 0") if chosen["do_sample"] else ("do_sample", "without do_sample")
    if copies > 1:
        said = f"num_return_sequences {copies} {where} would be the same text {copies} times"
        found["num_return_sequences", cause] = said
    neutral = {name: known.neutral for name, known in PROCESSORS.items() if known.shapes_draw} | {"seed": ()}
    if idle := [name for name in neutral if chosen[name] is not None and chosen[name] not in neutral[name]]:
        verb = "has" if len(idle) == 1 else "have"
        found[*idle, cause] = f"{', '.join(idle)} {verb} no effect {where}, since nothing is drawn"
    return found
