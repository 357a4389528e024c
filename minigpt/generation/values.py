"""Rules for single values of settings: a test, and the rest of the sentence "top_k must ..."."""

import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What a value must be.

    Attributes:
        accepts: returns True if a value other than None is valid.
        requirement: completes the message "top_k must ...".
    """

    accepts: Callable[[Any], bool]
    requirement: str


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for a finite real number."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max  # type: ignore[operator]


def is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(is_int(id) and id >= 0 for id in value)


def at_least(least: int) -> Rule:
    return Rule(lambda value: is_int(value) and value >= least, f"be {least} or more")


def between(least: float, most: float) -> Rule:
    return Rule(lambda value: is_number(value) and least <= value <= most, f"be within [{least}, {most}]")


FLAG = Rule(lambda value: isinstance(value, bool), "be True or False")
NUMBER = Rule(is_number, "be a finite number")
IDS = Rule(is_ids, "be a list of ids")
