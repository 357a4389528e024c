"""A budget: how much a norm may change the model, as a gate in automated checks: ``kl=1e-6,perplexity=0.01%``."""

from collections.abc import Callable, Mapping
from functools import reduce

from minigpt.errors import ConfigError
from minigpt.judge.measures import nan_max
from minigpt.judge.parity_report import BudgetLine, ParityReport

QUANTITIES: dict[str, Callable[[ParityReport], float]] = {
    "kl": lambda report: report.distribution.kl_mean,
    "kl_max": lambda report: report.distribution.kl_max,
    "perplexity": lambda report: report.perplexity_change,
    "top1": lambda report: 1 - report.distribution.top1_agreement,
    "top5": lambda report: 1 - report.distribution.top5_agreement,
    "rms": lambda report: _worst(report, "rms_error"),
    "max": lambda report: _worst(report, "max_abs_error"),
    "ratio": lambda report: _worst(report, "ratio"),
}

SHARES = ("top1", "top5")  # of tokens that disagree; a limit of 99% would mean those that agree


def parse_budget(text: str) -> dict[str, float]:
    """Parse limits by quantity; 1% is 0.01.

    kl, kl_max: nats. perplexity: relative change, up or down. top1, top5: share of tokens that disagree, below a half.
    rms, max: error of the logits, on whole texts or as they are decoded, whichever is larger. ratio: the same RMS error
    over the noise floor.

    Raises:
        ConfigError: if it cannot be parsed; the message names the part and the known quantities.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in QUANTITIES or not equals:
            raise ConfigError(f"cannot read {part!r} in the budget; write name=limit, with {', '.join(QUANTITIES)}")
        if name in limits:
            raise ConfigError(f"cannot read {part!r} in the budget; {name} has a limit already")
        limits[name] = _limit(value, part)
        if name in SHARES and limits[name] >= 0.5:
            raise ConfigError(f"cannot read {part!r} in the budget; {name} limits the share that differs, to below 50%")
    return limits


def spend(report: ParityReport, limits: Mapping[str, float]) -> list[BudgetLine]:
    """Hold what was measured against each limit."""
    return [BudgetLine(name, limit, QUANTITIES[name](report)) for name, limit in limits.items()]


def _worst(report: ParityReport, figure: str) -> float:
    """A figure of the logits, on whole texts or as they are decoded, whichever is larger."""
    parts = [part for part in (report.logits, report.decoding) if part is not None]
    return reduce(nan_max, (getattr(part, figure) for part in parts))


def _limit(value: str, part: str) -> float:
    try:
        limit = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ConfigError(
            f"cannot read {part!r} in the budget; a limit must be a number of 0 or more, e.g. 1e-6 or 0.01%"
        )
    return limit
