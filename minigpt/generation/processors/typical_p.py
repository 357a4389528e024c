import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import is_number


@processor(
    order=100,
    accepts=lambda value: is_number(value) and 0 < value <= 1,
    requirement="be within (0, 1]",
    neutral=(1,),
    shapes_draw=True,
)
def typical_p(logits: Logits, p: float, _: Situation) -> Logits:
    """Keep tokens nearest to the expected surprise that reach p together (Meister et al. 2022, arXiv 2202.00666)."""
    log_probabilities = logits.log_softmax(-1)  # (B, V)
    entropy = -(log_probabilities * log_probabilities.exp()).nansum(-1, keepdim=True)  # (B, 1)
    strangeness, order = (-log_probabilities - entropy).abs().sort()  # both (B, V)
    reached = logits.gather(-1, order).softmax(-1).cumsum(-1)
    last = (reached < float(p)).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)  # (B, 1)
    too_strange = strangeness > strangeness.gather(-1, last)
    too_strange[..., 0].fill_(False)
    return logits.masked_fill(too_strange.scatter(-1, order, too_strange), -torch.inf)
