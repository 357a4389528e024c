"""What a norm's error and time are held against: ordinary differences, transformers' time, the norms' share of it."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.device import in_turns, wall_seconds
from minigpt.judge.contest import Contest
from minigpt.judge.measures import Distance
from minigpt.judge.report import Fields

BATCH = 8
ROUNDS, LEAST_ROUNDS, ENOUGH_S = 7, 3, 3.0


def ordinary_differences(contest: Contest, text: list[int], truth: Float[Tensor, "seq vocab"]) -> list[Fields]:
    """Return RMS differences of the logits of one text under harmless changes, e.g. of the dtype.

    Each comes with the candidate's error on the same text as a share of it.
    """
    error = _rms(contest.candidate(contest.tensor(text))[0], truth)
    found = [(name, _rms(one, other)) for name, one, other in _pairs(contest, text)]
    return [Fields(difference=name, rms_error=rms, share=error / rms if rms else None) for name, rms in found]


def _rms(one: Tensor, other: Tensor) -> float:
    distance = Distance()
    distance.add(one, other)
    return distance.rms


def _pairs(contest: Contest, text: list[int]) -> Iterator[tuple[str, Tensor, Tensor]]:
    ids = contest.tensor(text)  # (1, T)
    logits = _logits(contest, ids)
    other = "eager" if contest.attention == "sdpa" else "sdpa"
    yield "eager against sdpa", logits, _logits(contest, ids, attention=other)
    for name in ("bfloat16", "float16"):
        yield f"{name} against float32", _logits(contest, ids, dtype=getattr(torch, name)), logits
    yield f"batch of 1 against batch of {BATCH}", logits, _logits(contest, ids.expand(BATCH, -1))[:1]
    if contest.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        with_tf32 = _logits(contest, ids)
        torch.set_float32_matmul_precision("highest")
        yield "TF32 against float32", with_tf32, logits


def _logits(contest: Contest, ids: Int[Tensor, "batch seq"], **other: Any) -> Float[Tensor, "batch seq vocab"]:
    """Logits of a model that is freed afterwards: five models at once would fill the memory."""
    return contest.ours(**{"dtype": torch.float32} | other)(ids)


def speed(contest: Contest, text: list[int]) -> Fields:
    """Medians of one forward over a text, candidate and transformers in turns."""
    ids = contest.tensor(text)
    return Fields(
        interleaved_ms(
            contest.device,
            candidate_ms=lambda: contest.candidate(ids),
            reference_ms=lambda: contest.reference(ids),
        )
    )


def cost(contest: Contest, text: list[int]) -> Fields:
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
        prefill_ms=lambda: model(ids),
        prefill_norm_ms=lambda: [norm(prefilled) for norm in norms],
        decode_ms=decode,
        decode_norm_ms=lambda: [norm(prefilled[:, :1]) for norm in norms],
    )
    shares = {
        f"{phase}_norm_share": min(1.0, taken[f"{phase}_norm_ms"] / taken[f"{phase}_ms"])
        for phase in ("prefill", "decode")
    }
    return Fields(prefill_tokens=len(text), **taken, **shares)


def interleaved_ms(device: torch.device, **contestants: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds of each, taken in turns after a first round that warms up.

    At least three rounds are measured, then more until there are seven or three seconds have passed.
    """
    for contestant in contestants.values():
        contestant()
    began = time.perf_counter()
    rounds = takewhile(lambda done: done < LEAST_ROUNDS or time.perf_counter() - began <= ENOUGH_S, range(ROUNDS))
    timed = {name: partial(wall_seconds, contestant, 1, device) for name, contestant in contestants.items()}
    return {name: 1000 * median(seconds) for name, seconds in in_turns(timed, rounds).items()}
