"""Numbers as text: one format for messages, the terminal and the pages."""

import math
from collections.abc import Callable
from typing import TypeGuard

Form = Callable[[float | None], str]  # formats a number


def is_finite(x: float | None) -> TypeGuard[float]:
    """Return True for a finite number; None means one that is not."""
    return x is not None and math.isfinite(x)


def brief(x: float | None, digits: int = 3) -> str:
    """Format with ``digits`` significant digits: 0, 0.0123, 12.0, 12,345, 1.23e-7; None means not finite."""
    if not is_finite(x):
        return "not finite"
    if x == 0:
        return "0"
    if 1e-3 <= abs(x) < 1e6:
        if abs(x) >= 10**digits - 0.5:
            return f"{x:,.0f}"
        return f"{x:#.{digits}g}".rstrip(".")
    mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def precise(x: float | None) -> str:
    """Format with six significant digits, for two close numbers."""
    return brief(x, 6)


def times(x: float | None) -> str:
    """Format a ratio: 0.940 and a multiplication sign."""
    return brief(x) + "\u00d7" * is_finite(x)


def percent(x: float | None) -> str:
    """Format a share. It reads 100% only if it is exactly 1."""
    if not is_finite(x):
        return brief(x)
    digits = 3
    while x != 1 and digits < 15 and float(f"{100 * x:.{digits}g}") == 100:
        digits += 1
    return f"{brief(100 * x, digits)}%"


def change(before: float | None, after: float | None) -> str:
    """Format a relative change: none, +3.20%, or 97,933 times from tenfold on."""
    if before == after and before is not None:
        return "none"
    if not before or after is None or not math.isfinite(after / before):
        return brief(None)
    ratio = after / before
    if ratio >= 10:
        return times(ratio)
    sign = "+" if ratio > 1 else "\u2212"
    return sign + percent(abs(ratio - 1))


def uncertain(x: float | None, error: float | None, form: Callable[[float | None], str] = brief) -> str:
    """Format a number with its standard error, to the digits that the error supports: 0.0124 ± 0.0003."""
    if not is_finite(x) or not is_finite(error) or error == 0:
        return form(x)
    if form is percent:
        return uncertain(100 * x, 100 * error) + " %"
    first = math.floor(math.log10(error))
    if abs(x) < 1e-3 or abs(x) >= 1e6:
        power = math.floor(math.log10(max(abs(x), error)))
        digits, unit = max(0, power - first), 10.0**power or 5e-324
        return f"({x / unit:z.{digits}f} ± {error / unit:.{digits}f})e{power}"
    digits = max(0, -first)
    return f"{x:z,.{digits}f} ± {error:,.{digits}f}"


def format_limit(quantity: str, x: float | None) -> str:
    """Format a figure of a budget: shares as percent, the others as numbers."""
    return percent(x) if quantity in ("perplexity", "top1", "top5") else brief(x)


def count(x: float | None) -> str:
    """Format a whole number: 1,234."""
    return f"{x:,.0f}" if is_finite(x) else brief(x)


def digits(x: float | None) -> str:
    """Format a number that names something, like a token's id: 1234."""
    return f"{x:.0f}" if is_finite(x) else brief(x)
