"""The settings of generation: one table, which the functions, the command line, the server and the docs read.

A setting is declared once, as a key of ``Options``: its type, what it does, what a value must be, its default, and who
may give it. The names and meanings are as in a Hugging Face generation config. What it does to logits is a function
of its name in ``processors``.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack, get_args, get_type_hints

from minigpt.choices import Rule, between, is_int, is_number
from minigpt.errors import GenerationError, listing, near

if TYPE_CHECKING:
    from minigpt.generation.processors import Process
    from minigpt.model import GPT2

PYTHON, SHELL, HTTP = "python", "shell", "http"
ONLY_PYTHON, NOT_SHELL, NOT_HTTP = (PYTHON,), (PYTHON, HTTP), (PYTHON, SHELL)
LARGEST = 1e30  # a number added to logits, which stay finite in float32


def is_list(value: Any, accepts: Callable[[Any], bool], least: int = 0, most: float = math.inf) -> bool:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if not (several and least <= len(value) <= most):
        return False
    return all(map(accepts, value))


def is_id(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**31


def is_end(value: Any) -> bool:
    if value is FROM_CONFIG:
        return True
    return is_int(value) and -(2**31) <= value < 2**31


def as_texts(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return value


# Rules, of values of a kind. Over HTTP some have limits, since one client must not hold up the others.


def integer(least: int, most: float = math.inf) -> Rule:
    span = f"be at least {least}" if most == math.inf else f"be within [{least}, {most}]"
    return Rule(lambda value: is_int(value) and least <= value <= most, span)


def one_of(*words: str | None) -> Rule:
    accepts = lambda value: (value is None or isinstance(value, str)) and value in words  # noqa: E731
    return Rule(accepts, f"be {' or '.join(map(str, words))}")


def at_most(entries: int, rule: Rule) -> Rule:
    """Return the rule of a list or map with a limit of its entries."""
    return Rule(
        lambda value: isinstance(value, Sized) and len(value) <= entries and rule.accepts(value),
        f"{rule.requirement}; at most {entries} of them",
    )


def strings(most: float = math.inf, longest: float = math.inf) -> Rule:
    limits = "" if most == math.inf else f", at most {most} of at most {longest} characters"
    accepts = lambda text: isinstance(text, str) and 0 < len(text) <= longest  # noqa: E731
    return Rule(lambda value: is_list(as_texts(value), accepts, 0, most), f"be texts, none of them empty{limits}")


def runs(longest: float = math.inf) -> Rule:
    limits = "" if longest == math.inf else f", each of at most {longest}"
    accepts = lambda run: is_list(run, is_id, 1, longest)  # noqa: E731
    return Rule(lambda value: is_list(value, accepts, 1), f"be a list of lists of ids, none of them empty{limits}")


def ends(most: float = math.inf) -> Rule:
    limits = "" if most == math.inf else f" at most {most}"
    return Rule(lambda value: is_end(value) or is_list(value, is_end, 0, most), f"be an id or a list of{limits} ids")


def biases(most: float) -> Rule:
    numbers = between(-most, most)
    accepts = lambda item: is_id(item[0]) and numbers.accepts(item[1])  # noqa: E731
    span = f"map ids to numbers within [{-most:g}, {most:g}]"
    return Rule(lambda value: isinstance(value, Mapping) and all(map(accepts, value.items())), span)


FROM_CONFIG: Any = "the checkpoint's"  # the default of eos_token_id and pad_token_id; None means no such id
FLAG = Rule(lambda value: isinstance(value, bool), "be True or False")
NUMBER = between(-LARGEST, LARGEST)
PROBABILITY = Rule(lambda value: is_number(value) and 0 < value <= 1, "be within (0, 1]")
HEAT = Rule(
    lambda value: is_number(value) and (value == 0 or 1e-30 <= value <= LARGEST), "be 0, or within [1e-30, 1e+30]"
)
IDS = Rule(lambda value: is_list(value, is_id), "be a list of ids")
PADDING = Rule(lambda value: value is FROM_CONFIG or is_id(value), "be an id")
SEED = Rule(lambda value: is_int(value) and -(2**63) <= value < 2**63, "be within [-2^63, 2^63)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        about: what it does, for help and docs.
        rule: what a value must be.
        default: its value if nobody gives one; None also means that the setting is off.
        users: who may give it: "python", "shell" and "http".
        http: what a value must be over HTTP, where that is less: one client must not hold up the others.
        neutral: values that change nothing.
        shapes_draw: it only changes how a token is drawn, so it has no effect if none is.
        looks_back: its processor depends on the row's text.
        type: the type of a value.
    """

    about: str
    rule: Rule
    default: Any = None
    _: dataclasses.KW_ONLY
    users: tuple[str, ...] = (PYTHON, SHELL, HTTP)
    http: Rule | None = None
    neutral: tuple[Any, ...] = ()
    shapes_draw: bool = False
    looks_back: bool = False
    type: Any = None

    def changes(self, value: Any) -> bool:
        """Return True if the value has an effect."""
        return value is not None and value not in self.neutral


