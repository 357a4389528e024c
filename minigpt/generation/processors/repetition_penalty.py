import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import Rule, is_number

RULE = Rule(lambda value: is_number(value) and value > 0, "be finite and above 0")


@processor(order=10, rule=RULE, neutral=(1,), looks_back=True)
def repetition_penalty(logits: Logits, penalty: float, at: Situation) -> Logits:
    """Make tokens of the text less likely, for logits of either sign (Keskar et al. 2019, arXiv 1909.05858)."""
    said = logits.gather(1, at.ids)  # (B, T)
    penalized = torch.where(said < 0, said * float(penalty), said / float(penalty))
    return logits.scatter(1, at.ids, penalized)
