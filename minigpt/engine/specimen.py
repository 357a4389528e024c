"""The first layers of a model, on which accelerators are tried.

B rows, T tokens, V vocabulary.
"""

import copy
import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.engine.root import GPT2
from minigpt.trials import Compared

if TYPE_CHECKING:
    from minigpt.engine.compiled import CompiledStep

LAYERS = 2
PROMPT, NEW = 2, 3  # tokens that are read at once, and then one by one
ROOM = PROMPT + 1 + NEW  # a graph is recorded at the token between


def specimen(model: GPT2, step: "CompiledStep | None") -> GPT2:
    """Return a model of the first layers, on the same Parameters, that uses a compiled step as ``step`` is compiled."""
    small = copy.copy(model)
    vars(small)["_modules"] = dict(model._modules)
    small.h = nn.ModuleList(list(model.h)[:LAYERS])
    small.config = dataclasses.replace(model.config, n_layer=len(small.h))
    small.step = None if step is None else step.untried(small)
    return small


@torch.inference_mode()
def compared(small: GPT2, ids: list[int], given: Float[Tensor, "new vocab"]) -> Compared:
    """Compare logits after each of the last ``NEW`` tokens with those of the plain path and of float64."""
    small.step = None
    truth = copy.deepcopy(small).double()
    used = slice(small.config.used_vocab_size)
    return Compared(
        *(logits[:, used] for logits in (given, by_steps(small, ids).to(given.dtype), by_steps(truth, ids)))
    )


def by_steps(model: GPT2, ids: list[int], rows: int = 1, room: int = ROOM) -> Float[Tensor, "new vocab"]:
    """Return logits (NEW, V) of the first of equal rows that read the last tokens one by one."""
    text, cache = torch.tensor([ids] * rows, device=model.wte.weight.device), model.new_cache(rows, room)
    model.hidden_states(text[:, :-NEW], cache=cache)
    return torch.cat([model.head(model.hidden_states(part, cache=cache))[0] for part in text[:, -NEW:].split(1, 1)])
