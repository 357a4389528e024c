"""Which sites break the verdict: the smallest sets of them."""

from collections.abc import Callable, Sequence

from minigpt.judge.report import Fields


def bisect(sites: list[str], fails: Callable[[list[str]], bool]) -> Fields:
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
    return Fields(sites=[site for site in sites if site not in remaining], sets=found, verdicts=asked)


def minimal_failing(
    sites: list[str], fails: Callable[[list[str]], bool], beside: Sequence[str] = (), *, ask: bool = False
) -> list[str]:
    """A subset that fails, and from which no site can be left out (QuickXplain, Junker 2004).

    Args:
        sites: a set that is known to fail with the norm at the sites of ``beside`` too.
        ask: whether ``beside`` may fail by itself.
    """
    if ask and fails([*beside]):
        return []
    if len(sites) == 1:
        return sites
    first, second = sites[: len(sites) // 2], sites[len(sites) // 2 :]
    needed = minimal_failing(second, fails, [*beside, *first], ask=True)
    return minimal_failing(first, fails, [*beside, *needed], ask=bool(needed)) + needed
