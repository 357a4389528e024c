"""The frozen norm divides position 0 by one constant and all others by another, however a text is read."""

import contextlib
import copy
import inspect
from collections.abc import Callable

import pytest
import torch
import transformers
from helpers import random_ids
from torch import Tensor

import minigpt
from minigpt import hf
from minigpt.engine.kernel import is_at_hand
from minigpt.engine.step import StepKernel
from minigpt.study.training import as_transformers

PAST = 7  # tokens that are read before the others


@pytest.fixture(scope="module")
def model() -> minigpt.GPT2:
    model = minigpt.from_pretrained("demo", norm="frozen", fit=__file__, device="cpu", dtype="float64")
    for norm in model.norm_modules().values():
        norm.calibration = norm.calibration * torch.tensor([1.0, 1.5])  # far from what a wrong row would get
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(2, 20)


def with_a_cache(model: minigpt.GPT2, ids: Tensor) -> Tensor:
    cache = model.new_cache(*ids.shape)
    parts = [ids[:, :1], ids[:, 1:PAST], *ids[:, PAST:].split(1, dim=1)]
    return torch.cat([model(part, cache=cache) for part in parts], dim=1)


def padded(model: minigpt.GPT2, ids: Tensor) -> Tensor:
    """Each row in a batch of its own with a longer one, padded on the left."""
    rows = torch.stack([torch.cat([row.new_zeros(5), row]) for row in ids])
    mask = torch.ones_like(rows)
    mask[:, :5] = 0
    return model(rows, mask)[:, 5:]


def by_transformers(model: minigpt.GPT2, ids: Tensor) -> Tensor:
    """With transformers' cache, in a copy of our class for it."""
    body = copy.deepcopy(as_transformers(model, minigpt.Recipe(device="cpu"))).eval()
    assert isinstance(body, hf.GPT2LMHeadModel)
    cache = transformers.DynamicCache()
    named = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    parts = [body(part, use_cache=True, **{named: cache}).logits for part in ids.tensor_split([PAST], dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("read", [with_a_cache, padded, by_transformers])
@torch.no_grad()
def test_position_0_is_position_0_however_a_text_is_read(
    model: minigpt.GPT2, ids: Tensor, read: Callable[[minigpt.GPT2, Tensor], Tensor]
) -> None:
    expected = model(ids)
    torch.testing.assert_close(read(model, ids), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=0)  # nothing of another reading is left


@torch.no_grad()
def test_each_of_several_texts_in_a_row_begins_at_position_0(model: minigpt.GPT2) -> None:
    norm = model.ln_f
    norm.is_first = torch.tensor([[0, 1, 2, 0, 1]]) == 0
    x = torch.randn(3, 5, model.config.n_embd, dtype=torch.float64)
    usual, first = norm.calibration
    constant = torch.stack([first, usual, usual, first, usual])[:, None]
    try:
        expected = (x - x.mean(-1, keepdim=True)) / constant * norm.weight + norm.bias
        torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    finally:
        norm.is_first = None


@torch.no_grad()
def test_a_model_says_positions_while_it_reads_and_not_after(model: minigpt.GPT2) -> None:
    norm, x = model.ln_f, torch.randn(1, 3, model.config.n_embd, dtype=torch.float64)
    alone, later = norm(x), torch.tensor([[1, 2, 3]])
    with contextlib.suppress(KeyError), minigpt.norms.AtPositions(later):
        difference = (norm(x) - alone).abs().amax(-1)[0]
        assert difference[0] > 0.1, "position 1 is not divided as position 0 is"
        assert torch.equal(difference[1:], torch.zeros(2, dtype=torch.float64))
        raise KeyError
    assert torch.equal(norm(x), alone)


@pytest.mark.skipif(not is_at_hand(), reason="the kernel was not built")
@torch.no_grad()
def test_the_kernel_divides_by_position(model: minigpt.GPT2, ids: Tensor) -> None:
    single = minigpt.engine.accelerate(copy.deepcopy(model).float()).eval()
    step, cache = StepKernel(single), single.new_cache(2, ids.shape[1])
    length = ids.shape[1]
    slots, columns = [0] * length + [1] * length, [*range(length)] * 2
    logits = step(ids.flatten().tolist(), slots, columns, cache.store)
    torch.testing.assert_close(logits.view(2, length, -1).double(), model(ids), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_it_is_linear_beside_its_mean_and_takes_the_mean_deviations(ids: Tensor) -> None:
    norm = minigpt.norms.build("frozen", 48).double()
    x = torch.randn(8, 9, 48, dtype=torch.float64) * torch.arange(1, 10)[:, None]
    norm.calibrate(x)
    deviation = (x.var(-1, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(norm.calibration, torch.stack([deviation[:, 1:].mean(), deviation[:, 0].mean()]))
    bias = norm(torch.zeros_like(x))
    torch.testing.assert_close(norm(100 * x) - bias, 100 * (norm(x) - bias))


def test_constants_of_an_earlier_rule_are_refused_unless_there_is_one_for_all() -> None:
    norm, state = minigpt.norms.build("frozen", 8), minigpt.norms.build("fused", 8).state_dict()
    norm.load_state_dict(state | {"calibration": torch.tensor([2.0, 2.0, torch.inf])})
    assert norm.calibration.tolist() == [2.0, 2.0]
    with pytest.raises(minigpt.NormError, match="an earlier version chose the constant by another rule"):
        norm.load_state_dict(state | {"calibration": torch.tensor([2.0, 9.0, 4.0])})
