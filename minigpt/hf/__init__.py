"""Our blocks inside transformers' own tools: ``generate``, ``pipeline``, ``Trainer``, PEFT, lm-eval's ``hf`` model.

After ``register()`` a GPT-2 that ``AutoModelForCausalLM`` loads is a ``PreTrainedModel`` on our network, with the norm
that was asked for::

    minigpt.hf.register()
    model = AutoModelForCausalLM.from_pretrained("gpt2", norm="textbook")
    model = AutoModelForCausalLM.from_pretrained("gpt2", norm={"h.*.ln_1": "rms"})  # at some sites

What it saves is a plain GPT-2, for every program that reads one, as long as nothing is chosen. With a norm or an
arithmetic of its own the folder's ``model_type`` is "minigpt-gpt2" and its config.json names the choice: here it is
honoured when the folder is loaded again, and no Auto class of transformers reads it as something else; its
``GPT2LMHeadModel.from_pretrained`` by name does, with a warning.

Trainer divides our loss by the tokens that are predicted, T - 1 of a row's T; that of transformers' own GPT-2 by all T.
PEFT knows the layers of a plain GPT-2 by itself; with a choice, name them as ``target_modules``.
"""

from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, GPT2Config

from minigpt.hf.config import Choice, MiniGPT2Config
from minigpt.hf.model import GPT2LMHeadModel
from minigpt.swap.saved import Norms

__all__ = ["GPT2LMHeadModel", "MiniGPT2Config", "register", "unregister"]


def register(*, norm: Norms = "fused", arithmetic: str = "fast") -> None:
    """Let ``AutoModelForCausalLM`` answer for GPT-2 with our network, until ``unregister``.

    It answers so for ``model_type`` "gpt2", in place of transformers' own class, and for "minigpt-gpt2". transformers'
    ``GPT2LMHeadModel`` and its classes for other tasks stay what they are. A decoder that looks at an encoder too is
    still transformers' own; with a norm or an arithmetic chosen, it is refused.

    Args:
        norm, arithmetic: what a model gets that is loaded with neither in the call nor in its folder: as
            ``minigpt.GPT2`` takes them, ``norm`` also as a dict from patterns of sites to norms, applied in order.
    """
    GPT2LMHeadModel.by_default = Choice(norm, arithmetic)
    CONFIG_MAPPING.register(MiniGPT2Config.model_type, MiniGPT2Config, exist_ok=True)
    for config in (GPT2Config, MiniGPT2Config):  # some versions' own ``register`` passes over transformers' configs
        _registered(MODEL_FOR_CAUSAL_LM_MAPPING)[config] = GPT2LMHeadModel


def unregister() -> None:
    """Give GPT-2 back to transformers. Models that are loaded stay as they are."""
    GPT2LMHeadModel.by_default = Choice()
    _registered(CONFIG_MAPPING).pop(MiniGPT2Config.model_type, None)
    for config in (GPT2Config, MiniGPT2Config):
        _registered(MODEL_FOR_CAUSAL_LM_MAPPING).pop(config, None)


def _registered(mapping: Any) -> dict[Any, Any]:
    """What was added to one of transformers' mappings; there are no public words to take it away again."""
    return mapping._extra_content
