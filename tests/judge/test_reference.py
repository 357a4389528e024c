"""The reference is transformers and nothing of ours: its logits, its float64, its greedy tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints import largest_difference, reference, saved, tokens
from torch import Tensor
from transformers import GPT2LMHeadModel

from minigpt.judge.checkpoint_facts import CheckpointFacts, read_facts
from minigpt.judge.reference import Reference, WideProducts, judging


def facts_of(place: Path, attention: str, dtype: torch.dtype) -> CheckpointFacts:
    return replace(read_facts(place, dtype)[0], attention=attention)


@torch.no_grad()
def their_logits(folder: Path, input_ids: Tensor, attention: str, dtype: torch.dtype, compute: torch.dtype) -> Tensor:
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.to(compute).eval()(input_ids).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_it_is_transformers_own_model_bit_for_bit(folder: Path, attention: str, dtype: torch.dtype) -> None:
    ids = tokens(1, 20)
    logits = Reference(facts_of(folder, attention, dtype))(ids)
    hf = their_logits(folder, ids, attention, dtype, dtype)
    assert logits.dtype is dtype
    assert torch.equal(logits, hf), largest_difference(logits, hf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_the_truth_is_float64_on_the_rounded_weights(folder: Path, dtype: torch.dtype) -> None:
    """Not on the unrounded ones: a candidate cannot be blamed for what rounding the weights did."""
    ids = tokens(1, 20)
    truth = Reference(facts_of(folder, "sdpa", dtype), torch.float64)(ids)
    assert truth.dtype is torch.float64
    assert torch.equal(truth, their_logits(folder, ids, "eager", dtype, torch.float64))
    if dtype != torch.float32:
        unrounded = their_logits(folder, ids, "eager", torch.float32, torch.float64)
        print(largest_difference(truth, unrounded))
        assert (truth - unrounded).abs().max() > 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_float64_is_float64_where_a_config_asks_for_float32_scores(tmp_path: Path, attention: str) -> None:
    ids, place = tokens(1, 20), saved(reference(std=0.3, reorder_and_upcast_attn=True), tmp_path)
    truth = Reference(facts_of(place, attention, torch.float32), torch.float64)(ids)
    plain = their_logits(saved(reference(std=0.3), tmp_path), ids, "eager", torch.float32, torch.float64)
    error = (truth - plain).abs().max().item()
    print(f"error {error:.3g}, bound 1e-12, scale {plain.std():.3g}")
    assert error < 1e-12


@pytest.mark.parametrize("eos", [(), (0,), (7, 3)])
@torch.no_grad()
def test_it_writes_as_transformers_generates(folder: Path, eos: tuple[int, ...]) -> None:
    """Each prompt up to its end or the context's, with the logits of each token; in batches, padded on the left."""
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (6, 4, 1, 9, 30, 44, 46, 48, 2, 3, 5, 8)]
    texts = Reference(facts_of(folder, "sdpa", torch.float32)).write(prompts, 20, eos)
    hf = GPT2LMHeadModel.from_pretrained(folder)
    for prompt, (text, rows) in zip(prompts, texts, strict=True):
        ids, room = torch.tensor([prompt]), min(20, 48 - len(prompt))
        out = ids if not room else hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False, pad_token_id=0,
            eos_token_id=list(eos) or [99999],
        )  # fmt: skip
        assert text.ids == out[0].tolist()
        assert (text.prompt, text.written) == (prompt, text.ids[len(prompt) :])
        whole = hf(torch.tensor([text.ids])).logits[0, text.before_new]
        torch.testing.assert_close(rows, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["bf16", "tf32", "ieee"])
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_what_could_be_read_of_precision_before_can_be_read_again(precision: str, kernels: str) -> None:
    matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    mkldnn.fp32_precision = kernels
    try:
        state = matmul.fp32_precision, mkldnn.fp32_precision, matmul.allow_tf32
        with judging():
            assert not matmul.allow_tf32
        assert (matmul.fp32_precision, mkldnn.fp32_precision, matmul.allow_tf32) == state
    finally:
        torch.set_float32_matmul_precision(before)


def test_products_of_float16_are_rounded_once() -> None:
    x, weight, bias = torch.randn(7, 48).half(), torch.randn(48, 32).half(), torch.randn(32).half()
    expected = (x.double() @ weight.double() + bias.double()).half()
    with WideProducts():
        products = [torch.addmm(bias, x, weight), F.linear(x, weight.T, bias=bias), x @ weight + bias]
        assert (x.float() @ weight.float()).dtype == torch.float32
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(x, weight.T.float())
    for product in products[:2]:
        assert product.dtype == torch.float16
        differing = float((product != expected).double().mean())
        print(f"other bits in {differing:.3g} of the numbers, bound 0.02")
        assert differing <= 0.02
    torch.testing.assert_close(products[2], expected, rtol=2**-9, atol=2**-8)
