"""Where the weights lie changes neither what they are nor what a model says."""

from typing import Any

import pytest
import torch
from helpers import assert_same_bits, assert_within, left_padding, random_ids, rms, small_model

import minigpt
from minigpt.engine.layout import lay_by_rows
from minigpt.model.conv1d import Conv1D


def test_all_affine_weights_lie_by_rows_and_are_the_same() -> None:
    model = small_model()
    was = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    lay_at = [module.weight.data for module in model.modules() if isinstance(module, Conv1D)]
    lay_by_rows(model)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], "the same Parameter, as an optimizer may hold it"
        assert_same_bits(parameter, was[name], name)
    layers = [module for module in model.modules() if isinstance(module, Conv1D)]
    assert len(layers) == 4 * model.config.n_layer
    assert all(layer.weight.t().is_contiguous() for layer in layers)
    assert not {layer.weight.data_ptr() for layer in layers} & {weight.data_ptr() for weight in lay_at}


@pytest.mark.parametrize("batch", [1, 3, 8, 33])
def test_the_logits_stay_and_so_do_the_tokens(batch: int) -> None:
    model, ids = small_model(dtype=torch.float64), random_ids(batch, 9)
    mask = left_padding([1 + i % 9 for i in range(batch)], 9)
    with torch.inference_mode():
        logits = model(ids, mask)
    tokens = minigpt.generate(model, ids, mask, max_new_tokens=8, eos_token_id=None)
    lay_by_rows(model)
    with torch.inference_mode():
        assert_within(rms(model(ids, mask) - logits), 1e-14 * rms(logits), rms(logits), "by rows")
    assert torch.equal(minigpt.generate(model, ids, mask, max_new_tokens=8, eos_token_id=None), tokens)


@pytest.mark.parametrize("batch", [1, 2, 8, 40])
def test_attention_is_given_whole_vectors(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the library takes the long way round, without a word."""
    strides: list[int] = []
    whole = torch.nn.functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **how: Any) -> torch.Tensor:
        strides.extend(x.stride(-1) for x in (q, k, v))
        return whole(q, k, v, *more, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model = small_model()
    lay_by_rows(model)
    with torch.inference_mode():
        cache = model.new_cache(batch, 4)
        model(random_ids(batch, 3), cache=cache)
        model(random_ids(batch, 1), cache=cache)
    assert set(strides) == {1}
