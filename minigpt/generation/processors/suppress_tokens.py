from collections.abc import Sequence

from minigpt.generation.processors import Logits, Situation, forbid, processor
from minigpt.generation.values import is_ids


@processor(order=50, accepts=is_ids, requirement="be a list of ids", neutral=([], ()))
def suppress_tokens(logits: Logits, tokens: Sequence[int], _: Situation) -> Logits:
    """Exclude these tokens."""
    return forbid(logits, tokens)
