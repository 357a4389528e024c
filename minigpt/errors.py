"""Errors about a user's input. Every message is one sentence: what is wrong, and what to do."""

import difflib
import re
import sys
from collections.abc import Callable, Iterable

MOST_NAMES = 8  # in one message
# Words of other programs for ours.
OTHER_WORDS = {
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64",
    "layernorm": "fused", "layer_norm": "fused", "rmsnorm": "rms", "rms_norm": "rms",
}  # fmt: skip


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
        self.message = "".join(map(_printable, line))
        self.argument = argument
        super().__init__(self.spelled(str))

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the text with the argument as ``spell`` writes its name, e.g. as an option of the command line."""
        if self.argument is None:
            return self.message
        return f"{spell(self.argument)} {self.message}"


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


class ConfigError(MiniGPTError):
    """A configuration, preset, dtype or device that cannot be used."""


class CheckpointError(MiniGPTError):
    """Weights or tokenizer files that are missing, damaged or from another model."""


class NormError(MiniGPTError):
    """A norm that is unknown, unavailable or does not fit, or a pattern that matches no site."""


class GenerationError(MiniGPTError):
    """Invalid tokens or settings of generation."""


def raised() -> type[BaseException]:
    """Return what an ``except`` clause takes of foreign code: whatever it raises but an interrupt, which goes on.

    SystemExit, the panics of libraries in Rust and somebody's own classes are no Exceptions.
    """
    goes_on = isinstance(sys.exception(), KeyboardInterrupt | GeneratorExit)
    return Exception if goes_on else BaseException


def is_about_memory(error: BaseException) -> bool:
    """Return True if an error says that there is not enough memory. PyTorch has a class for a GPU's only."""
    if isinstance(error, MemoryError):
        return True
    return re.search("out of memory|an(no)?'?t allocate memory", str(error)) is not None


def to_install(extra: str) -> str:
    """Return the words of the shell that install an extra in a checkout."""
    return f"pip install -e '.[{extra}]'"


def listing(names: Iterable[str]) -> str:
    """Return names for a message: "a, b and 3 more"."""
    shown = []
    for name in names:
        name = name[:96]
        shown.append(name if name.isprintable() else repr(name))  # a damaged file's may not be
    shown.sort()
    text = ", ".join(shown[:MOST_NAMES])
    if len(shown) > MOST_NAMES:
        text += f" and {len(shown) - MOST_NAMES} more"
    return text


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that somebody may have meant by another one; None if there is none."""
    by_lower = {name.lower(): name for name in known}
    meant = OTHER_WORDS.get(word.lower(), word).lower()
    for match in difflib.get_close_matches(meant, by_lower, n=1, cutoff=cutoff):
        return by_lower[match]
    return None


def kind_of(thing: object) -> str:
    """Return "transformers's GPT2Config" for a message: the bare name may be the same as ours."""
    package, _, _ = type(thing).__module__.partition(".")
    return f"{package}'s {type(thing).__name__}"
