"""What the norm costs, and what a faster one could bring to the whole."""

import functools
import itertools
import time
from collections.abc import Callable
from statistics import median

import torch

from minigpt.judge.contest import Contest
from minigpt.judge.parity_report import Cost, Speed
from minigpt.measure.stopwatch import in_turns, wall_seconds


def speed(contest: Contest, text: list[int]) -> Speed:
    """Medians of one forward over a text, candidate and transformers in turns."""
    ids = contest.tensor(text)
    return Speed(*interleaved_ms(contest.device, lambda: contest.candidate(ids), lambda: contest.reference(ids)))


def cost(contest: Contest, text: list[int]) -> Cost:
    """The norms' share of reading a text at once (prefill) and of one more token (decode), and Amdahl's bound on it."""
    model, ids = contest.candidate, contest.tensor(text)
    norms = list(model.norm_modules().values())
    cache = model.new_cache(1, len(text) + 1)
    model(ids, cache=cache)
    prefilled = torch.randn(1, len(text), contest.config.n_embd, generator=torch.Generator().manual_seed(0))
    prefilled = prefilled.to(contest.device, contest.dtype)

    def decode() -> None:
        cache.length = len(text)
        model(ids[:, -1:], position_ids=ids.new_tensor([[len(text) - 1]]), cache=cache)

    taken = interleaved_ms(
        contest.device,
        lambda: model(ids),
        lambda: [norm(prefilled) for norm in norms],
        decode,
        lambda: [norm(prefilled[:, :1]) for norm in norms],
    )
    return Cost(len(text), *taken)


def interleaved_ms(
    device: torch.device, *contestants: Callable[[], object], repeats: int = 7, enough_s: float = 3.0
) -> list[float]:
    """Median milliseconds of each, taken in turns; a first round warms up.

    Three rounds are measured at least, then more until there are ``repeats`` or they have taken ``enough_s`` seconds.
    """
    for contestant in contestants:
        contestant()
    began = time.perf_counter()
    rounds = itertools.takewhile(lambda done: done < 3 or time.perf_counter() - began <= enough_s, range(repeats))
    timed = [functools.partial(wall_seconds, contestant, 1, device) for contestant in contestants]
    return [1000 * median(seconds) for seconds in in_turns(dict(enumerate(timed)), rounds).values()]
