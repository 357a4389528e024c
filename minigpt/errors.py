"""What can be wrong with what a user gives us. Every message is one sentence: the thing, and the way out."""

from collections.abc import Iterable

MOST_NAMES = 8  # in one message
RAISED = (Exception, SystemExit)  # what somebody else's code may raise; whether the program ends is not its to say


class MiniGPTError(ValueError):
    """Base of every error this project raises about its input. The message is always one line, and all of it shows."""

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines())
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))


class ConfigError(MiniGPTError):
    """A configuration, preset, dtype or device that cannot be honoured."""


class CheckpointError(MiniGPTError):
    """Weights or tokenizer files that are absent, damaged or of another model."""


class NormError(MiniGPTError):
    """A norm that is unknown, unavailable or does not fit, or a pattern of sites that matches none."""


class GenerationError(MiniGPTError):
    """Tokens or settings that cannot be generated from."""


def is_several(given: object) -> bool:
    """Whether it can be gone through as a list can, and is no text."""
    try:
        iter(given)  # type: ignore[call-overload]
    except TypeError:
        return False
    return not isinstance(given, str | bytes)


def listing(names: Iterable[str]) -> str:
    """For a message: "a, b and 3 more"."""
    shown = (name[:96] for name in names)
    names = sorted(name if name.isprintable() else repr(name) for name in shown)  # a damaged file's may not be
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