# fmt: off
class Options(TypedDict, total=False):
    """The optional settings of ``generate``, ``stream`` and ``complete``, by their names in Python."""

    do_sample: Annotated[bool, Setting(
        "Draw from the distribution; otherwise take the likeliest token (greedy).", FLAG, False, users=ONLY_PYTHON)]
    temperature: Annotated[float | None, Setting(
        "Divides the logits before drawing; 0 is greedy.", HEAT, http=between(0, 2), neutral=(0, 1), shapes_draw=True)]
    top_k: Annotated[int | None, Setting(
        "Draw only from the k likeliest tokens; 0 draws from all.", integer(0), neutral=(0,), shapes_draw=True)]
    top_p: Annotated[float | None, Setting(
        "Draw only from the fewest tokens whose probabilities reach p.", PROBABILITY, neutral=(1,), shapes_draw=True)]
    min_p: Annotated[float | None, Setting(
        "Draw only from tokens at least p times as likely as the likeliest.",
        between(0, 1), neutral=(0,), shapes_draw=True)]
    seed: Annotated[int | None, Setting(
        "Makes the draw repeatable. Row i of a batch draws with seed + i, as it does alone.", SEED, shapes_draw=True)]
    min_new_tokens: Annotated[int | None, Setting(
        "Tokens to add before an eos_token_id is allowed.", integer(0), neutral=(0,), looks_back=True)]
    repetition_penalty: Annotated[float | None, Setting(
        "Divides positive logits, and multiplies negative ones, of tokens already in the text.",
        between(1e-3, 1e3), neutral=(1,), looks_back=True)]
    presence_penalty: Annotated[float | None, Setting(
        "Subtracted from the logit of every token that has been added.",
        NUMBER, http=between(-2, 2), neutral=(0,), looks_back=True)]
    frequency_penalty: Annotated[float | None, Setting(
        "Subtracted from a token's logit for each time that it has been added.",
        NUMBER, http=between(-2, 2), neutral=(0,), looks_back=True)]
    logit_bias: Annotated[Mapping[int, float] | None, Setting(
        "Numbers to add to the logits of ids.", biases(LARGEST), http=at_most(1024, biases(100)), users=NOT_SHELL,
        neutral=({},))]
    no_repeat_ngram_size: Annotated[int | None, Setting(
        "No sequence of this many tokens appears twice in prompt and text; 0 allows all.",
        integer(0), http=integer(0, 16), neutral=(0,), looks_back=True)]
    bad_words_ids: Annotated[Sequence[Sequence[int]] | None, Setting(
        "Sequences of ids that never appear; a sequence that is only an eos_token_id is allowed.",
        runs(), http=at_most(1024, runs(16)), users=NOT_SHELL, looks_back=True)]
    suppress_tokens: Annotated[Sequence[int] | None, Setting(
        "Ids that are never chosen.", IDS, http=at_most(1024, IDS), users=NOT_SHELL, neutral=([], ()))]
    eos_token_id: Annotated[int | Sequence[int] | None, Setting(
        "Id or ids that end a row; by default generation_config.json's or the config's; None ends no row.",
        ends(), FROM_CONFIG, http=ends(64), users=NOT_SHELL)]
    pad_token_id: Annotated[int | None, Setting(
        "Fills the rows that have ended; by default the checkpoint's if the vocabulary has it, else an eos_token_id.",
        PADDING, FROM_CONFIG, users=ONLY_PYTHON)]
    stop: Annotated[str | Sequence[str] | None, Setting(
        "Text or texts that end a row when they appear in what it has added.", strings(), http=strings(16, 256))]
    num_return_sequences: Annotated[int, Setting(
        "Texts for each prompt, which is read once for all of them.", integer(1, 65536), 1, users=NOT_HTTP)]
    draft: Annotated[Literal["auto", "int8"] | None, Setting(
        "int8: draft tokens with the model rounded to eight bits, and verify them in one step: the same text, sooner. "
        "It takes memory for the rounded weights, needs the decoding kernel, and works while there is a single text. "
        "auto: where that pays; None, in the shell none: never.",
        one_of("auto", "int8", None), "auto", users=NOT_HTTP)]
    overflow: Annotated[Literal["refuse", "slide"], Setting(
        "For texts beyond the context: refuse; or slide, where a token sees the last tokens that fit, read again.",
        one_of("refuse", "slide"), "refuse")]


