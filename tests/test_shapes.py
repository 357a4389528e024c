"""The checker that all tests run under sees what is wrong, and asks nothing of what has no shape."""

import dataclasses
import importlib.util

import pytest
import torch
from jaxtyping import Float, Int
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


@dataclasses.dataclass
class Pair:
    first: Float[Tensor, " n"]
    second: Float[Tensor, " n"]


def test_what_fits_passes() -> None:
    y = product(torch.ones(2, 3), torch.ones(3, 4), bias=torch.ones(4))
    assert torch.equal(y, torch.full((2, 4), 4.0))


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


def test_containers_are_looked_into() -> None:
    @checked
    def first(tensors: tuple[Int[Tensor, " n"], ...]) -> Int[Tensor, " n"]:
        return tensors[0]

    assert first((torch.arange(3),)).tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="tensors of"):
        first((torch.ones(3),))


def test_fields_are_checked() -> None:
    pair = checked(Pair)
    pair(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match="second"):
        pair(torch.ones(3), torch.ones(4))


def test_what_cannot_be_checked_is_no_signature_of_ours() -> None:
    def many(*xs: Float[Tensor, " n"]) -> None: ...
    def named(**xs: Float[Tensor, " n"]) -> None: ...
    async def later(x: Float[Tensor, " n"]) -> None: ...

    for function in (many, named, later):
        with pytest.raises(AssertionError):
            checked(function)


def test_sizes_are_a_calls_own() -> None:
    for rows in (2, 5):
        assert product(torch.ones(rows, 3), torch.ones(3, 4), torch.ones(4)).shape == (rows, 4)


def test_what_has_no_shape_stays_as_it_is() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    assert checked(add) is add


def test_the_project_runs_under_it(unchecked: None) -> None:
    import jaxtyping

    model = minigpt.from_pretrained("demo")
    with torch.no_grad(), pytest.raises(minigpt.MiniGPTError):
        model(torch.ones(2, 3))
    jaxtyping.config.update("jaxtyping_disable", False)
    with torch.no_grad(), pytest.raises(TypeError, match="input_ids of"):
        model(torch.ones(2, 3))
