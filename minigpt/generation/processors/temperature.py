import sys

from minigpt.generation.processors import Logits, Situation, processor
from minigpt.generation.values import is_number


@processor(
    order=60,
    accepts=lambda value: is_number(value) and (value == 0 or 1e-30 <= value <= sys.float_info.max),
    requirement="be 0 (greedy), or finite and not below 1e-30",
    neutral=(0, 1),
    shapes_draw=True,
)
def temperature(logits: Logits, value: float, _: Situation) -> Logits:
    """Divide the logits: below 1 likely tokens become likelier, above 1 less likely."""
    return logits / float(value)
