"""The choice of norms and arithmetic beside a GPT-2's config, and how config.json says it."""

import copy
from typing import Any, NamedTuple, no_type_check

import transformers

from minigpt import norms
from minigpt.checkpoint.norms import ARCHITECTURE, MODEL_TYPE, Norms, Pairs, as_pairs, require_registered
from minigpt.choices import ARITHMETICS, check_option
from minigpt.config import OTHER_NETWORKS
from minigpt.errors import ConfigError

# Fields of other networks than ours that transformers' GPT-2, whose forward is inherited here, computes.
HONOURED = ("add_cross_attention", "is_encoder_decoder", "quantization_config")


class Choice(NamedTuple):
    """What a GPT-2 is built with that its checkpoint does not decide."""

    norm: Norms = "fused"
    arithmetic: str = "fast"

    def named(self) -> "Choice":
        """Return the choice in words that a config.json can hold. Pairs keep their order there, unlike an object."""
        pairs = [[site, norms.name_of(norm)] for site, norm in self.by_site()]
        return self._replace(norm=pairs[0][1] if [site for site, _ in pairs] == ["*"] else pairs)

    def by_site(self) -> Pairs:
        """Return patterns of sites and the norm for each, in the order in which they are applied."""
        return as_pairs(self.norm)


@no_type_check  # its constructor takes any field that a config.json may have, not only those of its signature
class MiniGPT2Config(transformers.GPT2Config):
    """The config of a GPT-2 with a chosen norm or arithmetic. Its own type says that it is not a plain GPT-2."""

    model_type = MODEL_TYPE

    norm: Any = "fused"
    arithmetic: str = "fast"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the fields as transformers does, and leave a choice among ``kwargs`` to the model.

        Raises:
            NormError: if the fields name a norm that is not registered and ``kwargs`` gives none. A downloaded file
                does not decide what is imported here.
        """
        chosen = {name: kwargs.pop(name) for name in Choice._fields if name in kwargs}
        if "norm" not in chosen:
            require_registered(config_dict.get("norm", "fused"))
        unused = kwargs.get("return_unused_kwargs", False)
        made: Any = super().from_dict(config_dict, **kwargs)
        if unused:
            return made[0], made[1] | chosen
        for name, value in Choice(**chosen).named()._asdict().items():
            if name in chosen:
                setattr(made, name, value)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, under an architecture that no other program knows."""
        return super().to_dict() | {"architectures": [ARCHITECTURE]}


@no_type_check
class PlainConfig(transformers.GPT2Config):
    """Reads a GPT-2's config while our class is registered for it, and a folder's config as the type that it names.

    Some tools, TRL among them, load the class that ``architectures`` names, past the Auto classes. Here it names ours,
    which ``register`` adds to ``transformers``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' own config: the Auto classes look a model up by its exact type."""
        return transformers.GPT2Config(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the fields as transformers does."""
        if config_dict.get("architectures") == ["GPT2LMHeadModel"]:
            config_dict = config_dict | {"architectures": [ARCHITECTURE]}
        return transformers.GPT2Config.from_dict(config_dict, **kwargs)

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Read ``source`` as transformers does: a plain GPT-2, or one with a choice."""
        fields, _ = cls.get_config_dict(source, **kwargs)
        kind: Any = MiniGPT2Config if fields.get("model_type") == MODEL_TYPE else transformers.GPT2Config
        return kind.from_pretrained(source, *args, **kwargs)


def choice(config: transformers.GPT2Config, in_call: dict[str, Any], by_default: Choice) -> Choice:
    """Return what was chosen: in the call, else in the config, else by default.

    Raises:
        ConfigError: if the arithmetic is unknown, or the config is for another network.
    """
    of_config = {name: getattr(config, name) for name in Choice._fields if isinstance(config, MiniGPT2Config)}
    chosen = by_default._replace(**of_config | {name: value for name, value in in_call.items() if value is not None})
    check_option("arithmetic", chosen.arithmetic, ARITHMETICS)
    fields = (name for name, value in vars(config).items() if value and name not in HONOURED)
    if other := sorted(filter(OTHER_NETWORKS.fullmatch, fields)):
        raise ConfigError(f"{other[0]} is of another network than GPT-2, whose logits would differ; remove it to load")
    return chosen


def config_of(config: transformers.GPT2Config, chosen: Choice) -> transformers.GPT2Config:
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
