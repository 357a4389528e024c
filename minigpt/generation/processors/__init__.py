"""Logits processors, one file each: what a setting of generation does to the logits of the next token.

To add one, write a file here whose function has the setting's name and the decorator ``processor``::

    @processor(order=95, accepts=between(0, 1), requirement="be within [0, 1]", shapes_draw=True)
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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

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


Process = Callable[[Tensor, Any, Situation], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor and what the settings need to know about it.

    Attributes:
        process: ``(logits, value of the setting, situation) -> logits``.
        order: processors run from the lowest to the highest.
        accepts: whether a value other than None is valid.
        requirement: completes the message "top_k must ..." where it is not.
        neutral: values that change nothing.
        shapes_draw: it changes only how a token is drawn, so it is skipped when nothing is drawn.
        looks_back: at the "length" of the row's text, or at its "tokens"; None at neither.
    """

    process: Process
    order: int
    accepts: Callable[[Any], bool]
    requirement: str
    neutral: tuple[Any, ...] = ()
    shapes_draw: bool = False
    looks_back: Literal["length", "tokens"] | None = None


PROCESSORS: dict[str, Processor] = {}  # by name, in the order in which they run


def processor(
    *,
    order: int,
    accepts: Callable[[Any], bool],
    requirement: str,
    neutral: tuple[Any, ...] = (),
    shapes_draw: bool = False,
    looks_back: Literal["length", "tokens"] | None = None,
) -> Callable[[Process], Process]:
    """Register the decorated function as the processor of the setting of its name. See ``Processor``."""

    def add(process: Process) -> Process:
        PROCESSORS[process.__name__] = Processor(
            process=process, order=order, accepts=accepts, requirement=requirement, neutral=neutral,
            shapes_draw=shapes_draw, looks_back=looks_back,
        )  # fmt: skip
        ordered = sorted(PROCESSORS.items(), key=lambda item: item[1].order)
        PROCESSORS.clear()
        PROCESSORS.update(ordered)
        return process

    return add


def warp_by(logits: Logits, situation: Situation) -> Logits:
    """Apply every processor that the situation's settings name."""
    for name, known in PROCESSORS.items():
        if (value := situation.settings.active(name)) is not None:
            logits = known.process(logits, value, situation)
    return logits


def forbid(logits: Logits, tokens: Sequence[int]) -> Logits:
    """Set the logits of these tokens to -inf."""
    mask = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    mask[[token for token in tokens if 0 <= token < len(mask)]] = True
    return logits.masked_fill(mask, -torch.inf)


for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