class TextSettings(Options):
    """The settings of functions that return text; max_new_tokens is required."""

    max_new_tokens: Annotated[int, Setting("Tokens to add at most.", integer(1), http=integer(0, 65536))]


class Settings(TextSettings, total=False):
    """All settings."""

    output_scores: Annotated[bool, Setting(
        "Return the processed logits of every step.", FLAG, False, users=ONLY_PYTHON)]
    output_logprobs: Annotated[bool, Setting(
        "Return each new token's log-probability where it was drawn.", FLAG, False, users=ONLY_PYTHON)]
# fmt: on


SETTINGS: dict[str, Setting] = {}  # the table
for _name, _hint in get_type_hints(Settings, include_extras=True).items():
    _type, _setting = get_args(_hint)
    SETTINGS[_name] = dataclasses.replace(_setting, type=_type)
_lines = [f"{Options.__doc__}\n\nKeys:"]
for _name in Options.__annotations__:
    _setting = SETTINGS[_name]
    _lines.append(f"    {_name}: {_setting.about} It must {_setting.rule.requirement}.")
Options.__doc__ = "\n".join(_lines)  # for help()


def check_settings(settings: Mapping[str, Any], user: str = PYTHON) -> dict[str, Any]:
    """Return all settings, with the defaults: their names are checked, then each value, then whether they contradict.

    Args:
        user: "python", "shell" or "http".

    Raises:
        GenerationError: about the first that is wrong; ``argument`` is its name.
    """
    known = [name for name, setting in SETTINGS.items() if user in setting.users]
    for name in settings:
        if name not in known:
            hint = f"known are {', '.join(known)}"
            if meant := near(name, known, 0.75):
                hint = f"did you mean {meant}?"
            raise GenerationError(f"is not a setting of generation; {hint}", argument=listing([name]))
    values = {name: settings.get(name, setting.default) for name, setting in SETTINGS.items()}
    for name, value in values.items():
        check_value(name, value, user)
    new, least = values["max_new_tokens"], values["min_new_tokens"] or 0
    if new is None:
        raise GenerationError("must be given", argument="max_new_tokens")
    if least > new:
        raise GenerationError(f"must be at most the {new} new tokens, got {least}", argument="min_new_tokens")
    if values["do_sample"] and values["temperature"] != 0:
        return values
    cause = "at temperature 0" if values["do_sample"] else "without do_sample"
    if values["num_return_sequences"] > 1:
        same = f"must be 1 {cause}, since all texts would be the same"
        raise GenerationError(same, argument="num_return_sequences")
    for name, setting in SETTINGS.items():
        if setting.shapes_draw and setting.changes(values[name]):
            raise GenerationError(f"has no effect {cause}, since nothing is drawn", argument=name)
    return values


