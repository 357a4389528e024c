"""Numbers as a person reads them. Each is a ``<data>`` element with its exact value and its place in the report."""

import math
from collections.abc import Callable, Iterable

from minigpt.lab.page.markup import Html, element
from minigpt.lab.reading import Reading


def brief(x: float, digits: int = 3) -> str:
    """``digits`` significant digits: 0, 0.0123, 12.0, 12,345, 1.23e-7."""
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else "not finite"
    if 1e-3 <= abs(x) < 1e6:
        return f"{x:,.0f}" if abs(x) >= 10**digits - 0.5 else f"{x:#.{digits}g}".rstrip(".")
    mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def coarse(x: float) -> str:
    """Two significant digits, for a narrow cell."""
    return brief(x, 2)


def precise(x: float) -> str:
    """Six significant digits, for two that lie close together."""
    return brief(x, 6)


def times(x: float) -> str:
    """A ratio: 0.94x."""
    return f"{brief(x)}\u00d7"


def percent(x: float) -> str:
    """A share, which reads 100% only where it is exactly that."""
    digits = 3
    while x != 1 and digits < 15 and float(f"{100 * x:.{digits}g}") == 100:
        digits += 1
    return f"{brief(100 * x, digits)}%"


def count(x: float) -> str:
    """A whole number: 1,234."""
    return f"{x:,.0f}"


def plain(x: float) -> str:
    """A whole number that names something: 1234."""
    return f"{x:.0f}"


def figure(reading: Reading, written: Callable[[float], str] = brief) -> Html:
    """One number of a report; where it has none, that it is not finite, which is what JSON's null stands for."""
    x = reading.number
    if x is None:
        return element("span", "not finite", class_="undefined")
    whose = reading.label or None
    return element("data", written(x), value=repr(reading.value), data_field=reading.path, data_report=whose)


class LogScale:
    """Places positive numbers between 0 and 1 by their logarithm; zero is at 0, what is not finite at 1."""

    def __init__(self, numbers: Iterable[float | None]) -> None:
        positive = [x for x in numbers if x is not None and x > 0]
        self.low, self.high = min(positive, default=1.0), max(positive, default=1.0)

    def place(self, x: float | None) -> float:
        if x is None:
            return 1.0
        if x <= 0:
            return 0.0
        if self.high == self.low:
            return 1.0
        return math.log(x / self.low) / math.log(self.high / self.low)

    @property
    def decades(self) -> "LogScale":
        """The same, widened to whole powers of ten."""
        low, high = max(-300, math.floor(math.log10(self.low))), math.ceil(math.log10(self.high))
        return LogScale((10.0**low, 10.0 ** max(high, low + 1)))
