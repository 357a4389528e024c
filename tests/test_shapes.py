"""The checker that all tests run under sees what is wrong, and asks nothing of what has no shape."""

import importlib.util

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import minigpt

if importlib.util.find_spec("beartype") is None:
    pytest.skip("beartype is not installed, and nothing is checked", allow_module_level=True)

from shapes import checked


@checked
def product(
    x: Float[Tensor, "rows inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "rows out"]:
    return (x @ weight).mT if bias is None else x @ weight + bias  # without a bias it is wrong: (out, rows)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "named"),
    [
        (torch.ones(2, 3, 1), torch.ones(3, 4), torch.ones(4), "x of product"),
        (torch.ones(2, 3, dtype=torch.long), torch.ones(3, 4), torch.ones(4), "x of product"),
        (torch.ones(2, 3), torch.ones(4, 3), torch.ones(3), "weight of product"),
        (torch.ones(2, 3), torch.ones(3, 4), torch.ones(1), "bias of product"),
        (torch.ones(2, 3), torch.ones(3, 4), None, "the result of product"),
    ],
    ids=["rank", "dtype", "size", "an optional one", "result"],
)
def test_what_does_not_fit_is_named(x: Tensor, weight: Tensor, bias: Tensor | None, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        product(x, weight, bias)


def test_the_project_runs_under_it(unchecked: None) -> None:
    import jaxtyping

    model = minigpt.from_pretrained("demo")
    with torch.no_grad(), pytest.raises(minigpt.MiniGPTError):
        model(torch.ones(2, 3))
    jaxtyping.config.update("jaxtyping_disable", False)
    with torch.no_grad(), pytest.raises(TypeError, match="input_ids of"):
        model(torch.ones(2, 3))
