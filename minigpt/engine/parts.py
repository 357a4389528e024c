"""The fast classes of the network's parts. A part keeps its identity, Parameters and hooks; only its class changes."""

from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from minigpt.engine.product import product
from minigpt.errors import ConfigError
from minigpt.model.attention import CausalSelfAttention
from minigpt.model.cache import LayerCache
from minigpt.model.conv1d import Conv1D
from minigpt.model.mlp import MLP, gelu_new, gelu_tanh
from minigpt.norms.add import has_hooks

Model = TypeVar("Model", bound=nn.Module)


class FastConv1D(Conv1D):
    """A ``Conv1D`` by the fastest product for this processor."""

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
    """Attention that skips idle dropout, and leaves keys and values in the cache as they are."""

    def forward(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> Float[Tensor, "batch seq embd"]:
        batch, seq, _ = x.shape
        qkv = self.c_attn(x).view(batch, seq, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        q, k, v = qkv.unbind()
        if cache is not None:
            k, v = cache.update(self.layer, qkv[1:])  # each (B, H, S, D), views of the cache
        attend = self.sdpa if self.attention == "sdpa" else self.eager
        y = attend(q, k, v, mask)
        y = self.c_proj(y.transpose(1, 2).reshape(batch, seq, -1).contiguous())  # (B, H, T, D) -> (B, T, C)
        return self.resid_dropout(y) if self.training else y


FASTER: dict[type[nn.Module], type[nn.Module]] = {Conv1D: FastConv1D, CausalSelfAttention: FastAttention, MLP: FastMLP}
PLAINER = {fast: slow for slow, fast in FASTER.items()} | {FastLinear: nn.Linear}


def accelerate(model: Model) -> Model:
    """Give every part of ``model`` its fast class, in place; return ``model``.

    The Parameters, hooks and identities of the modules stay. Parts of other classes, subclasses included, stay as they
    are. The last bits of the logits may differ from the plain network's. ``plain`` undoes it.

    Args:
        model: a GPT2, or any module that contains parts of one.
    """
    _exchange(model, FASTER)
    head: Any = getattr(model, "lm_head", None)
    if type(head) is nn.Linear:
        head.__class__ = FastLinear
    if hasattr(model, "arithmetic"):
        vars(model)["arithmetic"] = "fast"
    return model


def plain(model: Model) -> Model:
    """Give every part of ``model`` its plain class back, in place; return ``model``.

    Raises:
        ConfigError: if the weights are int8: load the model again instead.
    """
    if getattr(model, "fast_head", None) is not None:
        raise ConfigError("model must have its original weights, got int8 weights; load it again")
    _exchange(model, PLAINER)
    if hasattr(model, "arithmetic"):
        vars(model)["arithmetic"] = "reference"
    return model


def affine_layers(model: nn.Module) -> list[str]:
    """Return the names of the affine layers that have a forward of ours and no hooks.

    It returns names, not modules, so that each layer is freed when another takes its place.
    """
    return [
        name
        for name, module in model.named_modules()
        if type(module) in (Conv1D, FastConv1D) and "forward" not in vars(module) and not has_hooks(module)
    ]


def _exchange(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> None:
    for part in model.modules():
        part.__class__ = classes.get(type(part), type(part))
