"""A decoding step over a cache of fixed shape, and as one program made by ``torch.compile``, which is opt-in.

B rows, H heads, S tokens that the cache has room for, D width of a head, C embedding, V vocabulary.
"""

import copy
import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from minigpt import trials
from minigpt.engine.layout import lay_by_rows
from minigpt.engine.root import GPT2
from minigpt.errors import ConfigError
from minigpt.model import gpt2
from minigpt.model.cache import KVCache
from minigpt.model.checks import check_gpt2

WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}  # the same otherwise

LAYERS = 2  # of a model on which accelerators are tried
PROMPT, NEW = 2, 3  # tokens that it reads at once, and then one by one
ROOM = PROMPT + 1 + NEW  # a graph is recorded at the token between

Layers = tuple[Tensor, ...]  # each (2, B, H, S, D); of one tensor for all layers, a compiler copies the whole for each


class FixedCache(NamedTuple):
    """All the room of a cache, with the new token's column as data. Masked columns are read: they must be finite."""

    layers: Layers
    column: Tensor  # (1,)

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values (2, B, H, 1, D) into the column; return its room, each (B, H, S, D)."""
        room = self.layers[layer]
        return room.index_copy_(3, self.column, new.to(room.dtype)).to(new.dtype).unbind()


def hiding(visible: Bool[Tensor, "rows room"], dtype: torch.dtype) -> Float[Tensor, "rows room"]:
    """Return what is added to scores: 0 where visible, -inf where not. A row sees itself, so no score is NaN."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)


def read_fixed(model: GPT2, x: Tensor, mask: Tensor, cache: FixedCache) -> Float[Tensor, "rows 1 embd"]:
    """Return the stream (B, 1, C) of one new token a row after the whole network, in shapes that never change.

    So a compiler makes one program of it, and a CUDA graph one launch. ``mask`` (B or 1, S) is what ``hiding`` returns.
    """
    return gpt2.GPT2.run(model, x, mask[:, None, None], cache)


def compile_steps(model: GPT2, **options: Any) -> GPT2:
    """Compile the reading of one new token a row, from the next step on; return ``model``.

    A step gets the whole cache, with its unwritten part masked, so its shapes stay the same. A run compiles once, and
    once more when another batch or length makes the shapes variable. Prompts are read as before. The first step takes
    the compiler's time, about half a minute for GPT-2's 12 layers. Make caches after this call. On a GPU in fast
    arithmetic, the affine weights are stored by rows from then on. ``generate`` records a CUDA graph of the step and
    the choice of the token, so the compiler makes none.

    The first step tries the compiler on two layers. If it fails there, without a C++ compiler for example, or their
    logits are wrong, a warning says so and steps run as before.

    Args:
        options: those of ``torch.compile``.

    Raises:
        ConfigError: if the model is not a GPT2 or its attention is not "sdpa".
    """
    check_gpt2(model)
    if model.attention != "sdpa":
        raise ConfigError(f'attention must be "sdpa" for compiled steps, got {model.attention!r}')
    if model.wte.weight.is_cuda and model.arithmetic == "fast":
        lay_by_rows(model)  # the compiler makes one loop of a product whose sums run along a row, and two of others
    model.step = CompiledStep(model, options)
    return model


class CompiledStep:
    """Runs the blocks on one new token a row.

    Attributes:
        read: the compiled ``read_fixed``, of (x, mask, layers, column).
        on_trial: True for a step of a trial, which is used untried.
    """

    def __init__(self, model: GPT2, options: dict[str, Any], *, on_trial: bool = False) -> None:
        self.model, self.options, self.on_trial = model, options, on_trial

        def read(x: Tensor, mask: Tensor, layers: Layers, column: Tensor) -> Tensor:
            return read_fixed(model, x, mask, FixedCache(layers, column))

        self.read = torch.compile(read, **without_graphs(options))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to the model's copy, and is compiled again; so does one from a pickle."""
        return CompiledStep, (self.model, self.options)

    def __call__(
        self, x: Float[Tensor, "batch 1 embd"], mask: Bool[Tensor, "batch 1 1 total"] | None, cache: KVCache
    ) -> Float[Tensor, "batch 1 embd"]:
        if not self.holds(len(x), cache.max_length):
            return gpt2.GPT2.run(self.model, x, mask, cache)
        place, room = cache.length, cache.max_length
        if mask is None:
            visible = (torch.arange(room, device=x.device) <= place)[None]  # (1, S)
        else:
            visible = F.pad(mask[:, 0, 0], (0, room - place - 1))  # (B, S)
        column = torch.tensor([place], device=x.device)
        return self.read(x, hiding(visible, x.dtype), cache.store.unbind(), column)

    def holds(self, rows: int, room: int) -> bool:
        """Return True if the compiler's program of two layers, in these shapes, gives the plain path's logits."""

        def attempt() -> list[trials.Compared]:
            small, ids = specimen(self.model, self), list(range(ROOM))
            with torch.inference_mode():
                given = by_steps(small, ids, rows, max(room, ROOM))
            return [compared(small, ids, given)]

        weight = self.model.wte.weight
        how = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in self.options.items())
        name = f"compiled steps ({how})" if how else "compiled steps"
        return self.on_trial or trials.passes(name, weight.device, weight.dtype, weight.shape[1], attempt)

    def untried(self, small: GPT2) -> "CompiledStep":
        """Return the step of a model that tries the compiler."""
        return CompiledStep(small, self.options, on_trial=True)


def without_graphs(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``torch.compile``'s options without CUDA graphs: one graph cannot be recorded inside another."""
    mode = options.get("mode")
    return options | {"mode": WITHOUT_GRAPHS[mode]} if mode in WITHOUT_GRAPHS else options


def specimen(model: GPT2, step: CompiledStep | None) -> GPT2:
    """Return a model of the first layers, on the same Parameters, that uses a compiled step as ``step`` is compiled."""
    small = copy.copy(model)
    vars(small)["_modules"] = dict(model._modules)
    small.h = nn.ModuleList(list(model.h)[:LAYERS])
    small.config = dataclasses.replace(model.config, n_layer=len(small.h))
    small.step = None if step is None else step.untried(small)
    return small


@torch.inference_mode()
def compared(small: GPT2, ids: list[int], given: Float[Tensor, "new vocab"]) -> trials.Compared:
    """Compare logits after each of the last ``NEW`` tokens with those of the plain path and of float64."""
    small.step = None
    truth = copy.deepcopy(small).double()
    used = slice(small.config.used_vocab_size)
    return trials.Compared(
        *(logits[:, used] for logits in (given, by_steps(small, ids).to(given.dtype), by_steps(truth, ids)))
    )


def by_steps(model: GPT2, ids: list[int], rows: int = 1, room: int = ROOM) -> Float[Tensor, "new vocab"]:
    """Return logits (NEW, V) of the first of equal rows that read the last tokens one by one."""
    text, cache = torch.tensor([ids] * rows, device=model.wte.weight.device), model.new_cache(rows, room)
    model.hidden_states(text[:, :-NEW], cache=cache)
    return torch.cat([model.head(model.hidden_states(part, cache=cache))[0] for part in text[:, -NEW:].split(1, 1)])
