import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import NUMBER


@processor(order=12, rule=NUMBER, neutral=(0,), looks_back=True)
def frequency_penalty(logits: Logits, penalty: float, at: Situation) -> Logits:
    """Subtract the penalty for each time that a token has been added, as OpenAI's API does."""
    added = at.ids[:, at.prompt_length :]  # (B, new)
    return logits.scatter_add(1, added, torch.full_like(added, -float(penalty), dtype=logits.dtype))
