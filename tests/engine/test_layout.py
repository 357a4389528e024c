"""Where the weights lie changes neither what they are nor what a model says."""

from typing import Any

import pytest
import torch
from helpers import (
    assert_same_bits,
    assert_within,
    left_padding,
    needs_onednn,
    random_ids,
    rms,
    skip_unless_packable,
    small_model,
)

import minigpt
from minigpt import ConfigError
from minigpt.engine import layout
from minigpt.engine.int8 import quantize_int8
from minigpt.engine.layout import MANY, lay_by_rows, lay_out
from minigpt.engine.packed import PackedConv1D
from minigpt.model.conv1d import Conv1D
from minigpt.processor import HALVES


def test_all_affine_weights_lie_by_rows_and_are_the_same() -> None:
    model = small_model()
    was = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    lay_at = [module.weight.data for module in model.modules() if isinstance(module, Conv1D)]
    assert lay_by_rows(model) is model
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


def test_reference_arithmetic_reads_the_checkpoints_layout() -> None:
    with pytest.raises(ConfigError, match="in the checkpoint's layout"):
        lay_by_rows(small_model(arithmetic="reference"))


@pytest.mark.parametrize("batch", [1, 2, 8, 40])
def test_attention_is_given_whole_vectors(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the library takes the long way round, without a word."""
    strides: list[int] = []
    whole = torch.nn.functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **how: Any) -> torch.Tensor:
        strides.extend(x.stride(-1) for x in (q, k, v))
        return whole(q, k, v, *more, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model = lay_by_rows(small_model())
    with torch.inference_mode():
        cache = model.new_cache(batch, 4)
        model(random_ids(batch, 3), cache=cache)
        model(random_ids(batch, 1), cache=cache)
    assert set(strides) == {1}


@needs_onednn
@pytest.mark.parametrize(
    ("dtype", "tokens", "processor", "laid"),
    [
        (torch.float32, 1, "amd", "packed"),
        (torch.float32, 1, "intel", "as it lay"),
        (torch.float32, 2, "amd", "packed"),
        (torch.float32, 16, "intel", "by rows"),
        (torch.bfloat16, 1, "amd", "packed"),
        (torch.bfloat16, 1, "intel", "packed"),
        (torch.bfloat16, 1, "old", "by rows"),
        (torch.bfloat16, 16, "old", "by rows"),
        (torch.float16, 1, "old", "by rows"),
        (torch.float16, 1, "new", "as it lay"),
        (torch.float64, 16, "amd", "by rows"),
    ],
    ids=str,
)
def test_each_processor_gets_the_layout_that_it_reads_fastest(
    dtype: torch.dtype, tokens: int, processor: str, laid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if laid == "packed":
        skip_unless_packable(dtype)
    monkeypatch.setattr(layout, "why_not", lambda model: "the kernel is turned off")
    monkeypatch.setattr(layout, "PREFERS_ONEDNN", processor == "amd")
    monkeypatch.setattr(layout, "HAS_BFLOAT16", processor != "old")
    monkeypatch.setattr(layout, "SLOW_HALVES", HALVES if processor == "old" else ())
    model = small_model(dtype=dtype)
    assert lay_out(model, tokens) is model
    layer = model.h[1].mlp.c_fc
    unpacked = "as it lay" if layer.weight.is_contiguous() else "by rows"
    assert ("packed" if isinstance(layer, PackedConv1D) else unpacked) == laid


@needs_onednn
@pytest.mark.parametrize(
    ("dtype", "tokens", "steps", "is_packed"),
    [
        (torch.float32, 1, MANY - 1, False),
        (torch.float32, 1, MANY, True),
        (torch.float32, 2, 1, True),
        (torch.bfloat16, 1, 1, True),
    ],
    ids=str,
)
def test_a_short_text_in_float32_is_written_from_the_file(
    dtype: torch.dtype, tokens: int, steps: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_packed:
        skip_unless_packable(dtype)
    monkeypatch.setattr(layout, "why_not", lambda model: "the kernel is turned off")
    monkeypatch.setattr(layout, "PREFERS_ONEDNN", True)
    monkeypatch.setattr(layout, "HAS_BFLOAT16", True)
    model = lay_out(small_model(dtype=dtype), tokens, steps=steps)
    assert isinstance(model.h[1].mlp.c_fc, PackedConv1D) is is_packed


def test_nothing_is_laid_out_where_nothing_is_to_be_gained(device: torch.device) -> None:
    model = small_model(device=device) if device.type == "cuda" else quantize_int8(small_model())
    was = {name: id(module) for name, module in model.named_modules()}
    assert {name: id(module) for name, module in lay_out(model, 16).named_modules()} == was
