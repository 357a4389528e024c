"""The options --engine KIND=FILE and --engine-option NAME=VALUE: another program's file as a candidate."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minigpt.choices import ENGINES
from minigpt.errors import ConfigError

if TYPE_CHECKING:
    from minigpt.engines import Engine

TRUTH_VALUES = {"true": True, "false": False}


class EngineFile(NamedTuple):
    """An engine as the options give it: its kind, its file, and its options by their own names."""

    kind: str
    file: str
    options: dict[str, Any]

    def open(self) -> "Engine":
        """Return the engine.

        Raises:
            ConfigError, CheckpointError: if it cannot be opened so.
        """
        from minigpt import engines

        try:
            return getattr(engines, self.kind)(self.file, **self.options)
        except ConfigError as error:
            if error.argument not in self.options:
                raise
            raise ConfigError(f"{error.argument} {error.message}", argument="engine_option") from error


def parse_engine(engine: str, options: Sequence[str]) -> EngineFile:
    """Return what "onnx=model.onnx" and "intra_op_num_threads=1" say.

    Raises:
        ConfigError: if they are not of these forms, the kind is unknown, or an option is given twice.
    """
    kind, equals, file = engine.partition("=")
    if kind not in ENGINES or not equals or not file:
        kinds = ", ".join(f"{name}=PATH" for name in ENGINES)
        raise ConfigError(f"must be one of {kinds}, got {engine!r}", argument="engine")
    values: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals or name in values:
            raise ConfigError(f"must be NAME=VALUE, each name once, got {option!r}", argument="engine_option")
        values[name] = _value(value)
    return EngineFile(kind, file, values)


def _value(word: str) -> bool | int | float | str:
    """Return a truth value or a number if the word is one."""
    if word.lower() in TRUTH_VALUES:
        return TRUTH_VALUES[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
