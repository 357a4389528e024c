from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import Rule, is_number

RULE = Rule(
    lambda value: is_number(value) and (value == 0 or value >= 1e-30), "be 0 (greedy), or finite and not below 1e-30"
)


@processor(order=60, rule=RULE, neutral=(0, 1), shapes_draw=True)
def temperature(logits: Logits, value: float, _: Situation) -> Logits:
    """Divide the logits: below 1 likely tokens become likelier, above 1 less likely."""
    return logits / float(value)
