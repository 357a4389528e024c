"""What can be chosen beside a GPT-2's config, and the config.json that says what was."""

import copy
from typing import Any, NamedTuple, no_type_check

import transformers

import minigpt
from minigpt import norms
from minigpt.swap.saved import ARCHITECTURE, MODEL_TYPE, Norms, as_pairs, require_registered
from minigpt.swap.sites import require_patterns


class Choice(NamedTuple):
    """What a GPT-2 is built with that its checkpoint does not decide."""

    norm: Norms = "fused"
    arithmetic: str = "fast"

    def named(self) -> "Choice":
        """The same in the words that a config.json can hold: pairs, since the names of an object are sorted there."""
        pairs = [[site, norms.name_of(norm)] for site, norm in self.by_site()]
        return self._replace(norm=pairs[0][1] if [site for site, _ in pairs] == ["*"] else pairs)

    def by_site(self) -> list[tuple[str, norms.NormSpec]]:
        """Patterns of sites and the norm for each, in the order in which they are applied.

        Raises:
            NormError: a pattern is no text.
        """
        pairs = as_pairs(self.norm)
        require_patterns(pattern for pattern, _ in pairs)
        return pairs


@no_type_check  # its constructor takes any field that a config.json may have, whatever its signature says
class MiniGPT2Config(transformers.GPT2Config):
    """A GPT-2 whose norm or arithmetic was chosen: not to be read as one without the choice, hence the own type."""

    model_type = MODEL_TYPE

    norm: Any = "fused"
    arithmetic: str = "fast"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers' own, but that a choice among ``kwargs`` is left to the model, and code is not taken in.

        Raises:
            NormError: the fields name a norm that is not registered, and ``kwargs`` none: a downloaded file does not
                decide what is imported here.
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
        """The fields, under an architecture that no other program knows either."""
        return super().to_dict() | {"architectures": [ARCHITECTURE]}


@no_type_check
class FolderConfig(transformers.GPT2Config):
    """Reads a folder's config as what it says that it is: a GPT-2's, or one with a choice of its own."""

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own."""
        fields, _ = cls.get_config_dict(source, **kwargs)
        kind: Any = MiniGPT2Config if fields.get("model_type") == MiniGPT2Config.model_type else transformers.GPT2Config
        return kind.from_pretrained(source, *args, **kwargs)


def choice(config: transformers.GPT2Config, given: dict[str, Any], by_default: Choice) -> Choice:
    """What was chosen: in the call, else in the config, else by default."""
    of_config = {name: getattr(config, name) for name in Choice._fields if isinstance(config, MiniGPT2Config)}
    asked = {name: value for name, value in given.items() if value is not None}
    return by_default._replace(**of_config | asked)


def config_of(config: transformers.GPT2Config, chosen: Choice) -> transformers.GPT2Config:
    """``config`` as it says what was chosen: itself where that is nothing, else, or the other way, a copy."""
    named = chosen.named()
    kind = transformers.GPT2Config if named == Choice() else MiniGPT2Config
    if type(config) is not kind:
        config = copy.copy(config)
        for name in (*Choice._fields, "model_type"):
            vars(config).pop(name, None)
        config.__class__ = kind  # with all that transformers keeps in a config and no file holds
    if kind is MiniGPT2Config:
        for name, value in named._asdict().items():
            setattr(config, name, value)
    return config


def shape_of(config: transformers.GPT2Config) -> minigpt.GPT2Config:
    """Our config of the same network.

    Raises:
        ConfigError: the config asks for something that our network does not do.
    """
    fields = config.to_dict()
    for name in Choice._fields:
        fields.pop(name, None)
    return minigpt.GPT2Config.from_dict(fields | {"model_type": "gpt2"})
