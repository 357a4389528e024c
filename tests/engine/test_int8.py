"""Weights in eight bits: the rounding is theirs alone, and what cannot be honoured is refused."""

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, saved
from helpers import LouderConv1D, assert_same_bits, assert_within, make_louder, random_ids, rms, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import minigpt
from minigpt import CheckpointError, ConfigError, NormError
from minigpt.engine.int8 import SCALE_BYTES, Int8Linear, panels_of, quantize_int8
from minigpt.model.mlp import Conv1D


def rounded(rows: Tensor) -> Tensor:
    """What rounding to eight bits by blocks makes of a weight, in float64."""
    panels = panels_of(rows)  # (panels, blocks, bytes): 16 scales, then 64 inputs of 16 outputs, four of each in a row
    whole = panels[..., SCALE_BYTES:].view(torch.int8).unflatten(-1, (-1, 16, 4))[..., [0, 2, 1, 3]]
    values = whole.double() * panels[..., :SCALE_BYTES].contiguous().view(torch.float32)[:, :, None, :, None]
    return values.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1).flatten(1)[: len(rows), : rows.shape[1]]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5), width=st.integers(1, 150), out=st.integers(1, 70),
    bias=st.booleans(), spread=st.floats(1e-3, 1e3), outlier=st.floats(1, 300),
)  # fmt: skip
def test_only_the_weights_are_rounded(
    seed: int, count: int, width: int, out: int, bias: bool, spread: float, outlier: float
) -> None:
    """Against float64 with the rounded weights, an input with one value far beyond the others included."""
    torch.manual_seed(seed)
    rows, shift, x = torch.randn(out, width) * spread, torch.randn(out), torch.randn(1, count, width)
    x[..., 0] *= outlier
    layer = Int8Linear(rows, nn.Parameter(shift) if bias else None)
    with torch.no_grad():
        given, target = layer(x), x.double() @ rounded(rows).t() + (shift.double() if bias else 0)
    # an input is off by half of its finest step, 1 / (2 * 254 * 127) of the largest value of its block
    bound = x.abs().amax().item() * width * rows.abs().amax().item() / (4 * 127**2) + 4e-6 * target.abs().amax()
    assert_within((given - target).abs().amax().item(), float(bound), rms(target), f"{count} x {width} x {out}")


def test_weights_are_off_by_half_a_step_of_their_block() -> None:
    rows = torch.randn(33, 200) * torch.logspace(-3, 3, 200)
    step = torch.cat([block.abs().amax(1, keepdim=True).expand_as(block) for block in rows.split(64, dim=1)], 1) / 127
    assert ((rounded(rows) - rows).abs() <= 0.501 * step).all()


def test_rows_of_zeros_are_zeros_and_nan_stays_nan() -> None:
    rows = torch.randn(6, 8)
    rows[2] = 0
    layer = Int8Linear(rows, None)
    x = torch.randn(1, 3, 8)
    x[0, 1], x[0, 2, 4] = 0, torch.nan
    with torch.no_grad():
        y = layer(x)[0]
    assert y[0].isfinite().all()
    assert not y[1].any()
    assert not y[:2, 2].any()
    assert y[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_one_of_rounded_weights(tied: bool, dtype: torch.dtype) -> None:
    model, target = (small_model(dtype=dtype, tie_word_embeddings=tied) for _ in range(2))
    ids = random_ids(2, 17)
    with torch.inference_mode():
        exact = target(ids).double()
        head = target.wte.weight.double() if tied else target.lm_head.weight.double()
        for module in target.h.modules():
            if isinstance(module, Conv1D):
                module.weight.copy_(rounded(module.weight.t()).t())
        truth = target.hidden_states(ids).double() @ rounded(head).t()
        given = quantize_int8(model)(ids).double()
    cost = rms(truth - exact)
    assert cost > 0.01, "nothing was rounded"
    assert_within(rms(given - truth), 0.03 * cost if dtype != torch.bfloat16 else cost, rms(truth), f"cost {cost:.3g}")


def test_the_perplexity_of_the_demo_hardly_moves() -> None:
    text = "Once upon a time there was a dog who lived by the sea. Every morning it ran to the harbour and back."
    ids = torch.tensor([minigpt.Tokenizer.from_pretrained("demo").encode(text)])
    losses = []
    for quantize in (None, "int8"):
        with torch.inference_mode():
            logits = minigpt.from_pretrained("demo", device="cpu", quantize=quantize)(ids)[0, :-1]
        losses.append(nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item())
    assert_within(abs(losses[1] / losses[0] - 1), 0.05, losses[0], "relative change of perplexity on one text")


def test_loading_and_saving(tmp_path: Path) -> None:
    place = saved(reference(), tmp_path / "in")
    model = minigpt.from_pretrained(place, quantize="int8")
    assert model.quantize == "int8"
    assert not model.training
    with pytest.raises(CheckpointError, match="int8 weights cannot be saved"):
        minigpt.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(NormError):
        minigpt.fold_norms(model)
    assert len(minigpt.swap_norms(model, "textbook")) == len(model.site_names())
    assert model(torch.zeros(1, 3, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"quantize": "int4"}, "quantize must be int8, got 'int4'"),
        ({"quantize": "int8", "arithmetic": "reference"}, 'quantize="int8" needs arithmetic="fast"'),
        ({"quantize": "int8", "device": "meta"}, "weights of eight bits are for the CPU, got meta"),
    ],
)
def test_what_cannot_be_honoured_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        minigpt.from_pretrained("demo", **how)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = small_model()
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight[3, 4] = torch.inf
    modules, state = [type(part) for part in model.modules()], copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"must be finite to be quantized, got NaN or infinity in h\.1\.mlp\.c_fc"):
        quantize_int8(model)
    assert [type(part) for part in model.modules()] == modules
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_hook(lambda module, given, y: y * 0),
        lambda layer: setattr(layer, "__class__", LouderConv1D),
        make_louder,
    ],
    ids=["watched", "of another class", "with a forward of its own"],
)
def test_a_layer_that_somebody_has_changed_stays_as_it_is(change: Callable[[Any], object]) -> None:
    model = small_model()
    change(model.h[0].mlp.c_fc)
    ids = random_ids(2, 5)
    expected = model(ids)
    quantize_int8(model)
    assert isinstance(model.h[0].mlp.c_fc, Conv1D)
    assert isinstance(model.h[1].mlp.c_fc, Int8Linear)
    assert rms(model(ids) - expected) < 0.02 * rms(expected)


@pytest.mark.parametrize("through", [pickle, ForkingPickler], ids=["a file", "another process"])
def test_it_can_be_sent(through: Any) -> None:
    model, ids = quantize_int8(small_model()), random_ids(2, 7)
    sent = through.loads(through.dumps(model))
    assert_same_bits(sent(ids), model(ids), "logits")
