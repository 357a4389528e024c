from collections.abc import Sequence

from minigpt.generation.processors import Logits, Situation, forbid, processor
from minigpt.generation.values import IDS


@processor(order=50, rule=IDS, neutral=([], ()))
def suppress_tokens(logits: Logits, tokens: Sequence[int], _: Situation) -> Logits:
    """Exclude these tokens."""
    return forbid(logits, tokens)
