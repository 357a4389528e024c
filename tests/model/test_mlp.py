"""The MLP and GPT-2's affine layer: activations by name, weights stored (in, out)."""

import pytest
import torch
from helpers import assert_same_bits
from transformers.activations import ACT2FN

from minigpt.config import ACTIVATIONS
from minigpt.model.mlp import activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_transformers_own(name: str, dtype: torch.dtype) -> None:
    """Its gradient too: autograd adds in the order of the operations."""
    x = (torch.randn(4000) * 4).to(dtype).requires_grad_()
    supplied, expected = activation(name)(x), ACT2FN[name](x)
    assert_same_bits(supplied, expected, name)
    dy = torch.randn_like(x)
    (gradient,), (true_gradient,) = torch.autograd.grad(supplied, x, dy), torch.autograd.grad(expected, x, dy)
    assert_same_bits(gradient, true_gradient, f"{name}, gradient")
