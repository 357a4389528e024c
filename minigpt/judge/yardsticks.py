"""What a norm's error and time are held against: ordinary differences, transformers' time, the norms' share of it."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.judge.contest import Contest
from minigpt.judge.measures import Distance
from minigpt.judge.parity_report import Cost, OrdinaryDifference, Speed
from minigpt.measure.stopwatch import in_turns, wall_seconds

BATCH = 8


def ordinary_differences(
    contest: Contest, text: list[int], truth: Float[Tensor, "seq vocab"]
) -> list[OrdinaryDifference]:
    """Return RMS differences of the logits of one text under harmless changes, e.g. of the dtype.

    Each comes with the candidate's error on the same text as a share of it.
    """
    ours = Distance()
    ours.add(contest.candidate(contest.tensor(text))[0], truth)
    found = []
    for name, one, other in _pairs(contest, text):
        distance = Distance()
        distance.add(one, other)
        found.append(OrdinaryDifference(name, distance.rms, ours.rms / distance.rms if distance.rms else None))
    return found


def _pairs(contest: Contest, text: list[int]) -> Iterator[tuple[str, Tensor, Tensor]]:
    ids = contest.tensor(text)  # (1, T)
    logits = _logits(contest, ids)
    other = "eager" if contest.attention == "sdpa" else "sdpa"
    yield "eager against sdpa", logits, _logits(contest, ids, attention=other)
    for name in ("bfloat16", "float16"):
        yield f"{name} against float32", _logits(contest, ids, dtype=getattr(torch, name)), logits
    yield f"batch of 1 against batch of {BATCH}", logits, _logits(contest, ids.expand(BATCH, -1))[:1]
    yield from _in_company(contest.candidate, ids)
    if contest.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        with_tf32 = _logits(contest, ids)
        torch.set_float32_matmul_precision("highest")
        yield "TF32 against float32", with_tf32, logits


def _in_company(model: GPT2, ids: Int[Tensor, "1 seq"]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The candidate's logits of one text, read in other ways. Kernels may change their order of summation there."""
    alone, seq = model(ids), ids.shape[1]
    few, many = (model(ids.expand(texts, -1))[:1] for texts in (max(255 // seq, 1), 255 // seq + 1))
    yield f"candidate among up to 255 rows against 256 and more, {seq} a text", few, many
    yield "candidate alone against among others", alone, many
    for name, size in (("in two pieces", -(-seq // 2)), ("decoded", 1)):
        cache = model.new_cache(1, seq)
        yield (
            f"candidate {name} against read at once",
            torch.cat([model(p, cache=cache) for p in ids.split(size, 1)], 1),
            alone,
        )


def _logits(contest: Contest, ids: Int[Tensor, "batch seq"], **other: Any) -> Float[Tensor, "batch seq vocab"]:
    """Logits of a model that is freed afterwards: five models at once would fill the memory."""
    return contest.ours(**{"dtype": torch.float32} | other)(ids)


def speed(contest: Contest, text: list[int]) -> Speed:
    """Medians of one forward over a text, candidate and transformers in turns."""
    ids = contest.tensor(text)
    return Speed(*interleaved_ms(contest.device, lambda: contest.candidate(ids), lambda: contest.reference(ids)))


def cost(contest: Contest, text: list[int]) -> Cost:
    """The norms' share of the time to read a text (prefill) and to read one more token (decode)."""
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
    """Median milliseconds of each, taken in turns after a first round that warms up.

    At least three rounds are measured, then more until there are ``repeats`` or ``enough_s`` seconds have passed.
    """
    for contestant in contestants:
        contestant()
    began = time.perf_counter()
    rounds = itertools.takewhile(lambda done: done < 3 or time.perf_counter() - began <= enough_s, range(repeats))
    timed = [functools.partial(wall_seconds, contestant, 1, device) for contestant in contestants]
    return [1000 * median(seconds) for seconds in in_turns(dict(enumerate(timed)), rounds).values()]