def check_value(name: str, value: Any, user: str = PYTHON) -> None:
    """Check the value of a known setting by itself.

    Raises:
        GenerationError: if it is wrong; ``argument`` is the name.
    """
    setting = SETTINGS[name]
    rule = setting.rule
    if user == HTTP and setting.http is not None:
        rule = setting.http
    is_off = value is None and setting.default in (None, FROM_CONFIG)
    if not (is_off or rule.accepts(value)):
        raise GenerationError(f"must {rule.requirement}, got {value!r:.200}", argument=name)


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class GenerationSettings:
    """Valid settings of generation: all of ``Settings`` with the defaults filled in, as attributes.

    The fields below are those that generation asks for by name. A processor gets its setting by the table.

    Raises:
        GenerationError: if a setting is unknown or out of range, if settings contradict each other, or if
            max_new_tokens is missing; ``argument`` is the name of the setting.
    """

    max_new_tokens: int
    do_sample: bool
    temperature: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    eos_token_id: Any  # a tuple of ids, or ``FROM_CONFIG``
    pad_token_id: Any  # an id, None or ``FROM_CONFIG``
    stop: tuple[str, ...]
    num_return_sequences: int
    draft: str | None
    overflow: str
    output_scores: bool
    output_logprobs: bool

    def __init__(self, **settings: Unpack[Settings]) -> None:
        values = check_settings(settings)
        values["stop"] = tuple(as_texts(values["stop"] or ()))
        if values["eos_token_id"] is not FROM_CONFIG:
            values["eos_token_id"] = ids_in(values["eos_token_id"])
        vars(self).update(values)  # of a frozen class, once

    def as_dict(self) -> dict[str, Any]:
        """Return all settings by their names."""
        return {name: getattr(self, name) for name in SETTINGS}

    def replace(self, **changes: Any) -> "GenerationSettings":
        """Return settings with these values changed."""
        return parse_settings(**self.as_dict() | changes)

    def with_new_tokens(self, count: int) -> "GenerationSettings":
        """Return these settings for another number of new tokens; 0 reads the prompt alone, as a server may."""
        changed = copy.copy(self)
        vars(changed)["max_new_tokens"] = count
        return changed

    def require_one_text(self) -> None:
        """Raise GenerationError if more than one text is wanted where a single one is returned."""
        if self.num_return_sequences > 1:
            raise GenerationError("must be 1, since a single text is returned", argument="num_return_sequences")

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random."""
        return self.do_sample and self.temperature != 0

    @cached_property
    def active(self) -> dict[str, Any]:
        """The settings that change logits, in the order of their processors."""
        from minigpt.generation.processors import PROCESSORS  # not before: help must not wait for PyTorch

        active = {}
        for name in PROCESSORS:
            setting = SETTINGS[name]
            has_effect = self.samples or not setting.shapes_draw
            value = getattr(self, name)
            if has_effect and setting.changes(value):
                active[name] = value
        return active

    @cached_property
    def processes(self) -> "list[Process]":
        """The processors of the active settings."""
        from minigpt.generation.processors import PROCESSORS

        return [PROCESSORS[name](value) for name, value in self.active.items()]

    @property
    def looks_back(self) -> bool:
        """True if a row's logits depend on the text of the row."""
        return any(SETTINGS[name].looks_back for name in self.active)

    @property
    def changes_logits(self) -> bool:
        """True if logits change before a draw is shaped, so that every token may be excluded."""
        return not all(SETTINGS[name].shapes_draw for name in self.active)

    @cached_property
    def choice(self) -> str:
        """A key of everything that decides how tokens are chosen. Rows with equal keys are processed together."""
        return f"{self.samples} {self.output_scores} {self.output_logprobs} {self.active}"

    def end_ids(self, model: "GPT2") -> tuple[int, ...]:
        """Return every id that ends a row.

        Raises:
            GenerationError: if the model's generation_config.json names something else.
        """
        if self.eos_token_id is not FROM_CONFIG:
            return self.eos_token_id
        return ids_in(_of_checkpoint(model, "eos_token_id"))

    def fill_id(self, model: "GPT2") -> int:
        """Return the id that fills a row after its end. Raises as ``end_ids``."""
        if self.pad_token_id not in (FROM_CONFIG, None):
            return self.pad_token_id
        ids = list[int | None](self.end_ids(model))
        if self.pad_token_id is FROM_CONFIG:
            ids.insert(0, _of_checkpoint(model, "pad_token_id"))
        for id in ids:
            if id is not None and 0 <= id < model.config.vocab_size:  # some write -1 for none
                return id
        return 0

    def require_known_ids(self, vocab_size: int) -> None:
        """Check that the ids in the settings are in the vocabulary.

        Raises:
            GenerationError: if some are not; the message has the largest of them.
        """
        words = itertools.chain.from_iterable(self.bad_words_ids or ())
        named = {"bad_words_ids": words, "suppress_tokens": self.suppress_tokens, "logit_bias": self.logit_bias}
        for name, ids in named.items():
            largest = max(ids or (), default=0)
            if largest >= vocab_size:
                raise GenerationError(
                    f"must hold ids below the vocabulary's {vocab_size}, got {largest}", argument=name
                )


def ids_in(value: Any) -> tuple[int, ...]:
    """Return the ids of an eos_token_id: an id, several, or None."""
    return (value,) if is_int(value) else tuple(value or ())


def _of_checkpoint(model: "GPT2", name: str) -> Any:
    """Return the id or ids of this name in a model's generation_config.json, or in its config without that file.

    Raises:
        GenerationError: if the file has something else there.
    """
    if model.generation_fields is None:
        return getattr(model.config, name)
    value: Any = model.generation_fields.get(name)
    if name == "pad_token_id" and is_int(value) and value < 0:  # some write -1 for none
        return None
    try:
        check_value(name, value)
    except GenerationError as error:
        raise GenerationError(f"{error}; it is from the model's generation_config.json") from error
    return value


parse_settings: Any = GenerationSettings  # for names that no type checker has seen
