"""Roundings of other programs against the programs' own code."""

import copy
import ctypes
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime
import pytest
import torch
from gguf import quants
from onnx import TensorProto, helper
from torch import Tensor
from transformers import GPT2LMHeadModel

from minigpt.judge.mistakes import Swaps
from minigpt.judge.mistakes.arithmetic import (
    InputRounding,
    InUint8,
    as_ggml,
    attention_rounded,
    clipped_sums,
    gelu_by_table,
    in_bfloat16,
    in_groups,
    inputs_rounded,
    q8_k,
    rounded_sums,
    sum_in_float16,
    through_uint8,
    turned,
)
from minigpt.judge.mistakes.rounding import q4_0, q8_0, to_float16
from minigpt.precision import Float64

by_row = partial(through_uint8, into=InUint8.by_row)
unsigned = partial(through_uint8, into=InUint8.by_tensor)


def rows(width: int = 512) -> Tensor:
    """Rows of several sizes, with a row of zeros and massive numbers."""
    x = torch.randn(6, width) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0, 1.0])[:, None]
    x[4, 7] = 300.0
    return x


def test_blocks_of_32_are_rounded_as_the_gguf_package_rounds_them() -> None:
    x = rows()
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = quants.dequantize(quants.quantize(x.numpy(), kind), kind)
    assert (q8_0(x) == torch.from_numpy(expected)).all()


def test_blocks_of_256_have_the_largest_number_at_127() -> None:
    x = rows()
    y = q8_k(x.double())
    blocks, rounded = x.unflatten(-1, (-1, 256)), y.unflatten(-1, (-1, 256))
    largest = blocks.abs().amax(-1, keepdim=True)
    assert ((blocks - rounded).abs() <= largest / 254 * 1.0001).all()
    steps = rounded / (largest.double() / 127)
    assert steps.nan_to_num().round().sub(steps.nan_to_num()).abs().max() < 1e-3
    assert y.dtype == torch.float64
    assert (y[3] == 0).all()


CACHES = {kind: partial(as_ggml, kind=kind.upper()) for kind in ("q4_1", "q5_0", "q5_1")}
ROUNDINGS = {"q8_0": q8_0, "q8_K": q8_k, "q4_0": q4_0, **CACHES}


@pytest.mark.parametrize(("name", "rounds"), ROUNDINGS.items(), ids=ROUNDINGS.keys())
def test_rows_are_rounded_as_llama_cpp_rounds_them(name: str, rounds: Callable[[Tensor], Tensor]) -> None:
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        pytest.skip("llama-cpp-python is an extra of its own")
    library = ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libggml-base.so"))
    x = rows().contiguous()
    stored, expected = (ctypes.c_byte * (x.numel() * 2))(), np.empty(x.shape, np.float32)
    getattr(library, f"quantize_row_{name}_ref")(ctypes.c_void_p(x.data_ptr()), stored, ctypes.c_int64(x.numel()))
    back = getattr(library, f"dequantize_row_{name}")
    back(stored, expected.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.numel()))
    off = (rounds(x) - torch.from_numpy(expected)).abs()
    assert (off > 1e-6 * x.abs().amax()).sum() <= 2  # a number half way may go either way


def test_all_tokens_share_a_scale_as_onnxruntime_rounds_them() -> None:
    names = ["quantized", "scale", "zero"]
    kinds = (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8)
    graph = helper.make_graph(
        [helper.make_node("DynamicQuantizeLinear", ["x"], names)],
        "rounding",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None])],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    session: Any = onnxruntime.InferenceSession(model.SerializeToString())
    x = rows()
    quantized, scale, zero = session.run(None, {"x": x.numpy()})
    expected = torch.from_numpy((quantized.astype(np.float32) - np.float32(zero)) * scale)
    assert (unsigned(x) == expected).all()
    assert (unsigned(x.abs() + 1) > 0).all()  # the zero point is 0


def test_a_row_has_a_scale_of_its_own() -> None:
    x = rows()
    assert ((by_row(x) - x).abs() <= x.abs().amax(-1, keepdim=True) / 254 * 1.0001).all()
    assert (in_groups(x, 512) == by_row(x)).all()
    assert (in_groups(x, 64)[:, :64] == by_row(x[:, :64])).all()


