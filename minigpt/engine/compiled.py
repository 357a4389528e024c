"""A step of decoding as one program made by ``torch.compile``, over a cache of fixed shape. Opt-in.

B batch, S tokens that the cache has room for, C embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from minigpt.engine import one_launch
from minigpt.engine.fixed import hiding, read_fixed
from minigpt.engine.layout import lay_by_rows
from minigpt.errors import ConfigError
from minigpt.model.cache import FixedCache, KVCache, Layers
from minigpt.model.gpt2 import GPT2, require_gpt2

WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}  # the same otherwise


def compile_steps(model: GPT2, **options: Any) -> GPT2:
    """From now on, compile the reading of one new token a row; return ``model``.

    It is given all the room of a cache, with what is not yet written masked, so that no shape changes from one token to
    the next: a run compiles once, and once more where another batch or length makes the shapes variable. The
    prompt is read as before. The first step takes the compiler's time, half a minute or so for GPT-2's 12 layers.
    A cache that was made before is not for it; make a new one. On a GPU in fast arithmetic the affine weights are
    copied, in place, to lie by rows. The compiler makes no CUDA graphs of its own: it would have to leave out a step,
    which writes into a cache, and ``generate`` records one with the choice of the token in it.

    Args:
        options: as ``torch.compile`` takes them; modes and options that ask for CUDA graphs ask for all else that they
            stand for.

    Raises:
        ConfigError: the model is no GPT2, or its attention is not "sdpa"; and at the first step, where the compiler
            cannot make a program of it, for want of a C++ compiler for one.
    """
    require_gpt2(model)
    if model.attention != "sdpa":
        raise ConfigError(f'compiled steps need attention="sdpa", and the model has {model.attention!r}')
    if model.wte.weight.is_cuda and model.arithmetic == "fast":
        lay_by_rows(model)  # the compiler makes one loop of a product whose sums run along a row, and two of others
    one_launch.prepare(model.wte.weight.device)
    model.step = CompiledStep(model, options)
    return model


class CompiledStep:
    """Called by the model where it would run its blocks on one new token a row.

    Attributes:
        read: the compiled ``read_fixed``, of (x, mask, layers, column).
    """

    def __init__(self, model: GPT2, options: dict[str, Any]) -> None:
        self.model, self.options = model, options

        def read(x: Tensor, mask: Tensor, layers: Layers, column: Tensor) -> Tensor:
            return read_fixed(model, x, mask, FixedCache(layers, column))

        self.read = torch.compile(read, **without_graphs(options))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is of the model's copy, with its weights, and compiled anew; so is one from a pickle."""
        return CompiledStep, (self.model, self.options)

    def __call__(
        self, x: Float[Tensor, "batch 1 embd"], padding: Bool[Tensor, "batch total"] | None, cache: KVCache
    ) -> Float[Tensor, "batch 1 embd"]:
        place, room = cache.length, cache.max_length
        if padding is None:
            visible = (torch.arange(room, device=x.device) <= place)[None]  # (1, S)
        else:
            visible = F.pad(padding, (0, room - place - 1))  # (B, S)
        column = torch.tensor([place], device=x.device)
        try:
            return self.read(x, hiding(visible, x.dtype), cache.store.unbind(), column)
        except RuntimeError as error:
            from torch._dynamo.exc import BackendCompilerFailed

            if not isinstance(error, BackendCompilerFailed):
                raise
            said = str(error.inner_exception).partition("\n")[0] or type(error.inner_exception).__name__
            raise ConfigError(f"a step cannot be compiled: {said}") from error


def without_graphs(options: dict[str, Any]) -> dict[str, Any]:
    """The options of ``torch.compile`` without what has it make CUDA graphs, one of which cannot stand in another."""
    inner = options.get("options")
    if inner:
        options = options | {"options": {name: value for name, value in inner.items() if name != "triton.cudagraphs"}}
    mode = options.get("mode")
    return options | {"mode": WITHOUT_GRAPHS[mode]} if mode in WITHOUT_GRAPHS else options
