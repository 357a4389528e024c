from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import NUMBER


@processor(order=14, rule=NUMBER, neutral=(0,), looks_back=True)
def presence_penalty(logits: Logits, penalty: float, at: Situation) -> Logits:
    """Subtract the penalty where a token has been added, however often, as OpenAI's API does."""
    added = at.ids[:, at.prompt_length :]  # (B, new)
    return logits.scatter(1, added, logits.gather(1, added) - float(penalty))
