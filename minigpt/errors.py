"""Errors about a user's input. Every message is one sentence: what is wrong, and what to do."""

from collections.abc import Iterable

MOST_NAMES = 8  # in one message
RAISED = (Exception, SystemExit)  # that foreign code may raise; it must not end the program either


class MiniGPTError(ValueError):
    """Base of every error about input. The message is one line, with unprintable characters escaped."""

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines())
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))


class ConfigError(MiniGPTError):
    """A configuration, preset, dtype or device that cannot be used."""


class CheckpointError(MiniGPTError):
    """Weights or tokenizer files that are missing, damaged or from another model."""


class NormError(MiniGPTError):
    """A norm that is unknown, unavailable or does not fit, or a pattern that matches no site."""


class GenerationError(MiniGPTError):
    """Invalid tokens or settings of generation."""


def is_several(given: object) -> bool:
    """Return True for an iterable that is not a string or bytes."""
    try:
        iter(given)  # type: ignore[call-overload]
    except TypeError:
        return False
    return not isinstance(given, str | bytes)


def listing(names: Iterable[str]) -> str:
    """Return names for a message: "a, b and 3 more"."""
    shown = (name[:96] for name in names)
    names = sorted(name if name.isprintable() else repr(name) for name in shown)  # a damaged file's may not be
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
