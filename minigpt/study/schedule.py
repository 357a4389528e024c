"""When each site gets its new norm: ``'h.*.ln_2@20+2, h.*.ln_1@28+2, ln_f@40, first@50'``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from minigpt.errors import NormError

MERGES = ("first", "eot")  # stages that take a kind of row's own deviation away from frozen norms
READERS = (".qk", ".v")  # who reads ln_1: queries and keys, and values

_STAGE = re.compile(r"(?P<pattern>[^@\s]+)@(?P<start>\d+)(?:\+(?P<gap>\d+))?")


@dataclass(frozen=True)
class Schedule:
    """The step before which each site is swapped.

    Attributes:
        steps: by site; "h.0.ln_1.qk" and "h.0.ln_1.v" if queries and keys have another turn than values.
        merges: by kind of row, "first" or "eot": the step from which frozen norms divide the first position, or
            end-of-text tokens, by the usual deviation.
    """

    steps: dict[str, int]
    merges: dict[str, int] = field(default_factory=dict)


def site_of(turn: str) -> str:
    """Return the norm site of a key of ``Schedule.steps``."""
    return turn.removesuffix(".qk").removesuffix(".v")


def parse_schedule(text: str | None, sites: Sequence[str]) -> Schedule:
    """Return the schedule that ``text`` asks for.

    Args:
        text: stages ``PATTERN@START+GAP`` with commas between. The first site of a pattern is swapped before step START
            and each further one GAP steps later. Without ``+GAP`` all are swapped at once. ``h.*.ln_1.qk`` is ln_1 for
            queries and keys, ``h.*.ln_1.v`` for values. The stages ``first@START`` and ``eot@START`` end the special
            treatment of the first position, and of end-of-text tokens. None swaps every site before step 0.
        sites: the model's norm sites in the order of the data.

    Raises:
        NormError: if a stage has another form, a pattern matches no site, or a site has two turns. Also if queries
            and keys have a turn and values have none, or the reverse.
    """
    if text is None:
        return Schedule(dict.fromkeys(sites, 0))
    steps: dict[str, int] = {}
    merges: dict[str, int] = {}
    for stage in text.split(","):
        match = _STAGE.fullmatch(stage.strip())
        if match is None:
            raise NormError(
                f"a stage of the schedule must be PATTERN@START or PATTERN@START+GAP, got {stage.strip()!r}"
            )
        pattern, start, gap = match["pattern"], int(match["start"]), int(match["gap"] or 0)
        if pattern in MERGES:
            merges[pattern] = start
            continue
        reader = next((reader for reader in READERS if pattern.endswith(reader)), "")
        known = [f"{site}{reader}" for site in sites if not reader or site.endswith("ln_1")]
        matched = [turn for turn in known if fnmatchcase(turn, pattern)]
        if not matched:
            raise NormError(f"schedule: no norm site matches {pattern!r}; the sites are {', '.join(known)}")
        taken = {*steps, *(site_of(turn) for turn in steps)} if not reader else {*steps}
        if twice := [turn for turn in matched if turn in taken or (reader and site_of(turn) in steps)]:
            raise NormError(f"schedule: {site_of(twice[0])} has two turns; the second is in {stage.strip()!r}")
        steps |= {turn: start + gap * place for place, turn in enumerate(matched)}
    halves = [turn for turn in steps if turn != site_of(turn)]
    for turn in halves:
        if any(f"{site_of(turn)}{reader}" not in steps for reader in READERS):
            raise NormError(f"schedule: {turn} has a turn; give {', '.join(READERS)} of {site_of(turn)} both one")
    return Schedule(steps, merges)
