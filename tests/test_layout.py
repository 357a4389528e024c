"""Where the weights lie changes neither what they are nor what a model says."""

import pytest
import torch
from helpers import assert_same_bits, assert_within, left_padding, random_ids, rms, small_model

import minigpt
from minigpt import ConfigError
from minigpt.model import lay_by_rows
from minigpt.model.conv1d import Conv1D


def test_all_affine_weights_lie_by_rows_and_are_the_same() -> None:
    model = small_model()
    was = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert lay_by_rows(model) is model
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], "the same Parameter, as an optimizer may hold it"
        assert_same_bits(parameter, was[name], name)
    layers = [module for module in model.modules() if isinstance(module, Conv1D)]
    assert len(layers) == 4 * model.config.n_layer
    assert all(layer.weight.t().is_contiguous() for layer in layers)


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


def test_reference_arithmetic_reads_the_checkpoints_layout() -> None:
    with pytest.raises(ConfigError, match="as the checkpoint lays them"):
        lay_by_rows(small_model(arithmetic="reference"))
