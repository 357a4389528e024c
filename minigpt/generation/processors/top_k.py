import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import at_least


@processor(order=70, rule=at_least(1), shapes_draw=True)
def top_k(logits: Logits, k: int, _: Situation) -> Logits:
    """Keep the k highest logits and those equal to the lowest of them (Fan et al. 2018, arXiv 1805.04833)."""
    lowest_kept = logits.topk(min(k, logits.shape[-1])).values[..., -1:]  # (B, 1)
    return logits.masked_fill(logits < lowest_kept, -torch.inf)
