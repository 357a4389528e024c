import torch

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import Rule, is_number

RULE = Rule(lambda value: is_number(value) and 0 < value <= 1, "be within (0, 1]")


@processor(order=80, rule=RULE, neutral=(1,), shapes_draw=True)
def top_p(logits: Logits, p: float, _: Situation) -> Logits:
    """Keep the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2019, arXiv 1904.09751)."""
    ascending, order = logits.sort()  # both (B, V)
    in_the_tail = ascending.softmax(-1).cumsum(-1) <= 1 - float(p)
    in_the_tail[..., -1].fill_(False)
    return logits.masked_fill(in_the_tail.scatter(1, order, in_the_tail), -torch.inf)
