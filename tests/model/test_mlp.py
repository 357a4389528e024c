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
    x = (torch.randn(4000) * 4).to(dtype)
    assert_same_bits(activation(name)(x), ACT2FN[name](x), name)
