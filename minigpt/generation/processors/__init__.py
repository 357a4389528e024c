"""Logits processors, one file each: what a setting of generation does to the logits of the next token.

To add one, write a file here whose function has the setting's name and the decorator ``processor``::

    @processor(order=95, rule=between(0, 1), shapes_draw=True)
    def top_a(logits, a, at):
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < a * probabilities.amax(-1, keepdim=True) ** 2, -torch.inf)

and one line, ``top_a: float | None``, to ``settings.Options``, for type checkers. The present ones have the names, the
order and the values of transformers.

B batch, T tokens so far, V vocabulary.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.generation.values import Rule

if TYPE_CHECKING:
    from minigpt.generation.settings import GenerationSettings

Logits = Float[Tensor, "batch vocab"]
Ids = Int[Tensor, "batch seq"]


class Situation(NamedTuple):
    """What a processor may know besides the logits."""

    settings: "GenerationSettings"
    ids: Tensor  # (B, T) the text so far
    prompt_length: int
    end_ids: tuple[int, ...]


Process = Callable[[Tensor, Any, Situation], Tensor]  # of the logits, the setting's value and the situation
PROCESSORS: dict[str, "processor"] = {}  # by name, in the order in which they run


@dataclasses.dataclass(kw_only=True)
class processor:
    """Registers the decorated function as the processor of the setting of its name.

    Attributes:
        order: processors run from the lowest to the highest.
        rule: what a value must be.
        neutral: values that change nothing.
        shapes_draw: it changes only how a token is drawn, so it is skipped when nothing is drawn.
        looks_back: it depends on the row's text.
    """

    order: int
    rule: Rule
    neutral: tuple[Any, ...] = ()
    shapes_draw: bool = False
    looks_back: bool = False

    def __call__(self, process: Process) -> Process:
        self.process = process
        PROCESSORS[process.__name__] = self
        for name in sorted(PROCESSORS, key=lambda name: PROCESSORS[name].order):
            PROCESSORS[name] = PROCESSORS.pop(name)
        return process


def warp_by(logits: Logits, situation: Situation) -> Logits:
    """Apply every processor that the situation's settings name."""
    for name, value in situation.settings.active.items():
        logits = PROCESSORS[name].process(logits, value, situation)
    return logits


def forbid(logits: Logits, tokens: Sequence[int]) -> Logits:
    """Set the logits of these tokens to -inf."""
    mask = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    mask[[token for token in tokens if 0 <= token < len(mask)]] = True
    return logits.masked_fill(mask, -torch.inf)


for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
