"""The fast classes of the network and its parts. A part keeps its identity, Parameters and hooks; its class changes.

B batch, T new tokens, S tokens in all, C embedding, H heads, D width of a head, V vocabulary.
"""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from minigpt.engine.product import product
from minigpt.errors import ConfigError
from minigpt.model.attention import CausalSelfAttention, Keys
from minigpt.model.cache import KVCache
from minigpt.model.gpt2 import GPT2
from minigpt.model.mlp import MLP, Conv1D, gelu_new, gelu_tanh

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class FastConv1D(Conv1D):
    """A ``Conv1D`` by the fastest product for this processor."""

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        return product(x, self.weight, self.bias)


class FastLinear(nn.Linear):
    """An untied head by the fastest product."""

    def forward(self, input: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        return product(input, self.weight.t(), self.bias)


class FastMLP(MLP):
    """An ``MLP`` whose GELU is one call."""

    def forward(self, x: Float[Tensor, "batch seq embd"]) -> Float[Tensor, "batch seq embd"]:
        activation = self.act
        if activation is gelu_new:
            activation = gelu_tanh
        hidden = activation(self.c_fc(x))
        return self.dropout(self.c_proj(hidden))


class FastAttention(CausalSelfAttention):
    """Attention that leaves keys and values in the cache as they are."""

    def laid_out(self, keys: Keys) -> Keys:
        return keys


class FastGPT2(GPT2):
    """The network with a head by the fastest product.

    ``quantize_int8`` gives it a head ``lm_head`` with int8 weights, also if the head is tied.
    """

    @property
    def arithmetic(self) -> str:
        """ "fast": operations may be fused, so the last bits may differ from the reference's."""
        return "fast"

    @property
    def quantize(self) -> str | None:
        """ "int8" if the head has int8 weights, else None."""
        head = self._modules.get("lm_head")
        return "int8" if hasattr(head, "panels") else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, arithmetic={self.arithmetic!r}, quantize={self.quantize!r}"

    def head(self, x: Float[Tensor, "batch seq embd"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits for the last norm's output. A tied head is the token embedding, except in int8."""
        if self.config.tie_word_embeddings and self.quantize is None:
            return product(x, self.wte.weight.t())
        return self.lm_head(x)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        cache = super().new_cache(batch_size, max_length)
        if self.quantize is not None:  # a long text's keys and values would take as long to read as the weights
            cache.store = torch.empty_like(cache.store, dtype=torch.bfloat16)
        return cache


FASTER: dict[type[nn.Module], type[nn.Module]] = {
    GPT2: FastGPT2, Conv1D: FastConv1D, CausalSelfAttention: FastAttention, MLP: FastMLP,
}  # fmt: skip
PLAINER = {fast: slow for slow, fast in FASTER.items()} | {FastLinear: nn.Linear}


def accelerate(model: AnyModule) -> AnyModule:
    """Give ``model`` and every part of it its fast class, in place; return ``model``.

    The Parameters, hooks and identities of the modules stay. Parts of other classes, subclasses included, stay as they
    are. The last bits of the logits may differ from the plain network's. ``plain`` undoes it.

    Args:
        model: a GPT2, or any module that contains parts of one.
    """
    _exchange(model, FASTER)
    head: Any = getattr(model, "lm_head", None)
    if type(head) is nn.Linear:
        head.__class__ = FastLinear
    return model


def plain(model: AnyModule) -> AnyModule:
    """Give ``model`` and every part of it its plain class back, in place; return ``model``.

    Raises:
        ConfigError: if the weights are int8: load the model again instead.
    """
    if quantize_of(model) is not None:
        raise ConfigError("model must have its original weights, got int8 weights; load it again")
    _exchange(model, PLAINER)
    return model


def arithmetic_of(model: nn.Module) -> str:
    """Return "fast" for a model that ``accelerate`` has returned, else "reference": transformers' own operations."""
    return getattr(model, "arithmetic", "reference")


def quantize_of(model: nn.Module) -> str | None:
    """Return "int8" for a model whose weights that multiply are rounded, else None."""
    return getattr(model, "quantize", None)


def head_rows(model: GPT2) -> Float[Tensor, "vocab embd"]:
    """Return the head's weight.

    Raises:
        ConfigError: if the head is more than a product with a weight.
    """
    if model.config.tie_word_embeddings:
        return model.wte.weight
    head = model.lm_head
    is_linear = isinstance(head, nn.Linear) and head.bias is None
    if not is_linear or "forward" in vars(head) or is_watched(*head.modules()):
        raise ConfigError("lm_head must be a plain nn.Linear without bias or hooks to be quantized")
    return head.weight


def affine_layers(model: nn.Module) -> list[str]:
    """Return the names of the affine layers that have a forward of ours and no hooks.

    It returns names, not modules, so that each layer is freed when another takes its place.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        is_ours = type(module) in (Conv1D, FastConv1D) and "forward" not in vars(module)
        if is_ours and not is_watched(module):
            names.append(name)
    return names


def _exchange(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> None:
    for part in model.modules():
        part.__class__ = classes.get(type(part), type(part))


def is_watched(*modules: nn.Module) -> bool:
    """Return True if hooks fire when any of these is called: its own, or those on all modules."""
    return bool(global_hooks._has_any_global_hook()) or any(map(_has_own_hooks, modules))


def _has_own_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
