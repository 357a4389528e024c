"""The values of options. It needs no PyTorch: a wrong word in the shell is an error at once."""

import numbers
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from minigpt.errors import ConfigError, NormError, near

DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64")
ATTENTIONS = ("sdpa", "eager")
ARITHMETICS = ("fast", "reference")
QUANTIZES = ("int8",)
GPT2_TYPE = "gpt2"  # the model_type of a plain GPT-2
MINIGPT_TYPE = "minigpt-gpt2"  # of one whose norms are not all LayerNorm, or that names its arithmetic
GPT2_TYPES = (GPT2_TYPE, MINIGPT_TYPE)
ENGINES = ("onnx", "gguf", "openvino", "ctranslate2")  # functions of minigpt.engines
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
AMOUNT_OF_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
KEEP = ("scale", "shift")  # what of an old norm may stay with a new one


class Rule(NamedTuple):
    """The requirement of a value.

    Attributes:
        accepts: returns True if a value other than None is valid.
        requirement: completes the message "top_k must ...".
    """

    accepts: Callable[[Any], bool]
    requirement: str


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def between(least: float, most: float) -> Rule:
    return Rule(lambda value: is_number(value) and least <= value <= most, f"be within [{least:g}, {most:g}]")


AMOUNT = Rule(between(0, sys.float_info.max).accepts, "be a float, 0 or more")


def check_option(name: str, value: object, known: Sequence[str]) -> None:
    """Check that a value is one of the known words.

    Raises:
        ConfigError: if it is not.
    """
    if value not in known:
        meant = near(str(value), known)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ConfigError(f"must be {' or '.join(known)}, got {value!r}{hint}", argument=name)


def check_quantize(quantize: str | None, arithmetic: str) -> None:
    """Check that weights of eight bits are not to give the reference's bits, which they cannot.

    Raises:
        ConfigError: if they are.
    """
    if quantize is not None and arithmetic == "reference":
        raise ConfigError('quantize="int8" needs arithmetic="fast": rounded weights cannot give the reference\'s bits')


def check_keep(keep: Collection[str]) -> None:
    """Check that ``keep`` is a collection with none, one or both of "scale" and "shift".

    Raises:
        NormError: if it is not.
    """
    if not isinstance(keep, Collection) or isinstance(keep, str | bytes):
        raise _bad_keep(repr(keep))
    if not set(keep) <= set(KEEP):
        raise _bad_keep(",".join(map(str, keep)))


def _bad_keep(shown: str) -> NormError:
    return NormError(f"must have none, one or both of scale and shift, got {shown:.100}", argument="keep")


def bytes_of(memory: str | int) -> int:
    """Return the bytes that a size names, as "8GB" or "500MiB". An int is a number of bytes.

    Raises:
        ConfigError: if it is no size, or a number in words has no unit.
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        return memory
    if str(memory).strip() == "0":
        return 0
    match = AMOUNT_OF_MEMORY.fullmatch(str(memory))
    if match is None or match[2].upper() not in UNITS:  # a bare 8 may be meant as 8 GB
        raise ConfigError(f"must be a size, as 8GB or 500MiB, got {memory!r}", argument="memory")
    return int(float(match[1]) * UNITS[match[2].upper()])


def human_size(size: float) -> str:
    """Return a number of bytes as "7.5 GB"."""
    unit = "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


def patterns_of(sites: str | Iterable[str]) -> list[str]:
    """Return one pattern of sites, or several, as a list.

    Raises:
        NormError: if there is none.
    """
    if isinstance(sites, str):
        return [sites]
    patterns = list(sites)
    if not patterns:
        raise NormError('sites is empty; give at least one pattern, e.g. "*" for all norm sites')
    return patterns


def words_of(text: str) -> list[str]:
    """Return the words between the commas of a text, without the spaces around them."""
    return [word.strip() for word in text.split(",")]
