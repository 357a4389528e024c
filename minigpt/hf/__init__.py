"""minigpt's norms and layers inside transformers' tools: ``generate``, ``pipeline``, ``Trainer``, TRL, PEFT, lm-eval.

After ``register()``, ``AutoModelForCausalLM`` loads a GPT-2 with the norm that you ask for::

    minigpt.hf.register()
    model = AutoModelForCausalLM.from_pretrained("gpt2", norm="textbook")
    model = AutoModelForCausalLM.from_pretrained("gpt2", norm={"h.*.ln_1": "rms"})  # at some sites

The model is a subclass of transformers' own ``GPT2LMHeadModel``, and takes and returns the same. With
``arithmetic="reference"`` its logits have the same bits.

With nothing chosen it saves a plain GPT-2, for every program that reads one. With a chosen norm or arithmetic, the
folder's ``model_type`` is "minigpt-gpt2" and its config.json names the choice. Loading it here restores the choice. The
Auto classes elsewhere refuse it; ``transformers.GPT2LMHeadModel.from_pretrained`` reads it with a warning.

PEFT knows the layers of a plain GPT-2. With a choice, name them as ``target_modules``.
"""

from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, GPT2Config

from minigpt.checkpoint.norms import Norms
from minigpt.hf.model import Choice, ChosenParts, GPT2LMHeadModel, GPT2Model, MiniGPT2Config

__all__ = ["GPT2LMHeadModel", "GPT2Model", "MiniGPT2Config", "register", "unregister"]


def register(*, norm: Norms = "fused", arithmetic: str = "fast") -> None:
    """Let ``AutoModelForCausalLM`` load GPT-2 with our class, until ``unregister``.

    It does so for ``model_type`` "gpt2", in place of transformers' class, and for "minigpt-gpt2". transformers' own
    classes, for this task and for others, stay what they are.

    Args:
        norm: the norm of a model if the call and its folder name none. A norm as ``minigpt.GPT2`` takes it, or
            a dict from patterns of sites to norms, applied in order.
        arithmetic: "fast" or "reference", if the call and the folder name none.
    """
    ChosenParts.by_default = Choice(norm, arithmetic)
    CONFIG_MAPPING.register(MiniGPT2Config.model_type, MiniGPT2Config, exist_ok=True)
    for config in (GPT2Config, MiniGPT2Config):  # some versions' own ``register`` skips transformers' configs
        _registered(MODEL_FOR_CAUSAL_LM_MAPPING)[config] = GPT2LMHeadModel


def unregister() -> None:
    """Give GPT-2 back to transformers. Loaded models stay as they are."""
    ChosenParts.by_default = Choice()
    _registered(CONFIG_MAPPING).pop(MiniGPT2Config.model_type, None)
    for config in (GPT2Config, MiniGPT2Config):
        _registered(MODEL_FOR_CAUSAL_LM_MAPPING).pop(config, None)


def _registered(mapping: Any) -> dict[Any, Any]:
    """Return what was added to one of transformers' mappings, which have no method to remove it again."""
    return mapping._extra_content
