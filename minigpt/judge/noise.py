"""Ordinary differences: what changes in the logits when nobody would say that the model has changed."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.judge.contest import Contest
from minigpt.judge.measures import Distance
from minigpt.judge.parity_report import OrdinaryDifference

BATCH = 8


def ordinary_differences(
    contest: Contest, text: list[int], truth: Float[Tensor, "seq vocab"]
) -> list[OrdinaryDifference]:
    """RMS differences of the logits of one text, each with the candidate's own error on it as a share of that."""
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
    if contest.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        with_tf32 = _logits(contest, ids)
        torch.set_float32_matmul_precision("highest")
        yield "TF32 against float32", with_tf32, logits


def _logits(contest: Contest, ids: Int[Tensor, "batch seq"], **other: Any) -> Float[Tensor, "batch seq vocab"]:
    """Those of a model that is gone again: of five models at once, the weights would fill the memory."""
    return contest.ours(**{"dtype": torch.float32} | other)(ids)