def test_a_sum_in_float16_is_that_of_q5_1() -> None:
    x, kind = rows()[:3], gguf.GGMLQuantizationType.Q5_1
    data = quants.quantize(torch.randn(5, 512).numpy(), kind)
    weight = torch.from_numpy(quants.dequantize(data, kind))
    least = torch.from_numpy(data.reshape(5, -1, 24)[:, :, 2:4].copy().view(np.float16).astype(np.float32))[..., 0]
    scale = x.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    steps = (x.unflatten(-1, (-1, 32)) / scale[..., None]).round().sum(-1)
    expected = ((steps * scale).half().float() - steps * scale.half().float()) @ least.T
    torch.testing.assert_close(rounded_sums(x, weight), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("into", [InUint8.by_row, InUint8.by_tensor])
@pytest.mark.parametrize("one_scale", [True, False])
def test_sums_of_two_products_are_clipped_as_vpmaddubsw_clips_them(
    into: Callable[[Tensor], InUint8], one_scale: bool
) -> None:
    """A processor without VNNI, step by step."""
    x, weight = torch.rand(1, 6, 512), torch.rand(16, 512) * torch.rand(16, 1)
    scale = weight.amax() / 127 if one_scale else weight.amax(-1, keepdim=True) / 127
    integers = (weight / scale).round().clamp(-127, 127)
    inputs = into(x)
    products = inputs.steps.long().numpy()[..., None, :] * integers.long().numpy()
    pairs = products.reshape(*products.shape[:-1], -1, 2).sum(-1)
    assert (pairs > 2**15 - 1).any()
    clipped = torch.from_numpy(pairs.clip(-(2**15), 2**15 - 1).sum(-1))
    whole = clipped - inputs.zero * integers.sum(-1)
    expected = whole.float() * inputs.scale * (scale if one_scale else scale[:, 0])
    y = through_uint8(x, into) @ (integers * scale).T
    assert not torch.allclose(y, expected, rtol=1e-2)
    torch.testing.assert_close(y + clipped_sums(x, weight, into, one_scale), expected, rtol=1e-4, atol=1e-2)


def test_flash_attention_adds_in_float16_token_by_token() -> None:
    scores, v = torch.randn(2, 3, 9, 9), torch.randn(2, 3, 9, 8)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = torch.empty(2, 3, 9, 8)
    for at in np.ndindex(2, 3, 9):
        *head, _ = at
        largest, total, y = -np.inf, np.float32(0), np.zeros(8, np.float16)
        for score, value in zip(scores[at].numpy(), v[tuple(head)].numpy(), strict=True):
            if score == -np.inf:
                continue
            if score > largest:
                kept, weight, largest = np.exp(np.float32(largest - score)), np.float32(1), score
            else:
                kept, weight = np.float32(1), np.exp(score - largest)
            y = (y * kept).astype(np.float16)
            y = (y.astype(np.float32) + value * weight).astype(np.float16)
            total = total * kept + weight
        expected[at] = torch.from_numpy(y.astype(np.float32) / total)
    torch.testing.assert_close(sum_in_float16(scores, v, 64), expected, rtol=1e-5, atol=1e-6)
    exact = scores.softmax(-1) @ v
    assert (sum_in_float16(scores, v, 64) - exact).abs().max() > 1e-5
    torch.testing.assert_close(sum_in_float16(scores, v, 9), exact)


def test_a_turn_is_its_own_inverse() -> None:
    x = rows(192)
    torch.testing.assert_close(turned(turned(x, 64), 64), x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned(x, 64).norm(dim=-1), x.norm(dim=-1))
    ones = turned(torch.eye(64)[:1], 64)
    assert (ones == 1 / 8).all()


@pytest.fixture
def model(hf_model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    return copy.deepcopy(hf_model).double().eval()


def logits(model: GPT2LMHeadModel, *puts: Any) -> Tensor:
    ids = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad(), Swaps() as swaps:
        for put in puts:
            put(model, swaps)
        with Float64():
            return model(ids).logits


def test_arithmetic_is_put_into_any_model_and_taken_out_again(model: GPT2LMHeadModel) -> None:
    right = logits(model)
    rounding = InputRounding("float16", to_float16)
    named = {"h.0.mlp.c_fc.weight": rounding}
    every = {name.removeprefix("transformer."): rounding for name, _ in model.named_parameters()}
    puts = [inputs_rounded(named), inputs_rounded(every), gelu_by_table, attention_rounded(keys=to_float16)]
    puts += [in_bfloat16(False), in_bfloat16(True)]
    effects = [float((logits(model, put) - right).abs().max()) for put in puts]
    assert 0 < effects[0] < effects[1] < 0.1
    assert all(effects)
    assert effects[-1] != effects[-2] > 4 * effects[1]
    assert (logits(model, attention_rounded()) - right).abs().max() < 1e-5
    turned_twice = attention_rounded(turn_keys=lambda x: x.flip(-1), turn_values=lambda x: x.flip(-1))
    assert (logits(model, turned_twice) - right).abs().max() < 1e-5
    assert (logits(model) == right).all()
