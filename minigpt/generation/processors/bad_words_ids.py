from collections.abc import Sequence
from typing import Any

import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import Rule, is_ids


def is_runs(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(is_ids(run) and len(run) > 0 for run in value)


@processor(order=30, rule=Rule(is_runs, "be a list of lists of ids, none of them empty"), looks_back=True)
def bad_words_ids(logits: Logits, runs: Sequence[Sequence[int]], at: Situation) -> Logits:
    """Exclude tokens that would complete one of the runs. A run that is an end token alone stays allowed."""
    banned = torch.zeros_like(logits, dtype=torch.bool)
    for *begun, last in runs:
        if begun:
            if len(begun) <= at.ids.shape[1]:
                banned[:, last] |= (at.ids[:, -len(begun) :] == at.ids.new_tensor(begun)).all(-1)
        elif last not in at.end_ids:
            banned[:, last] = True
    return logits.masked_fill(banned, -torch.inf)
