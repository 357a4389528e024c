"""The reference is transformers and nothing of ours: its logits, its float64, its greedy tokens."""

from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, largest_difference, reference, saved, tokens
from torch import Tensor
from transformers import GPT2LMHeadModel

from minigpt.generation.batch import left_padded
from minigpt.judge.reference import Reference, judging

CPU = torch.device("cpu")
FLOAT32 = {"attention": "sdpa", "dtype": torch.float32, "device": CPU}


@torch.no_grad()
def their_logits(folder: Path, input_ids: Tensor, attention: str, dtype: torch.dtype, compute: torch.dtype) -> Tensor:
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.to(compute).eval()(input_ids).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_it_is_transformers_own_model_bit_for_bit(folder: Path, attention: str, dtype: torch.dtype) -> None:
    ids = tokens(1, 20)
    logits = Reference(folder, attention=attention, dtype=dtype, device=CPU)(ids)
    theirs = their_logits(folder, ids, attention, dtype, dtype)
    assert logits.dtype is dtype
    assert torch.equal(logits, theirs), largest_difference(logits, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_the_truth_is_float64_on_the_rounded_weights(folder: Path, dtype: torch.dtype) -> None:
    """Not on the unrounded ones: a candidate cannot be blamed for what rounding the weights did."""
    ids = tokens(1, 20)
    truth = Reference(folder, attention="eager", dtype=dtype, device=CPU, compute=torch.float64)(ids)
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
    truth = Reference(place, attention=attention, dtype=torch.float32, device=CPU, compute=torch.float64)(ids)
    plain = their_logits(saved(reference(std=0.3), tmp_path), ids, "eager", torch.float32, torch.float64)
    error = (truth - plain).abs().max().item()
    print(f"error {error:.3g}, bound 1e-12, scale {plain.std():.3g}")
    assert error < 1e-12


@pytest.mark.parametrize("eos", [(), (0,), (7, 3)])
@torch.no_grad()
def test_greedy_is_transformers_generate(folder: Path, eos: tuple[int, ...]) -> None:
    """Of a left-padded batch."""
    prompts = tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    out = GPT2LMHeadModel.from_pretrained(folder).generate(
        prompts, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=eos[0] if eos else 0,
        eos_token_id=list(eos) or [99999],
    )  # fmt: skip
    place = folder
    if not eos:  # none is not the config's
        place = edit_config(saved(reference(std=0.3), folder.parent / "endless"), eos_token_id=None)
    assert Reference(place, **FLOAT32).greedy(prompts, mask, 20, eos).equal(out)


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_are_read_on_as_each_is_alone(folder: Path, attention: str) -> None:
    """Of several lengths, padded on the left, and then a token at a time."""
    theirs = Reference(folder, attention=attention, dtype=torch.float64, device=CPU)
    texts = [[5, 17, 42, 8], [3, 60]]
    (ids, mask), read = left_padded(texts), theirs.reading(2, 6)
    with torch.no_grad():
        for new in ([9, 1], [7, 7], [30, 2]):
            found = read(ids, mask)
            alone = [theirs(torch.tensor([text]))[0, -1] for text in texts]
            torch.testing.assert_close(found, torch.stack(alone), rtol=1e-12, atol=1e-12)
            texts = [[*text, token] for text, token in zip(texts, new, strict=True)]
            ids, mask = torch.tensor(new)[:, None], torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
