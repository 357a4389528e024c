import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import between


@processor(order=90, rule=between(0, 1), neutral=(0,), shapes_draw=True)
def min_p(logits: Logits, p: float, _: Situation) -> Logits:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)."""
    probabilities = logits.softmax(-1)  # (B, V)
    unlikely = probabilities < float(p) * probabilities.amax(-1, keepdim=True)
    return logits.masked_fill(unlikely.scatter(-1, probabilities.topk(1).indices, False), -torch.inf)
