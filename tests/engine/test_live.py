"""A reader that is alive while its model is changed: it reads with the model as it is now."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_within, rms, small_model
from torch import Tensor, nn

import minigpt
from minigpt import GPT2
from minigpt.engine import accelerate, kernel, quantize_int8
from minigpt.engine.int8 import drafter_of
from minigpt.engine.reader import Reader

pytestmark = pytest.mark.skipif(not kernel.is_at_hand(), reason="the kernel was not built, or is turned off")

PROMPT, NEXT = [1, 2, 3], [4]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
PLACES = ["wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.1.ln_2.bias", "ln_f.weight", "ln_f.bias"]
PLACES += ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.bias", "h.1.mlp.c_fc.weight", "h.1.mlp.c_proj.bias"]


def model_of(dtype: torch.dtype, norm: str = "fused") -> GPT2:
    model = accelerate(small_model(norm, dtype=dtype)).eval()
    if norm == "frozen":
        for module in model.norm_modules().values():
            module.freeze(torch.tensor(2.0), torch.tensor(1.5))
            module.to(dtype)
    return model


def replaced(model: GPT2, place: str) -> None:
    owner, _, name = place.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.Parameter(model.get_parameter(place).detach() * 3))


@torch.no_grad()
def in_place(model: GPT2, place: str) -> None:
    model.get_parameter(place).mul_(3)


def behind_autograd(model: GPT2, place: str) -> None:
    model.get_parameter(place).data.mul_(3)


def other_memory(model: GPT2, place: str) -> None:
    model.get_parameter(place).data = model.get_parameter(place).data * 3


def logits_after(model: GPT2, change: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """Return the logits of a reader and of the modules, whose model is changed between two texts."""
    reader = Reader(model, 2, 16)
    assert reader.kernel is not None
    reader.read({0: PROMPT})
    before = model(torch.tensor([PROMPT + NEXT]))[0, -1]
    change()
    read = reader.read({1: PROMPT + NEXT})[0]
    with torch.no_grad():
        true = copy.deepcopy(model).float()(torch.tensor([PROMPT + NEXT]))[0, -1]
    assert rms(before - true) > 1e-3 * rms(true)
    return read.float(), true


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("change", [replaced, in_place, behind_autograd, other_memory])
def test_a_changed_parameter_is_seen(change: Callable[[GPT2, str], None], dtype: torch.dtype) -> None:
    for place in PLACES:
        model = model_of(dtype)
        read, true = logits_after(model, lambda model=model, place=place: change(model, place))
        assert_within(rms(read - true), BOUNDS[dtype] * rms(true), rms(true), place)


def rewritten(model: Any) -> None:
    model.ln_f.calibration.data.mul_(3)


def set_anew(model: Any) -> None:
    model.ln_f.freeze(torch.tensor(5.0), torch.tensor(7.0))
    model.ln_f.to(model.wte.weight.dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("change", [rewritten, set_anew])
def test_changed_constants_of_a_frozen_norm_are_seen(change: Callable[[Any], None], dtype: torch.dtype) -> None:
    model = model_of(dtype, "frozen")
    read, true = logits_after(model, lambda: change(model))
    assert_within(rms(read - true), BOUNDS[dtype] * rms(true), rms(true), change.__name__)


def doubled(_: object, __: object, output: Tensor) -> Tensor:
    return 2 * output


ATTRIBUTES: dict[str, Callable[[Any], object]] = {
    "eps": lambda model: setattr(model.ln_f, "eps", 1.0),
    "scale of the scores": lambda model: setattr(model.h[0].attn, "scale", 2.0),
    "activation": lambda model: setattr(model.h[0].mlp, "act", torch.sin),
    "hook": lambda model: model.ln_f.register_forward_hook(doubled),
    "norm": lambda model: minigpt.swap_norms(model, "no_scale", "ln_f"),
    "head": lambda model: untied(model),
}


def untied(model: Any) -> None:
    """Give the model a head of its own, as ``fold_norms`` does."""
    model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
    model.lm_head = nn.Linear(model.config.n_embd, model.config.vocab_size, bias=False)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_changed_attribute_is_seen(name: str) -> None:
    model = model_of(torch.float32)
    read, true = logits_after(model, lambda: ATTRIBUTES[name](model))
    assert_within(rms(read - true), 1e-5 * rms(true), rms(true), name)


def test_a_model_of_eight_bits_is_seen_too() -> None:
    for place in ("ln_f.weight", "h.0.attn.c_proj.bias"):
        model = quantize_int8(model_of(torch.float32))
        read, true = logits_after(model, lambda model=model, place=place: replaced(model, place))
        assert_within(rms(read - true), 2e-2 * rms(true), rms(true), place)


@pytest.mark.parametrize("change", [replaced, in_place, other_memory])
def test_drafts_are_of_the_changed_weights(change: Callable[[GPT2, str], None]) -> None:
    model = model_of(torch.float32)
    drafter = drafter_of(model)
    assert not drafter.is_outdated()
    change(model, "h.0.mlp.c_fc.weight")
    assert drafter.is_outdated()
