"""transformers' GPT-2 with minigpt's layers in it.

Both classes are subclasses of transformers' own. They inherit its forward, its caches, its attention functions and
everything that its tools look for. What changes are the blocks: they hold the norms that were chosen and, in fast
arithmetic, minigpt's affine layers. All module names and Parameters are transformers' own. The config carries the
choice, and config.json says it.
"""

import copy
import inspect
import itertools
from typing import Any, ClassVar, NamedTuple, no_type_check

import torch
import transformers
from torch import nn
from transformers import initialization
from transformers.activations import ACT2FN
from transformers.models.gpt2 import modeling_gpt2
from transformers.pytorch_utils import Conv1D

from minigpt import norms
from minigpt.checkpoint.norms import ARCHITECTURE, Norms, Pairs, as_pairs, require_registered
from minigpt.choices import ARITHMETICS, MINIGPT_TYPE, check_option
from minigpt.config import OTHER_NETWORKS
from minigpt.engine import parts
from minigpt.errors import ConfigError, NormError
from minigpt.norms.foreign.adapt import eps_of
from minigpt.norms.frozen import tell_positions
from minigpt.norms.record import ATTRIBUTE, NormRecord, record_of
from minigpt.swap import match_sites

# Fields of other networks than ours that transformers' GPT-2, whose forward is inherited here, computes.
HONOURED = ("add_cross_attention", "is_encoder_decoder", "quantization_config")


class Choice(NamedTuple):
    """The arguments of a GPT-2 that its checkpoint does not decide."""

    norm: Norms = "fused"
    arithmetic: str = "fast"

    def named(self) -> "Choice":
        """Return the choice in words that a config.json can hold. Pairs keep their order there, unlike an object."""
        pairs = [[site, norms.name_of(norm)] for site, norm in self.by_site()]
        if len(pairs) == 1 and pairs[0][0] == "*":
            return self._replace(norm=pairs[0][1])
        return self._replace(norm=pairs)

    def by_site(self) -> Pairs:
        """Return patterns of sites and the norm for each, in the order in which they are applied."""
        return as_pairs(self.norm)


@no_type_check  # its constructor takes any field that a config.json may have, not only the fields of its signature
class MiniGPT2Config(transformers.GPT2Config):
    """The config of a GPT-2 with a chosen norm or arithmetic. Its own type says that it is not a plain GPT-2."""

    model_type = MINIGPT_TYPE

    norm: Any = None
    arithmetic: str | None = None

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Read the fields as transformers does: a plain GPT-2's are the fields of a model without a choice."""
        fields, unused = super().get_config_dict(*args, **kwargs)
        return fields | {"model_type": MINIGPT_TYPE}, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the fields as transformers does, and leave a choice among ``kwargs`` to the model.

        Raises:
            NormError: if the fields name a norm that is not registered and ``kwargs`` gives none. A downloaded file
                does not decide what is imported here.
        """
        chosen: dict[str, Any] = {}
        for name in Choice._fields:
            if name in kwargs:
                chosen[name] = kwargs.pop(name)
        if "norm" not in chosen:
            require_registered(config_dict.get("norm", "fused"))
        made: Any = super().from_dict(config_dict, **kwargs)
        if kwargs.get("return_unused_kwargs", False):
            config, unused = made
            return config, unused | chosen
        named = Choice(**chosen).named()._asdict()
        for name in chosen:
            setattr(made, name, named[name])
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, under an architecture that no other program knows."""
        return super().to_dict() | {"architectures": [ARCHITECTURE]}


def choice(config: transformers.GPT2Config, in_call: dict[str, Any], by_default: Choice) -> Choice:
    """Return what was chosen: in the call, else in the config, else by default.

    Raises:
        ConfigError: if the arithmetic is unknown, or the config is for another network.
    """
    chosen = by_default._asdict()
    for name in Choice._fields:
        if getattr(config, name, None) is not None:
            chosen[name] = getattr(config, name)
        if in_call[name] is not None:
            chosen[name] = in_call[name]
    check_option("arithmetic", chosen["arithmetic"], ARITHMETICS)
    others = []
    for name, value in vars(config).items():
        if value and name not in HONOURED and OTHER_NETWORKS.fullmatch(name):
            others.append(name)
    if others:
        raise ConfigError(
            f"{min(others)} is of another network than GPT-2, whose logits would differ; remove it to load"
        )
    return Choice(**chosen)


