"""When each site gets its new norm: ``'h.*.ln_2@20+2, h.*.ln_1@28+2, ln_f@40, first@50'``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from minigpt.errors import NormError

FIRST = "first"  # the stage that takes the first position's own deviation away from frozen norms

_STAGE = re.compile(r"(?P<pattern>[^@\s]+)@(?P<start>\d+)(?:\+(?P<gap>\d+))?")


@dataclass(frozen=True)
class Schedule:
    """The step before which each site is swapped.

    Attributes:
        steps: by site.
        merge_first: the step from which frozen norms divide the first position by the usual deviation, or None.
    """

    steps: dict[str, int]
    merge_first: int | None = None


def parse_schedule(text: str | None, sites: Sequence[str]) -> Schedule:
    """Return the schedule that ``text`` asks for.

    Args:
        text: stages ``PATTERN@START+GAP`` with commas between. The first site of a pattern is swapped before step START
            and each further one GAP steps later. Without ``+GAP`` all are swapped at once. The stage ``first@START``
            ends the special treatment of the first position. None swaps every site before step 0.
        sites: the model's norm sites in the order of the data.

    Raises:
        NormError: if a stage has another form, a pattern matches no site, or a site has two turns.
    """
    if text is None:
        return Schedule(dict.fromkeys(sites, 0))
    steps: dict[str, int] = {}
    merge_first = None
    for stage in text.split(","):
        match = _STAGE.fullmatch(stage.strip())
        if match is None:
            raise NormError(
                f"a stage of the schedule must be PATTERN@START or PATTERN@START+GAP, got {stage.strip()!r}"
            )
        pattern, start, gap = match["pattern"], int(match["start"]), int(match["gap"] or 0)
        if pattern == FIRST:
            merge_first = start
            continue
        matched = [site for site in sites if fnmatchcase(site, pattern)]
        if not matched:
            raise NormError(f"schedule: no norm site matches {pattern!r}; the sites are {', '.join(sites)}")
        if twice := [site for site in matched if site in steps]:
            raise NormError(f"schedule: {twice[0]} has two turns; the second is in {stage.strip()!r}")
        steps |= {site: start + gap * place for place, site in enumerate(matched)}
    return Schedule(steps, merge_first)
