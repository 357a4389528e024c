"""The fast classes: what ``accelerate`` changes, ``plain`` changes back, and state_dict never shows."""

from pathlib import Path

import pytest
import torch
from helpers import LouderConv1D, assert_close, assert_same_bits, random_ids, small_model

import minigpt
from minigpt import CheckpointError, ConfigError
from minigpt.engine import accelerate, plain, quantize_int8
from minigpt.engine.parts import arithmetic_of
from minigpt.engine.supported import why_not


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_fast_model_is_the_same_model(tied: bool) -> None:
    model, ids = small_model(arithmetic="reference", tie_word_embeddings=tied), random_ids(2, 7)
    expected, names, parameters = model(ids), [*model.state_dict()], [*map(id, model.parameters())]
    classes = [type(part) for part in model.modules()]
    assert accelerate(model) is model
    assert (model.arithmetic, model.quantize) == ("fast", None)
    assert ([*model.state_dict()], [*map(id, model.parameters())]) == (names, parameters)
    assert_close(model(ids), expected, 1e-5, "fast")
    assert plain(accelerate(model)) is model
    assert arithmetic_of(model) == "reference"
    assert [type(part) for part in model.modules()] == classes
    assert_same_bits(model(ids), expected, "plain again")


@torch.no_grad()
def test_parts_of_other_classes_stay() -> None:
    class Halved(minigpt.GPT2):
        def head(self, x: torch.Tensor) -> torch.Tensor:
            return super().head(x) / 2

    model, ids = small_model(arithmetic="reference"), random_ids(1, 6)
    model.h[1].mlp.c_fc.__class__ = LouderConv1D
    expected = model(ids) / 2
    model.__class__ = Halved
    assert type(accelerate(model)) is Halved
    assert type(model.h[1].mlp.c_fc) is LouderConv1D
    assert_close(model(ids), expected, 1e-5, "a subclass's head and a layer of another class")
    assert why_not(model) is not None, "the kernel would compute GPT-2's own head"


@pytest.mark.parametrize("tied", [True, False])
def test_an_int8_head_stands_at_lm_head(tied: bool, tmp_path: Path) -> None:
    model = quantize_int8(small_model(tie_word_embeddings=tied))
    assert model.quantize == "int8"
    assert "lm_head" in dict(model.named_children())
    assert not any(name.startswith("lm_head") for name in model.state_dict())
    for refused, kind in (
        (plain, ConfigError),
        (lambda model: minigpt.save_pretrained(model, tmp_path), CheckpointError),
    ):
        with pytest.raises(kind, match="int8"):
            refused(model)
    with pytest.raises(ConfigError, match="fast"):
        quantize_int8(small_model(arithmetic="reference"))