def config_for(config: transformers.GPT2Config, chosen: Choice) -> transformers.GPT2Config:
    """Return ``config`` if it says what was chosen, else a copy that does."""
    named = chosen.named()
    kind = transformers.GPT2Config if named == Choice() else MiniGPT2Config
    if type(config) is not kind:
        config = copy.copy(config)
        for name in (*Choice._fields, "model_type"):
            vars(config).pop(name, None)
        config.__class__ = kind  # a copy keeps what transformers stores in a config and no file holds
    if kind is MiniGPT2Config:
        for name, value in named._asdict().items():
            setattr(config, name, value)
    return config


class FastConv1D(parts.FastConv1D, Conv1D):
    """minigpt's fast affine layer. It is also transformers' ``Conv1D``, which PEFT and quantizers look for."""

    __repr__ = nn.Module.__repr__


_FORWARD = inspect.signature(modeling_gpt2.GPT2Model.forward)


def _tell_positions(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell frozen norms which rows are at position 0, from the arguments of the body's forward."""
    named = _FORWARD.bind(body, *args, **kwargs).arguments
    named |= named.pop("kwargs", {})
    position_ids = named.get("position_ids")
    cache = named.get("cache", named.get("past_key_values"))  # transformers 5.24 has renamed it
    if position_ids is None and cache is not None:
        rows = named.get("input_ids", named.get("inputs_embeds"))
        # A sum, since a static cache counts in a tensor, and an export cannot branch on it.
        position_ids = torch.arange(rows.shape[1], device=rows.device)[None] + cache.get_seq_length()
    tell_positions(body.norm_modules().values(), position_ids)


class ChosenParts(modeling_gpt2.GPT2PreTrainedModel):
    """The part that both models share: a choice of norms and arithmetic, which the config carries."""

    config_class: Any = MiniGPT2Config
    by_default: ClassVar[Choice] = Choice()

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: weights are filled by transformers' own functions, which know the loaded ones."""
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Fill what a checkpoint lacks. A norm's own values are those that it was built with."""
        super()._init_weights(module)
        for name, value in getattr(module, ATTRIBUTE, NormRecord()).initial.items():
            initialization.copy_(getattr(module, name), value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize as transformers does. The config no longer says how many ids of the old vocabulary are in use."""
        before = self.config.vocab_size
        embeddings: Any = super().resize_token_embeddings(*args, **kwargs)
        if self.config.vocab_size != before:
            vars(self.config).pop("used_vocab_size", None)
        return embeddings

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does.

        Raises:
            NormError: if a norm is not the one that the config names, so that another model would be loaded.
        """
        chosen: Any = self.chosen
        check_norms(self.base_model, chosen, self.config.layer_norm_epsilon)
        super().save_pretrained(save_directory, *args, **kwargs)


class GPT2Model(ChosenParts, modeling_gpt2.GPT2Model):
    """The network without its head. ``minigpt.swap_norms`` and ``minigpt.fit_norms`` work on it.

    Args:
        config: a ``transformers.GPT2Config``.
        norm: a norm as ``minigpt.GPT2`` takes it, or a dict from patterns of sites to norms, applied in order.
        arithmetic: "fast", or "reference" for transformers' own bits.

    Raises:
        ConfigError: if the config is for another network, or ``arithmetic`` is unknown.
        NormError: if a norm is unknown, or a pattern matches no site.
    """

    def __init__(self, config: transformers.GPT2Config, norm: Any = None, arithmetic: str | None = None) -> None:
        self.chosen = choice(config, {"norm": norm, "arithmetic": arithmetic}, self.by_default)
        super().__init__(config_for(config, self.chosen))
        if self.chosen.arithmetic == "fast":
            self._accelerate()
        install_norms(self, self.chosen)
        self.register_forward_pre_hook(_tell_positions, with_kwargs=True)

    def _accelerate(self) -> None:
        for part in self.modules():
            if type(part) is Conv1D:
                part.__class__ = FastConv1D
            if isinstance(part, modeling_gpt2.GPT2MLP) and self.config.activation_function == "gelu_new":
                part.act = ACT2FN["gelu_pytorch_tanh"]  # the same function in one call

    def site_names(self) -> list[str]:
        """Return the names of the norms in the order of the data: h.0.ln_1, h.0.ln_2, ..., ln_f.

        A decoder with cross-attention has a third norm in each block, h.0.ln_cross_attn, between the two.
        """
        names = []
        for layer, block in enumerate(self.h):
            for name in ("ln_1", "ln_cross_attn", "ln_2"):
                if hasattr(block, name):
                    names.append(f"h.{layer}.{name}")
        return [*names, "ln_f"]

    def norm_modules(self) -> dict[str, nn.Module]:
        """Return the norms by their names, in the same order."""
        return {site: self.get_submodule(site) for site in self.site_names()}


class GPT2LMHeadModel(ChosenParts, modeling_gpt2.GPT2LMHeadModel):
    """GPT-2 with a language-model head: what ``AutoModelForCausalLM`` gives after ``minigpt.hf.register()``.

    Args and errors are as for ``GPT2Model``, which it holds as ``transformer``.
    """

    def __init__(self, config: transformers.GPT2Config, norm: Any = None, arithmetic: str | None = None) -> None:
        self.chosen = choice(config, {"norm": norm, "arithmetic": arithmetic}, self.by_default)
        modeling_gpt2.GPT2PreTrainedModel.__init__(self, config_for(config, self.chosen))
        self.transformer = GPT2Model(self.config, self.chosen.norm, self.chosen.arithmetic)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Keep the choice, which ``from_pretrained`` passes on, out of the generation settings."""
        for name in Choice._fields:
            kwargs.pop(name, None)
        mixin: Any = super()
        mixin.adjust_generation_fn(*args, **kwargs)


def install_norms(body: Any, chosen: Choice) -> None:
    """Build the chosen norms into ``body``. Each keeps a copy of the values that it was built with.

    They are built on the CPU even if the model is on the meta device. A norm may have values that the checkpoint
    lacks, and on the meta device they would be lost.
    """
    device = body.wte.weight.device
    for site, norm in norm_by_site(body, chosen).items():
        with torch.device("cpu"):
            built = norms.build(norm, body.config.n_embd, eps=body.config.layer_norm_epsilon)
        body.set_submodule(site, built)
        for part in built.modules():
            tensors = itertools.chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
            record_of(part).initial = {name: tensor.detach().clone() for name, tensor in tensors}
        built._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def norm_by_site(body: Any, chosen: Choice) -> dict[str, norms.NormSpec]:
    """Return the chosen norm of every site. A later pattern overrides an earlier one."""
    by_site: dict[str, norms.NormSpec] = {}
    for pattern, norm in [("*", "fused"), *chosen.by_site()]:
        for site in match_sites(body, pattern):
            by_site[site] = norm
    return by_site


def check_norms(body: Any, chosen: Choice, eps: float) -> None:
    """Check that a saved model would load with the norms that it has.

    Args:
        eps: what the config says now. It may have changed since the norms were built.

    Raises:
        NormError: the message names the site.
    """
    for site, norm in norm_by_site(body, chosen).items():
        expected = norms.build(norm, body.config.n_embd, eps=eps)
        if _kind(body.get_submodule(site)) != _kind(expected):
            raise NormError(
                f"{site} is not as the config says, so what is saved would load as another model; choose norms and eps "
                "by from_pretrained(..., norm=..., layer_norm_epsilon=...), or keep the state_dict"
            )


def _kind(norm: nn.Module) -> tuple[Any, ...]:
    """Return what must be the same in two norms: their classes, the names of what they hold, and eps."""
    return [type(part) for part in norm.modules()], norm.state_dict().keys(), eps_of(norm)
