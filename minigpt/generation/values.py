"""Predicates on single values, for the ranges of settings."""

import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) <= sys.float_info.max


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: is_int(value) and value >= least


def between(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and least <= value <= most


def is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(at_least(0), value))
