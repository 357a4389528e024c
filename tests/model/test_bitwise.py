"""Our arithmetic against transformers' on the same weights: the same bits, the same errors, the same gradients.

transformers runs as it does by default, with a cache (``use_cache=True``).
"""

from typing import Any

import pytest
import torch
from helpers import (
    assert_same_bits,
    assert_within,
    in_float64,
    left_padding,
    random_ids,
    reference_model,
    rms,
    same_weights,
    true_positions,
)

ATTENTIONS = ("sdpa", "eager")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (1, 8), (3, 100), (1, 1024))

VARIANTS: dict[str, dict[str, Any]] = {
    "n_inner": {"n_inner": 100},
    "gelu": {"activation_function": "gelu"},
    "gelu_pytorch_tanh": {"activation_function": "gelu_pytorch_tanh"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "swish": {"activation_function": "swish"},
    "tanh": {"activation_function": "tanh"},
    "one head": {"n_head": 1},
    "heads of width 1": {"n_embd": 12, "n_head": 12},
    "inverse layer": {"scale_attn_by_inverse_layer_idx": True},
    "unscaled": {"scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True},
    "upcast, inverse layer": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    "untied head": {"tie_word_embeddings": False},
    "another eps": {"layer_norm_epsilon": 1e-3},
}

every_attention = pytest.mark.parametrize("attention", ATTENTIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@every_attention
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_bits_of_the_reference_at_every_length(
    shape: tuple[int, int], attention: str, dtype: torch.dtype, device: torch.device
) -> None:
    reference = reference_model(attention=attention, dtype=dtype, device=device, n_positions=1024)
    ids = random_ids(*shape, device=device)
    with torch.inference_mode():
        supplied = same_weights(reference, arithmetic="reference")(ids)
        assert_same_bits(supplied, reference(ids).logits, f"{shape} logits")


@every_dtype
@every_attention
def test_bits_of_the_reference_on_a_left_padded_batch(attention: str, dtype: torch.dtype, device: torch.device) -> None:
    reference = reference_model(attention=attention, dtype=dtype, device=device)
    mask = left_padding((13, 20, 1), 20, device)
    ids = random_ids(3, 20, device=device)
    with torch.inference_mode():
        expected = reference(ids, attention_mask=mask, position_ids=true_positions(mask)).logits
        supplied = same_weights(reference, arithmetic="reference")(ids, mask)
    assert_same_bits(supplied, expected, "left-padded logits, padding included")


@every_dtype
@every_attention
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_of_the_reference_in_every_variant(
    variant: str, attention: str, dtype: torch.dtype, device: torch.device
) -> None:
    reference = reference_model(attention=attention, dtype=dtype, device=device, **VARIANTS[variant])
    model = same_weights(reference, arithmetic="reference")
    mask = left_padding((9, 17), 17, device)
    ids = random_ids(2, 17, device=device)
    with torch.inference_mode():
        assert_same_bits(model(ids), reference(ids).logits, variant)
        supplied, positions = model(ids, mask), true_positions(mask)
        expected = reference(ids, attention_mask=mask, position_ids=positions).logits
        assert_same_bits(supplied, expected, f"{variant}, left-padded")


@pytest.mark.parametrize("seq", [64, 65])
def test_bits_of_the_reference_where_the_heads_of_one_text_lie_transposed(seq: int, device: torch.device) -> None:
    """As those of one column do: the product after them has the same bits only if they are put in order first."""
    fields = {"n_embd": 96, "n_head": 96, "n_positions": 65}
    reference = reference_model(attention="eager", dtype=torch.float16, device=device, **fields)
    ids = random_ids(1, seq, device=device)
    with torch.inference_mode():
        assert_same_bits(same_weights(reference, arithmetic="reference")(ids), reference(ids).logits, "logits")


@every_dtype
@every_attention
def test_bits_of_the_reference_through_both_caches(attention: str, dtype: torch.dtype, device: torch.device) -> None:
    reference = reference_model(attention=attention, dtype=dtype, device=device)
    model = same_weights(reference, arithmetic="reference")
    mask = left_padding((13, 20, 16), 20, device)
    positions, ids = true_positions(mask), random_ids(3, 20, device=device)
    cache, past = model.new_cache(3, 20), None
    with torch.inference_mode():
        for start, stop in ((0, 9), (9, 10), (10, 11), (11, 15), (15, 20)):
            new = ids[:, start:stop]
            expected = reference(
                new, attention_mask=mask[:, :stop], position_ids=positions[:, start:stop], past_key_values=past
            )
            past = expected.past_key_values
            assert_same_bits(model(new, mask[:, :stop], cache=cache), expected.logits, f"tokens {start} to {stop}")


@every_attention
def test_bits_of_the_reference_in_float64(attention: str, device: torch.device) -> None:
    reference = reference_model(attention=attention, dtype=torch.float64, device=device)
    ids = random_ids(3, 30, device=device)
    with torch.inference_mode():
        assert_same_bits(same_weights(reference, arithmetic="reference")(ids), reference(ids).logits, "float64 logits")


@every_attention
def test_bits_of_the_reference_in_training_mode(attention: str, device: torch.device) -> None:
    """The same dropouts at the same places in the same order: from one seed, the same units are dropped."""
    dropouts = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    reference = reference_model(attention=attention, device=device, **dropouts).train()
    model = same_weights(reference, arithmetic="reference").train()
    ids = random_ids(3, 20, device=device)
    torch.manual_seed(1)
    expected = reference(ids).logits
    torch.manual_seed(1)
    assert_same_bits(model(ids), expected, "logits under dropout")


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@every_attention
def test_bits_of_the_reference_under_autocast(attention: str, narrow: torch.dtype, device: torch.device) -> None:
    reference = reference_model(attention=attention, device=device)
    model = same_weights(reference, arithmetic="reference")
    ids, mask = random_ids(3, 20, device=device), left_padding((13, 20, 1), 20, device)
    with torch.inference_mode(), torch.autocast(device.type, dtype=narrow):
        assert_same_bits(model(ids), reference(ids).logits, "logits")
        expected = reference(ids, attention_mask=mask, position_ids=true_positions(mask)).logits
        assert_same_bits(model(ids, mask), expected, "left-padded logits")


@pytest.mark.parametrize(("norm", "most"), [("fused", 1.1), ("textbook", 2)])
@every_dtype
@every_attention
def test_fast_arithmetic_errs_hardly_more_than_the_reference(
    attention: str, dtype: torch.dtype, norm: str, most: float, device: torch.device
) -> None:
    reference = reference_model(attention=attention, dtype=dtype, device=device)
    ids = random_ids(3, 100, device=device)
    with torch.inference_mode():
        truth = in_float64(reference)(ids).logits
        floor = rms(reference(ids).logits.double() - truth)
        error = rms(same_weights(reference, norm=norm)(ids).double() - truth)
    assert_within(error, most * floor, rms(truth), f"RMS error (transformers' own: {floor:.3g})")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("norm", ["textbook", "fused"])
@every_attention
def test_gradients_of_every_parameter_are_those_of_the_reference(
    norm: str, attention: str, tied: bool, dtype: torch.dtype, bound: float, device: torch.device
) -> None:
    reference = reference_model(attention=attention, dtype=dtype, device=device, tie_word_embeddings=tied)
    model = same_weights(reference, norm=norm, arithmetic="reference")
    ids = random_ids(3, 40, device=device)
    coefficients = torch.randn(3, 40, 83, dtype=dtype).to(device)
    (reference(ids).logits * coefficients).sum().backward()
    (model(ids) * coefficients).sum().backward()
    expected = {name.removeprefix("transformer."): p.grad for name, p in reference.named_parameters()}
    supplied = {name: p.grad for name, p in model.named_parameters()}
    assert supplied.keys() == expected.keys()
    for name, gradient in expected.items():
        assert rms(gradient) > 0
        error = rms(supplied[name].double() - gradient.double()) / rms(gradient)
        assert_within(error, bound, rms(gradient), f"{name}, relative")
