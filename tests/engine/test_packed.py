"""Packed weights are the same weights: in what the model says, in what is saved, and in copies."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    LouderConv1D,
    assert_close,
    assert_same_bits,
    assert_within,
    in_float64,
    left_padding,
    make_louder,
    needs_onednn,
    random_ids,
    reference_model,
    rms,
    same_weights,
    skip_unless_packable,
    small_model,
)

import minigpt
from minigpt import ConfigError
from minigpt.engine import lay_out, packed
from minigpt.engine.int8 import quantize_int8
from minigpt.engine.packed import PackedConv1D, PackedLinear, check_packable, pack
from minigpt.model.conv1d import Conv1D
from minigpt.processor import PACKABLE

pytestmark = needs_onednn

Hold = Callable[..., minigpt.GPT2]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
every_form = pytest.mark.parametrize("hold", [pack, partial(pack, tokens=5)], ids=["packed", "packed for five"])

PACKED = "float32 or bfloat16" if torch.bfloat16 in PACKABLE else "float32"
HALF_ROWS = torch.zeros(2, 3, dtype=torch.bfloat16)


@every_dtype
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [1, 37, 257])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (16, 1), (2, 20)])
def test_is_the_affine_product(shape: tuple[int, int], out: int, bias: bool, tokens: int, dtype: torch.dtype) -> None:
    skip_unless_packable(dtype)
    x, rows = torch.randn(*shape, 48).to(dtype)[..., ::2], torch.randn(out, 24).to(dtype)
    shift = torch.nn.Parameter(torch.randn(2 * out).to(dtype)[::2]) if bias else None
    truth = torch.nn.functional.linear(x.double(), rows.double(), None if shift is None else shift.double())
    with torch.inference_mode():
        layer = PackedLinear(rows, shift, tokens)
        given = layer(x)
    assert_same_bits(layer.rows(), rows, "the weight")
    assert given.shape == (*shape, out)
    assert given.dtype == dtype
    assert_within(rms(given.double() - truth), 2 * torch.finfo(dtype).eps * rms(truth), rms(truth), f"{shape}")


def through_a_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@every_dtype
@every_form
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_keeps_its_state(tied: bool, hold: Hold, dtype: torch.dtype) -> None:
    skip_unless_packable(dtype)
    model = small_model(dtype=dtype, tie_word_embeddings=tied)
    was = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert hold(model) is model
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    assert not any(module.training for module in model.modules())
    state = model.state_dict()
    assert state.keys() == was.keys()
    for name, weight in was.items():
        assert state[name].is_contiguous()
        assert_same_bits(state[name], weight, name)


@every_dtype
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("batch", "hold"),
    [(1, pack), (3, partial(pack, tokens=3)), (16, partial(pack, tokens=16))],
    ids=["1", "3", "16"],
)
def test_it_errs_no_more_than_the_reference(batch: int, hold: Hold, tied: bool, dtype: torch.dtype) -> None:
    """Prompt and steps, padded on the left, through a cache."""
    skip_unless_packable(dtype)
    theirs = reference_model(dtype=dtype, tie_word_embeddings=tied)
    ours, ids = hold(same_weights(theirs)), random_ids(batch, 30)
    mask = left_padding([12 + i % 9 for i in range(batch)], 20)
    whole = torch.cat([mask, torch.ones(batch, 10, dtype=mask.dtype)], dim=1)
    positions = (whole.cumsum(-1) - 1).clamp(min=0)
    cache = ours.new_cache(batch, 30)
    with torch.inference_mode():
        truth = in_float64(theirs)(ids, attention_mask=whole, position_ids=positions).logits
        wanted = theirs(ids, attention_mask=whole, position_ids=positions).logits
        given = [ours(ids[:, :20], mask, cache=cache)] + [ours(ids[:, t : t + 1], cache=cache) for t in range(20, 30)]
    real = whole.bool()
    floor, scale = rms(wanted.double()[real] - truth[real]), rms(truth[real])
    assert_within(rms(torch.cat(given, dim=1).double()[real] - truth[real]), 1.1 * floor, scale, f"(floor {floor:.3g})")


@every_form
@pytest.mark.parametrize("batch", [1, 5])
def test_what_it_writes_is_what_it_wrote(batch: int, hold: Hold, tmp_path: Path) -> None:
    model, ids = small_model(), random_ids(batch, 9)
    wanted = minigpt.generate(model, ids, max_new_tokens=20, eos_token_id=None)
    assert torch.equal(minigpt.generate(hold(model), ids, max_new_tokens=20, eos_token_id=None), wanted)
    minigpt.save_pretrained(model, tmp_path / "saved")
    again = minigpt.from_pretrained(tmp_path / "saved", device="cpu")
    assert torch.equal(minigpt.generate(again, ids, max_new_tokens=20, eos_token_id=None), wanted)


@every_form
def test_what_is_kept_of_it_is_no_larger_than_the_weights(hold: Hold) -> None:
    skip_unless_packable(torch.bfloat16)
    model = small_model(dtype=torch.bfloat16, n_embd=256, n_head=4)
    plain, head = len(pickle.dumps(model)), 2 * model.wte.weight.numel()
    hold(model)
    assert len(pickle.dumps(model.state_dict())) < 1.05 * plain
    assert len(pickle.dumps(model)) < 1.05 * (plain + head)


@every_dtype
@every_form
@pytest.mark.parametrize("through", [copy.deepcopy, through_a_pickle])
def test_a_copy_is_a_model_of_its_own(through: Any, hold: Hold, dtype: torch.dtype) -> None:
    skip_unless_packable(dtype)
    model, ids = hold(small_model(dtype=dtype)), random_ids(1, 5)
    other = through(model)
    numbers = [
        {module.number for module in which.modules() if isinstance(module, PackedLinear)} for which in (model, other)
    ]
    assert not numbers[0] & numbers[1]
    with torch.inference_mode():
        wanted = model(ids)
        del model
        assert_same_bits(other(ids), wanted, "the copy")


@every_form
@pytest.mark.parametrize("seq", [1, 5])
def test_a_cast_packs_anew(seq: int, hold: Hold) -> None:
    skip_unless_packable(torch.bfloat16)
    model, ids = small_model(), random_ids(1, seq)
    wanted = copy.deepcopy(model).to(torch.bfloat16)
    hold(model).to(torch.bfloat16)
    for name, weight in wanted.state_dict().items():
        assert_same_bits(model.state_dict()[name], weight, name)
    with torch.inference_mode():
        assert_within(rms(model(ids) - wanted(ids)), 0.02 * rms(wanted(ids)), rms(wanted(ids)), "bfloat16")


def test_how_many_tokens_may_be_numpys_number() -> None:
    model, ids = small_model(), random_ids(1, 3)
    wanted = model(ids)
    with torch.inference_mode():
        assert_close(lay_out(model, np.int64(2))(ids), wanted, 1e-5, "logits")


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: pack(small_model()).to("meta"), "packed weights are for the CPU, and cannot move to meta"),
        (lambda: pack(small_model()).half(), f"must be {PACKED} on this processor, got float16"),
        (
            lambda: pack(small_model(dtype=torch.float64)),
            f"must be {PACKED} on this processor, got float64",
        ),
        (lambda: check_packable(HALF_ROWS, (torch.float32,)), "must be float32 on this processor, got bfloat16"),
        (lambda: check_packable(HALF_ROWS, ()), "no oneDNN"),
        (lambda: pack(small_model(), 0), "tokens must be a whole number, 1 or more, got 0"),
        (lambda: lay_out(small_model(), 0), "tokens must be a whole number, 1 or more, got 0"),
        (lambda: lay_out(small_model(), "x"), "tokens must be a whole number, 1 or more, got 'x'"),  # type: ignore[arg-type]
        (lambda: pack(small_model(arithmetic="reference")), "in the checkpoint's layout"),
        (lambda: pack(quantize_int8(small_model())), "must not be quantized to be packed"),
        (lambda: quantize_int8(pack(small_model())), "must be as they were loaded to be quantized"),
        (lambda: pack(small_model()).load_state_dict(small_model().state_dict()), "load before packing"),
    ],
)
def test_misuse_is_one_sentence(misuse: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        misuse()


@every_form
@pytest.mark.parametrize("seq", [1, 5])
def test_it_asks_for_no_gradients(seq: int, hold: Hold) -> None:
    logits = hold(small_model())(random_ids(1, seq))
    assert not logits.requires_grad, "they would be those of the residual stream alone"


@every_form
def test_what_somebody_watches_or_has_changed_stays(hold: Hold) -> None:
    model, ids = small_model(), random_ids(2, 7)
    seen: list[str] = []
    model.h[0].mlp.c_fc.register_forward_hook(lambda *_: seen.append("c_fc"))
    model.h[1].attn.c_proj.__class__ = LouderConv1D
    make_louder(model.h[0].attn.c_attn)
    with torch.inference_mode():
        wanted = model(ids)
        assert_within(rms(hold(model)(ids) - wanted), 1e-6 * rms(wanted), rms(wanted), "packed")
    assert seen == ["c_fc", "c_fc"]


@every_dtype
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seq", [1, 3])
@torch.inference_mode()
def test_a_product_is_the_same_under_autocast(seq: int, narrow: torch.dtype, dtype: torch.dtype) -> None:
    skip_unless_packable(dtype)
    layer = PackedLinear(torch.randn(130, 40).to(dtype), torch.nn.Parameter(torch.randn(130).to(dtype)), 1)
    x = 1e5 * torch.randn(1, seq, 40).to(dtype)  # more than float16 holds
    wanted = layer(x)
    with torch.autocast("cpu", narrow):
        assert_same_bits(layer(x), wanted, "under autocast")


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@every_form
@pytest.mark.parametrize("shape", [(1, 1), (2, 7)])
def test_it_computes_in_its_own_dtype_under_autocast(
    shape: tuple[int, int], hold: Hold, dtype: torch.dtype, narrow: torch.dtype
) -> None:
    skip_unless_packable(dtype)
    model, ids = small_model(dtype=dtype), random_ids(*shape)
    with torch.inference_mode(), torch.autocast("cpu", narrow):
        wanted = model(ids)
        assert_within(rms(hold(model)(ids) - wanted), 0.02 * rms(wanted), rms(wanted), "packed")


@every_form
def test_moving_it_leaves_nothing_behind(hold: Hold) -> None:
    skip_unless_packable(torch.bfloat16)
    model = hold(small_model())
    before, weights = len(packed._held), model.h[0].mlp.c_fc.packed
    model.to("cpu").to(torch.float32)
    assert model.h[0].mlp.c_fc.packed is weights
    model.to(torch.bfloat16).to(torch.float32)
    assert len(packed._held) == before


def test_what_nobody_holds_is_let_go() -> None:
    before = len(packed._held)
    model = pack(small_model())
    assert len(packed._held) == before + 2 * 4 + 1
    layer = model.h[0].mlp.c_fc
    assert isinstance(layer, PackedConv1D)
    assert packed.held(layer.number) is layer.packed
    del model, layer
    assert len(packed._held) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_refused_conversion_changes_nothing(dtype: torch.dtype) -> None:
    model, ids = pack(small_model()), random_ids(2, 5)
    expected = model(ids)
    with pytest.raises(ConfigError, match=f"weights must be {PACKED} on"):
        model.to(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model(ids), expected)
