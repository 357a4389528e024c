from minigpt.generation.processors import Logits, Situation, forbid, processor
from minigpt.generation.values import at_least


@processor(order=40, rule=at_least(0), neutral=(0,), looks_back=True)
def min_new_tokens(logits: Logits, least: int, at: Situation) -> Logits:
    """Exclude end tokens until the text has ``least`` new tokens."""
    return forbid(logits, at.end_ids) if at.ids.shape[1] - at.prompt_length < least else logits
