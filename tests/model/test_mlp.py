"""The MLP and GPT-2's affine layer: activations by name, weights stored (in, out)."""

import pytest
import torch
from helpers import assert_close, assert_same_bits, randomize
from transformers.activations import ACT2FN

from minigpt.config import ACTIVATIONS
from minigpt.model.conv1d import Conv1D
from minigpt.model.mlp import activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_transformers_own(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(4000) * 4).to(dtype)
    assert_same_bits(activation(name)(x), ACT2FN[name](x), name)


@pytest.mark.parametrize("strides", ["transposed", "expanded", "strided"])
def test_the_affine_layer_takes_an_input_that_is_not_contiguous(strides: str) -> None:
    """As a norm of somebody's own may leave it."""
    layer = Conv1D(6, 4).double()
    randomize(layer)
    x = {
        "transposed": torch.randn(3, 2, 6, dtype=torch.float64).transpose(0, 1),
        "expanded": torch.randn(2, 1, 6, dtype=torch.float64).expand(2, 3, 6),
        "strided": torch.randn(2, 3, 12, dtype=torch.float64)[..., ::2],
    }[strides]
    assert not x.is_contiguous()
    assert_close(layer(x), x @ layer.weight + layer.bias, 1e-14, strides)
