"""The fast classes of the network's parts. A part keeps its identity, Parameters and hooks; only its class changes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.engine import attend_one, one_launch
from minigpt.engine.product import product
from minigpt.errors import ConfigError
from minigpt.model.attention import CausalSelfAttention, Keys, Queries
from minigpt.model.cache import KVCache, LayerCache
from minigpt.model.conv1d import Conv1D
from minigpt.model.mlp import MLP, gelu_new, gelu_tanh

Model = TypeVar("Model", bound=nn.Module)


class Texts(NamedTuple):
    """What the fast attention takes as its cache when several texts stand one after the other in its input."""

    shapes: Sequence[tuple[int, ...]]  # (batch, seq) of each text
    masks: Sequence[Tensor | None]
    caches: Sequence[KVCache]

    def mix_each(
        self, mix: Callable[..., Tensor], qkv: Float[Tensor, "1 tokens qkv"]
    ) -> Float[Tensor, "1 tokens embd"]:
        """Apply ``mix`` to each text's part, with its own mask and cache."""
        mixed = map(mix, self.split(qkv), self.masks, self.caches)
        return torch.cat([y.flatten(0, 1) for y in mixed])[None]  # each (B, T, C)

    def split(self, tokens: Float[Tensor, "1 tokens width"]) -> list[Tensor]:
        """Return each text's own part, (batch, seq, width)."""
        parts = tokens[0].split([batch * seq for batch, seq in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]


class FastConv1D(Conv1D):
    """A ``Conv1D`` by the fastest product for this processor and the weight's layout."""

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        return product(x, self.weight, self.bias)


class FastLinear(nn.Linear):
    """An untied head by the fastest product."""

    def forward(self, input: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        return product(input, self.weight.t(), self.bias)


class FastMLP(MLP):
    """An ``MLP`` whose GELU is one call. It skips the dropout when it does nothing."""

    def forward(self, x: Float[Tensor, "batch seq embd"]) -> Float[Tensor, "batch seq embd"]:
        act = gelu_tanh if self.act is gelu_new else self.act
        x = self.c_proj(act(self.c_fc(x)))
        return self.dropout(x) if self.training else x


class FastAttention(CausalSelfAttention):
    """Attention with faster kernels for one new token a row, and for several texts in one sequence."""

    def forward(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None = None, cache: LayerCache | Texts | None = None
    ) -> Float[Tensor, "batch seq embd"]:
        qkv = self.c_attn(x)  # (B, T, 3C)
        y = self.c_proj(cache.mix_each(self.mix, qkv) if isinstance(cache, Texts) else self.mix(qkv, mask, cache))
        return self.resid_dropout(y) if self.training else y

    def mix(
        self, qkv: Float[Tensor, "batch seq qkv"], mask: Tensor | None, cache: LayerCache | None
    ) -> Float[Tensor, "batch seq embd"]:
        batch, seq, _ = qkv.shape
        qkv = qkv.contiguous()  # some products return vectors in pieces, which no kernel takes
        if not self.training and self.attention == "sdpa" and mask is not None and one_launch.suits(cache, qkv):
            return one_launch.attend(qkv, cache.layers[self.layer], mask, cache.column, self.scale)
        qkv = qkv.view(batch, seq, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, T, 3C) -> (3, B, H, T, D)
        q, k, v = qkv.unbind()
        if cache is not None:
            k, v = cache.update(self.layer, qkv[1:])  # each (B, H, S, D), views of the cache
        attend = self.sdpa if self.attention == "sdpa" else self.eager
        y = attend(q, k, v, mask)
        return y.transpose(1, 2).reshape(batch, seq, -1).contiguous()  # (B, H, T, D) -> (B, T, C)

    def sdpa(self, q: Queries, k: Keys, v: Keys, mask: Tensor | None) -> Queries:
        if not self.training and attend_one.suits(q):
            return attend_one.attend(q, k, v, mask, self.scale)
        return super().sdpa(q, k, v, mask)


FASTER: dict[type[nn.Module], type[nn.Module]] = {
    Conv1D: FastConv1D,
    CausalSelfAttention: FastAttention,
    MLP: FastMLP,
}
PLAINER = {fast: slow for slow, fast in FASTER.items()}


def accelerate(model: Model) -> Model:
    """Give every part of ``model`` its fast class, in place; return ``model``.

    The Parameters, hooks and identities of the modules stay. Parts of other classes, subclasses included, stay as they
    are. The last bits of the logits may differ from the plain network's. ``plain`` undoes it.

    Args:
        model: a GPT2, or any module that contains parts of one.
    """
    _exchange(model, FASTER)
    if isinstance(getattr(model, "lm_head", None), nn.Linear) and type(model.lm_head) is nn.Linear:
        model.lm_head.__class__ = FastLinear
    if hasattr(model, "arithmetic"):
        vars(model)["arithmetic"] = "fast"
    return model


def plain(model: Model) -> Model:
    """Give every part of ``model`` its plain class back, in place; return ``model``.

    Raises:
        ConfigError: if the weights are packed or have eight bits: load the model again instead.
    """
    if getattr(model, "fast_head", None) is not None:
        raise ConfigError("model must have its weights as they were loaded, got packed or int8 weights; load it again")
    _exchange(model, PLAINER)
    if isinstance(getattr(model, "lm_head", None), FastLinear):
        model.lm_head.__class__ = nn.Linear  # type: ignore[union-attr]
    if hasattr(model, "arithmetic"):
        vars(model)["arithmetic"] = "reference"
    return model


def _exchange(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> None:
    for part in model.modules():
        part.__class__ = classes.get(type(part), type(part))
