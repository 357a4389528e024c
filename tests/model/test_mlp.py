"""The MLP and GPT-2's affine layer: activations by name, weights stored (in, out)."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import SMALL, assert_close, assert_same_bits, randomize
from torch import Tensor
from transformers.activations import ACT2FN

from minigpt import GPT2Config
from minigpt.config_fields import ACTIVATIONS
from minigpt.model.conv1d import Conv1D
from minigpt.model.mlp import MLP, activation

ROOT = math.sqrt(2 / math.pi)

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3))),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_formula(name: str) -> None:
    x = torch.linspace(-8, 8, 999, dtype=torch.float64)
    assert_close(activation(name)(x), FORMULAS[name](x), 1e-14, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_transformers_own(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(4000) * 4).to(dtype)
    assert_same_bits(activation(name)(x), ACT2FN[name](x), name)


def test_erf_and_tanh_are_told_apart() -> None:
    """By less than 5e-4, which a loose tolerance would swallow."""
    x = torch.linspace(-4, 4, 99, dtype=torch.float64)
    assert (activation("gelu")(x) - activation("gelu_new")(x)).abs().max() > 4e-4


@pytest.mark.parametrize("n_inner", [None, 7, 100])
def test_an_mlp_widens_bends_and_narrows(n_inner: int | None) -> None:
    config = GPT2Config(**SMALL | {"n_inner": n_inner})
    mlp = MLP(config).eval().double()
    randomize(mlp)
    inner = 192 if n_inner is None else n_inner
    assert mlp.c_fc.weight.shape == (48, inner)
    assert mlp.c_proj.weight.shape == (inner, 48)
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    hidden = FORMULAS["gelu_new"](x @ mlp.c_fc.weight + mlp.c_fc.bias)
    assert_close(mlp(x), hidden @ mlp.c_proj.weight + mlp.c_proj.bias, 1e-14, f"n_inner={n_inner}")


@pytest.mark.parametrize(("inp", "out"), [(5, 7), (6, 6), (1, 4), (4, 1)])
def test_the_affine_layer_stores_its_weight_in_by_out(inp: int, out: int) -> None:
    layer = Conv1D(inp, out).double()
    randomize(layer)
    assert layer.weight.shape == (inp, out)
    x = torch.randn(2, 3, inp, dtype=torch.float64)
    assert_close(layer(x), F.linear(x, layer.weight.T, layer.bias), 1e-14, f"{inp} to {out}")


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
