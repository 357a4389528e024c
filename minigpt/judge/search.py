"""Which sites break the verdict: the smallest sets of them."""

from collections.abc import Callable

import numpy as np

from minigpt.judge.parity_report import Bisection


def bisect(sites: list[str], fails: Callable[[list[str]], bool]) -> Bisection:
    """Find the sites that must have their own norm back, as minimal failing sets, until the remaining sites pass.

    Nothing is found if the verdict fails without any of them, since something else breaks it.

    Args:
        fails: whether the verdict fails with the norm at these sites only.
    """
    asked = 0

    def counted(tried: list[str]) -> bool:
        nonlocal asked
        asked += 1
        return fails(tried)

    found: list[list[str]] = []
    remaining = list(sites)
    while remaining and counted(remaining):
        if not found and counted([]):
            break
        found.append(minimal_failing(remaining, counted))
        remaining = [site for site in remaining if site not in found[-1]]
    return Bisection([site for site in sites if site not in remaining], found, asked)


def minimal_failing(sites: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
    """A failing subset from which no site can be left out (delta debugging, Zeller & Hildebrandt 2002).

    Args:
        sites: a set that is known to fail.
    """
    parts = 2
    while len(sites) > 1:
        chunks = [chunk.tolist() for chunk in np.array_split(sites, min(parts, len(sites)))]
        complements = [[site for site in sites if site not in chunk] for chunk in chunks]
        if (failing := next(filter(fails, chunks), None)) is not None:
            sites, parts = failing, 2
        elif len(chunks) > 2 and (failing := next(filter(fails, complements), None)) is not None:
            sites, parts = failing, len(chunks) - 1
        elif len(chunks) == len(sites):
            break
        else:
            parts = 2 * len(chunks)
    return sites
