"""Numbers on the page: each is a ``<data>`` element with its exact value and its place in the report."""

import math
from collections.abc import Callable, Iterable

from minigpt.report.numerals import brief
from minigpt.report.page.markup import Html, element
from minigpt.report.reading import Reading


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
