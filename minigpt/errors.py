"""Errors about a user's input. Every message is one sentence: what is wrong, and what to do."""

import re
from collections.abc import Callable, Iterable

MOST_NAMES = 8  # in one message
RAISED = (Exception, SystemExit)  # that foreign code may raise; it must not end the program either


class MiniGPTError(ValueError):
    """Base of every error about input. The message is one line, with unprintable characters escaped.

    Args:
        message: what is wrong, and what to do.
        argument: the Python name of the argument that is wrong. The text of the error begins with it: write the message
            as the rest of the sentence, e.g. ``ConfigError("must be positive, got -1", argument="top_k")``.

    Attributes:
        argument: the same; None if the error is not about one argument.
        message: the message without the argument's name.
    """

    def __init__(self, message: str = "", *, argument: str | None = None) -> None:
        line = " ".join(message.splitlines())
        self.message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        self.argument = argument
        super().__init__(self.message if argument is None else f"{argument} {self.message}")

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the text with the argument as ``spell`` writes its name, e.g. as an option of the command line."""
        return self.message if self.argument is None else f"{spell(self.argument)} {self.message}"


class ConfigError(MiniGPTError):
    """A configuration, preset, dtype or device that cannot be used."""


class CheckpointError(MiniGPTError):
    """Weights or tokenizer files that are missing, damaged or from another model."""


class NormError(MiniGPTError):
    """A norm that is unknown, unavailable or does not fit, or a pattern that matches no site."""


class GenerationError(MiniGPTError):
    """Invalid tokens or settings of generation."""


def is_about_memory(error: BaseException) -> bool:
    """Return True if an error says that there is not enough memory. PyTorch has a class for a GPU's only."""
    return isinstance(error, MemoryError) or bool(re.search("out of memory|an(no)?'?t allocate memory", str(error)))


def listing(names: Iterable[str]) -> str:
    """Return names for a message: "a, b and 3 more"."""
    shown = (name[:96] for name in names)
    names = sorted(name if name.isprintable() else repr(name) for name in shown)  # a damaged file's may not be
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def kind_of(thing: object) -> str:
    """Return "transformers's GPT2Config" for a message: the bare name may be the same as ours."""
    return f"{type(thing).__module__.partition('.')[0]}'s {type(thing).__name__}"
