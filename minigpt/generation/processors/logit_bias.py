from collections.abc import Mapping
from typing import Any

import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import Rule, is_ids, is_number


def _maps_ids_to_numbers(bias: Any) -> bool:
    return isinstance(bias, Mapping) and is_ids(list(bias)) and all(map(is_number, bias.values()))


@processor(order=5, rule=Rule(_maps_ids_to_numbers, "map ids to finite numbers"), neutral=({},))
def logit_bias(logits: Logits, bias: Mapping[int, float], at: Situation) -> Logits:
    """Add numbers to the logits of some ids, as OpenAI's API does."""
    ids = torch.tensor(list(bias), device=logits.device)
    return logits.index_add(1, ids, torch.tensor([*bias.values()]).to(logits).expand(len(logits), -1))
