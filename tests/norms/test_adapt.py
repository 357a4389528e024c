"""Somebody else's class as a norm: found, called, loaded and held as it is written, or refused in one sentence."""

import copy
import dataclasses
import functools
import inspect
import math
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_bits, max_abs, random_ids, small_model
from torch import Tensor, nn

import minigpt
from minigpt import GPT2, LayerNorm, NormError, norms, swap_norms
from minigpt.norms.dyt import DyT
from minigpt.norms.foreign.adapt import AdaptedNorm, notes
from minigpt.norms.foreign.construct import construct
from minigpt.processor import HALVES
from minigpt.testing import check_norm

# Classes as the literature writes them. Their sources are put in files, for what is in no package.


class NdimBias(nn.Module):
    """(ndim, bias), both required; eps is in the call."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class GammaBeta(nn.Module):
    """(normalized_shape, eps) of another default than GPT-2's."""

    def __init__(self, normalized_shape, eps=1e-12):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(normalized_shape))
        self.beta = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, unbiased=False, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class DimEps(nn.Module):
    """(dim, *, eps), by keyword alone."""

    def __init__(self, dim: int, *, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.weight + self.bias


class ParameterShape(nn.Module):
    """(parameter_shape, eps) over as many trailing dimensions as the shape has: an int has none."""

    def __init__(self, parameter_shape, eps=1e-7):
        super().__init__()
        self.parameter_shape = parameter_shape
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(parameter_shape))
        self.beta = nn.Parameter(torch.zeros(parameter_shape))

    def forward(self, inputs):
        dims = [-(i + 1) for i in range(len(self.parameter_shape))]
        mean = inputs.mean(dim=dims, keepdim=True)
        var = ((inputs - mean) ** 2).mean(dim=dims, keepdim=True)
        return self.gamma * ((inputs - mean) / (var + self.eps).sqrt()) + self.beta


class EmbDim(nn.Module):
    """(emb_dim), with an eps of its own."""

    def __init__(self, emb_dim):
        super().__init__()
        self.eps = 1e-5
        self.scale = nn.Parameter(torch.ones(emb_dim))
        self.shift = nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(var + self.eps) + self.shift


SHAPES = [NdimBias, GammaBeta, DimEps, ParameterShape, EmbDim]
HEADER = "import torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n\n\n"

every_shape = pytest.mark.parametrize("cls", SHAPES, ids=lambda cls: cls.__name__)


# Classes as third parties write them.


class Kernel(nn.Module):
    """A kernel's module: eps under its own name, a flag whose default is no shift, and buffers."""

    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__()
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.randn(hidden_size)) if bias else None
        self.variance_epsilon = eps
        self.register_buffer("ones", torch.ones(hidden_size), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, hidden_states):
        self.calls += 1
        y = F.layer_norm(hidden_states, (self.hidden_size,), self.weight, self.bias, self.variance_epsilon)
        return y * self.ones


class Affine(nn.Module):
    """Flags for scale and shift, and a dropout that is off in eval mode."""

    def __init__(self, features, elementwise_affine=False, use_bias=False, layer_norm_epsilon=1e-12, dropout=0.5):
        super().__init__()
        self.eps, self.features = layer_norm_epsilon, features
        if elementwise_affine:
            self.g = nn.Parameter(torch.ones(features))
            self.b = nn.Parameter(torch.zeros(features)) if use_bias else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(F.layer_norm(x, (self.features,), self.g, self.b, self.eps))


class Wide(nn.LayerNorm):
    """Passes on whatever it is given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def forward(self, input):
        wide = [parameter.double() for parameter in (self.weight, self.bias)]
        return F.layer_norm(input.double(), self.normalized_shape, *wide, self.eps).type_as(input)


class Nested(nn.Module):
    """Its parameters are those of a module within."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x):
        return self.norm(x)


class BiasFlag(nn.Module):
    """Keeps a flag under the name that the model has for the shift."""

    def __init__(self, dim, eps=1e-6, bias=True):
        super().__init__()
        self.bias, self.eps = bias, eps
        self.gamma = nn.Parameter(torch.ones(dim))
        if bias:
            self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = F.layer_norm(x, x.shape[-1:], self.gamma, eps=self.eps)
        return y + self.beta if self.bias else y


class A2B2(nn.Module):
    """Parameters as the annotated transformer calls them; one of them under two names."""

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.weight = self.a_2
        self.eps = eps

    def forward(self, x):
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (self.a_2 + self.weight) / 2 * (x - mean) / torch.sqrt(var + self.eps) + self.b_2


THIRD_PARTIES = [nn.LayerNorm, Kernel, Affine, Wide, Nested, BiasFlag, A2B2]
EVERY = SHAPES + THIRD_PARTIES

every_class = pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)


@pytest.fixture
def model() -> GPT2:
    return small_model(dtype=torch.float64)


def written(folder: Path, *classes: type, name: str = "norm_of_mine.py") -> Path:
    """A file with the source of these classes."""
    file = folder / name
    file.write_text(HEADER + "\n\n".join(map(inspect.getsource, classes)), encoding="utf-8")
    return file


def file_with(folder: Path, body: str, name: str = "norm_of_mine.py") -> Path:
    """A file with this text after the imports, which are five lines."""
    file = folder / name
    file.write_text(HEADER + body, encoding="utf-8")
    return file


def refused(norm: Any, size: int | tuple[int, ...] = 8, **told: Any) -> str:
    """The sentence with which a norm is refused."""
    with pytest.raises(NormError) as caught:
        norms.build(norm, size, **told)
    message = str(caught.value)
    print(message)
    assert "\n" not in message
    return message


def refused_in_use(norm: Any, x: Tensor | None = None) -> str:
    """The sentence with which what a norm does is refused."""
    module = norms.build(norm, 8)
    with pytest.raises(NormError) as caught:
        module(torch.randn(2, 3, 8) if x is None else x)
    print(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# As written.


@every_shape
@torch.no_grad()
def test_a_class_in_a_file_is_the_norm_that_it_is_in_a_paper(cls: type, model: GPT2, tmp_path: Path) -> None:
    ids = random_ids(2, 17)
    wanted = model(ids)
    assert swap_norms(model, f"{written(tmp_path, cls)}:{cls.__name__}") == model.norm_sites()
    assert_close(model(ids), wanted, 1e-13, "logits in float64")


@every_class
@torch.no_grad()
def test_a_class_given_as_it_is(cls: type, model: GPT2) -> None:
    ids = random_ids(2, 17)
    wanted = model(ids)
    swap_norms(model, cls)
    assert_close(model(ids), wanted, 1e-13, "logits in float64")


@every_class
@torch.no_grad()
def test_the_same_in_half_precision(cls: type) -> None:
    ids = random_ids(2, 17)
    for dtype in HALVES:
        model = small_model(dtype=dtype)
        wanted = model(ids)
        swap_norms(model, cls)
        assert model(ids).dtype == dtype
        assert_close(model(ids), wanted, 0.1, f"logits in {dtype}")


@torch.no_grad()
def test_torch_s_own_layer_norm_is_the_fused_one_to_the_bit() -> None:
    model, ids = small_model(), random_ids(2, 17)
    wanted = model(ids)
    swap_norms(model, "torch.nn:LayerNorm")
    assert type(model.ln_f) is nn.LayerNorm
    assert_same_bits(model(ids), wanted, "logits")


@every_class
def test_the_model_s_names_and_parameters_stay_its_own(cls: type, model: GPT2) -> None:
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    swap_norms(model, cls)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == keys
    assert len(list(model.parameters())) == len(before)
    swap_norms(model, "fused")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@every_class
@torch.no_grad()
def test_there_and_back_is_the_same_model_to_the_bit(cls: type) -> None:
    model, ids = small_model(layer_norm_epsilon=1e-3), random_ids(2, 9)
    wanted = model(ids)
    swap_norms(model, cls)
    swap_norms(model, "fused")
    assert_same_bits(model(ids), wanted, "after swapping back")


@every_class
def test_gradients_are_those_of_layer_norm(cls: type, model: GPT2) -> None:
    ids = random_ids(2, 9)
    model(ids).square().mean().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    swap_norms(model, cls)
    model(ids).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted[name], 1e-11, name)


@every_class
@torch.no_grad()
def test_over_several_trailing_dimensions(cls: type) -> None:
    if cls in (Kernel, Affine, BiasFlag):
        pytest.skip("is written for one dimension: it is told the last alone")
    norm = norms.build(cls, (3, 5))
    for parameter in norm.parameters():
        parameter.normal_()
    x = torch.randn(4, 3, 5)
    if cls in (NdimBias, ParameterShape, nn.LayerNorm, Wide, Nested):
        wanted = F.layer_norm(x, (3, 5), norm.weight, norm.bias, 1e-5)
    else:  # as written: statistics over the last dimension, whatever its parameters' shape
        wanted = F.layer_norm(x, (5,), eps=1e-5) * norm.weight + norm.bias
    assert_close(norm(x), wanted, 1e-6, "rows of (3, 5)")


# Parameters and state in a model's life.


@every_class
def test_an_optimizer_goes_on_with_what_it_holds(cls: type, model: GPT2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swap_norms(model, cls)
    ids = random_ids(2, 9)
    before = model.ln_f.weight.detach().clone(), model(ids).detach()
    model(ids).square().mean().backward()
    optimizer.step()
    assert max_abs(model.ln_f.weight - before[0]) > 1e-3
    trained = model(ids).detach()
    assert max_abs(trained - before[1]) > 1e-3
    swap_norms(model, "fused")
    assert_close(trained, model(ids), 1e-13, "what was trained is what the fused norm then has")


@every_class
@torch.no_grad()
def test_a_copy_is_a_model_of_its_own(cls: type, model: GPT2) -> None:
    swap_norms(model, cls)
    ids = random_ids(2, 9)
    wanted = model(ids)
    other = copy.deepcopy(model)
    for site in other.norm_sites():
        other.get_submodule(site).weight.zero_()
        other.get_submodule(site).bias.zero_()
    assert max_abs(other(ids)) == 0
    assert_same_bits(model(ids), wanted, "the model it was copied from")


@every_class
@torch.no_grad()
def test_weights_loaded_into_it_are_what_it_computes_with(cls: type, model: GPT2) -> None:
    weights, ids = small_model(dtype=torch.float64, n_inner=192).state_dict(), random_ids(2, 9)
    weights = {name: tensor + 0.25 for name, tensor in weights.items()}
    for assign in (False, True):
        theirs, ours = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
        swap_norms(ours, cls)
        for each in (theirs, ours):
            each.load_state_dict(weights, strict=True, assign=assign)
        assert_close(ours(ids), theirs(ids), 1e-13, f"assign={assign}")


@every_class
@torch.no_grad()
def test_moving_to_another_dtype(cls: type, model: GPT2) -> None:
    swap_norms(model, cls)
    ids = random_ids(2, 9)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}
        assert model(ids).dtype == dtype
    wanted = copy.deepcopy(model)
    swap_norms(wanted, "fused")
    assert_close(model(ids), wanted(ids), 1e-13, "back in float64")


@every_class
@torch.no_grad()
def test_parameters_replaced_by_others(cls: type, model: GPT2) -> None:
    """By hand, by a functional call, and by a move that makes new ones: it computes with those that it has now."""
    swap_norms(model, cls)
    ids, nothing = random_ids(2, 9), torch.zeros(48, dtype=torch.float64)
    zeros = {f"ln_f.{role}": nothing for role in ("weight", "bias")}
    assert max_abs(torch.func.functional_call(model, zeros, (ids,))) == 0
    assert max_abs(model(ids)) > 0.1
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu").double()
    empty.load_state_dict(model.state_dict())
    copied = {name: tensor for name, tensor in empty.named_buffers() if name.endswith("ones")}
    for tensor in copied.values():
        tensor.fill_(1)
    assert_close(empty(ids), model(ids), 1e-13, "from the meta device")
    model.ln_f.weight, model.ln_f.bias = nn.Parameter(nothing), nn.Parameter(nothing)
    assert max_abs(model(ids)) == 0


@every_class
def test_gradients_reach_what_stands_in_a_functional_call(cls: type) -> None:
    norm = norms.build(cls, 8).eval()
    given = {name: torch.randn(8, requires_grad=True) for name in ("weight", "bias")}
    torch.func.functional_call(norm, given, (torch.randn(2, 3, 8),)).sum().backward()
    assert all(tensor.grad is not None for tensor in given.values())


@every_class
@torch.no_grad()
def test_a_pickle_of_it_is_it(cls: type, model: GPT2) -> None:
    swap_norms(model, cls)
    other = pickle.loads(pickle.dumps(model))
    ids = random_ids(2, 9)
    assert_same_bits(other(ids), model(ids), "logits")
    other.ln_f.weight.zero_()
    other.ln_f.bias.zero_()
    assert max_abs(other(ids)) == 0


@every_class
@pytest.mark.usefixtures("unchecked")
@torch.no_grad()
def test_compiled_it_is_one_graph_and_the_same_norm(cls: type) -> None:
    torch.compiler.reset()
    norm, x = norms.build(cls, 8).eval(), torch.randn(2, 3, 8)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    for _ in range(2):
        assert_close(compiled(x), norm(x), 1e-6, "compiled")
        norm.weight.normal_()
    norm.weight = nn.Parameter(torch.randn(8))
    assert_close(compiled(x), norm(x), 1e-6, "with another weight")


@torch.no_grad()
def test_buffers_go_where_the_model_is(device: torch.device) -> None:
    model = small_model(dtype=torch.bfloat16, device=device)
    swap_norms(model, Kernel)
    for norm in model.norm_modules().values():
        assert (norm.ones.dtype, norm.ones.device.type) == (torch.bfloat16, device.type)
        assert norm.calls.dtype == torch.long
    model(random_ids(1, 4, device=device))
    assert model.ln_f.calls == 1, "asked before it was put in, it would have counted that"


def test_buffers_that_a_class_saves_are_saved(model: GPT2) -> None:
    class Counting(EmbDim):
        def __init__(self, emb_dim):
            super().__init__(emb_dim)
            self.register_buffer("count", torch.zeros(()))

    swap_norms(model, Counting, "ln_f")
    assert "ln_f.norm.count" in model.state_dict()
    assert "ln_f.norm.count" not in dict(model.named_parameters())


def test_training_mode_is_the_model_s(model: GPT2) -> None:
    swap_norms(model, Affine)
    assert not model.ln_f.norm.dropout.training
    assert not torch.equal(model.train()(random_ids(1, 9)), model.eval()(random_ids(1, 9)))
    swap_norms(model.train(), Affine)
    assert model.ln_f.norm.dropout.training


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = small_model(EmbDim, device="meta")
        assert model.ln_f(torch.empty(1, 4, 48)).shape == (1, 4, 48)
    swap_norms(model, Kernel)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def test_saved_and_loaded_again(tmp_path: Path) -> None:
    model, ids = small_model(EmbDim), random_ids(2, 9)
    minigpt.save_pretrained(model, tmp_path)
    for norm in (EmbDim, "fused"):
        other = minigpt.from_pretrained(tmp_path, norm=norm, device="cpu")
        assert_close(other(ids), model(ids), 1e-5, f"loaded with {norm}")


def test_another_model_s_norms_are_loaded_into_it(tmp_path: Path) -> None:
    minigpt.save_pretrained(small_model(dtype=torch.float64), tmp_path)
    model = small_model(EmbDim, dtype=torch.float64)
    with torch.no_grad():
        model.ln_f.weight.zero_()
    assert len(minigpt.load_norms(model, tmp_path)) == 2 * len(model.norm_sites())
    ids = random_ids(2, 9)
    assert_close(model(ids), small_model(dtype=torch.float64)(ids), 1e-13, "logits")


def test_a_new_model_of_somebody_else_s_norms() -> None:
    model = small_model(ParameterShape)
    assert isinstance(model.h[0].ln_1, AdaptedNorm)
    assert type(model.h[0].ln_1.norm).__name__ == "ParameterShape"
    assert isinstance(model.h[0].ln_1.norm, ParameterShape)
    assert "ParameterShape" in repr(model)


def test_two_sites_of_one_class_keep_their_own() -> None:
    one, other = norms.build(EmbDim, 4), norms.build(EmbDim, 4)
    assert one.norm.scale is one.weight
    assert other.norm.shift is other.bias
    assert one.norm.scale is not other.norm.scale


def test_the_class_itself_is_left_as_it_was() -> None:
    norms.build(EmbDim, 4)
    assert not hasattr(EmbDim, "scale")
    assert set(EmbDim(4).state_dict()) == {"scale", "shift"}


# The constructor.


@pytest.mark.parametrize(
    "name", ["eps", "epsilon", "variance_epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "ln_epsilon"]
)
def test_eps_under_any_of_its_names(name: str) -> None:
    class Named(EmbDim):
        def __init__(self, size, **kwargs):
            super().__init__(size)
            self.eps = kwargs[name]

    Named.__init__.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
         inspect.Parameter("size", inspect.Parameter.POSITIONAL_OR_KEYWORD),
         inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)]
    )  # fmt: skip
    norm = norms.build(Named, 8, eps=1e-3)
    assert norm.norm.eps == 1e-3
    assert notes(norm) == ()


@pytest.mark.parametrize("cls", [GammaBeta, DimEps, ParameterShape, Kernel, Affine, Wide, Nested, BiasFlag, A2B2])
def test_the_model_s_eps_is_passed_on(cls: type) -> None:
    x = torch.randn(5, 8) * 1e-2
    norm = norms.build(cls, 8, eps=1e-3).eval()
    with torch.no_grad():
        norm.bias.zero_()
    assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-3), 1e-6, "eps 1e-3")
    assert notes(norm) == ()


def test_an_eps_that_cannot_be_set_is_said() -> None:
    assert notes(norms.build(EmbDim, 8)) == ("eps cannot be set in EmbDim; it is 1e-05, as the model's",)
    assert notes(norms.build(EmbDim, 8, eps=1e-6)) == ("eps is 1e-05 in EmbDim, where the model's is 1e-06",)
    assert notes(norms.build(NdimBias, 8)) == ("eps cannot be set in NdimBias",)
    assert notes(norms.build("fused", 8)) == notes(norms.build(DimEps, 8)) == ()


def test_a_flag_that_is_called_after_eps_is_none() -> None:
    class WithFlag(EmbDim):
        def __init__(self, emb_dim, eps=1e-5):
            super().__init__(emb_dim)
            self.eps, self.use_eps = eps, True

    assert notes(norms.build(WithFlag, 8)) == ()


def test_an_eps_that_somebody_has_chosen_stays_and_is_said() -> None:
    for norm in (functools.partial(nn.LayerNorm, eps=1e-6), lambda size, **_: nn.LayerNorm(size, 1e-6)):
        built = norms.build(norm, 8)
        assert built.eps == 1e-6
        assert notes(built) == ("eps is 1e-06 in LayerNorm, where the model's is 1e-05",)


def test_an_eps_of_a_function_s_own_is_said_of_our_norms_too(caplog: pytest.LogCaptureFixture) -> None:
    model, said = small_model(), "eps is 0.001 in LayerNorm, where the model's is 1e-05"
    swap_norms(model, lambda size, eps, bias: LayerNorm(size, 1e-3, bias), "ln_f")
    assert notes(model.ln_f) == notes(copy.deepcopy(model.ln_f)) == (said,)
    assert caplog.messages == [said]
    assert notes(norms.build(lambda size, eps, bias: LayerNorm(size, eps, bias), 8, eps=1e-3)) == ()
    assert notes(norms.build(lambda size: LayerNorm(size), 8)) == (
        "eps cannot be set in LayerNorm; it is 1e-05, as the model's",
    )


class OwnFlag(nn.LayerNorm):
    def __init__(self, num_channels, eps=1e-6, affine=True, **kwargs):
        super().__init__(num_channels, eps=eps, elementwise_affine=affine, **kwargs)


class OwnEps(nn.LayerNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, eps=1e-4, **kwargs)


class OwnEpsAndFlag(nn.LayerNorm):
    def __init__(self, size, **kwargs):
        super().__init__(size, eps=1e-4, elementwise_affine=True, **kwargs)


class OwnEpsByShape(nn.LayerNorm):
    def __init__(self, size, **kwargs):
        super().__init__(tuple(size), eps=1e-4, **kwargs)


class OwnEpsOfSomeSizes(nn.LayerNorm):
    def __init__(self, size, **kwargs):
        if size != 8:
            raise ValueError("8 alone")
        super().__init__(size, eps=1e-4, **kwargs)


def own_eps_in_a_function(size, **kwargs):
    return nn.LayerNorm(size, eps=1e-4, **kwargs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make", [OwnFlag, OwnEps, OwnEpsByShape, OwnEpsOfSomeSizes, OwnEpsAndFlag, own_eps_in_a_function]
)
def test_what_a_class_tells_its_base_by_itself_it_is_not_told(make: Any, bias: bool) -> None:
    norm = norms.build(make, 8, eps=1e-3, bias=bias)
    assert construct(make, (8,), eps=1e-3, bias=bias).takes_eps is (make is OwnFlag)
    assert norm.eps == (1e-3 if make is OwnFlag else 1e-4)
    assert (norm.bias is not None) is bias
    said = () if make is OwnFlag else (f"eps is 0.0001 in {type(norm).__name__}, where the model's is 0.001",)
    assert notes(norm) == said
    assert notes(norms.build(make, 8, eps=1e-4)) == (() if make is OwnFlag else (NOT_SET.format(type(norm).__name__),))


NOT_SET = "eps cannot be set in {}; it is 0.0001, as the model's"


def test_what_a_class_tells_its_base_twice_is_its_own_error() -> None:
    class Twice(nn.LayerNorm):
        def __init__(self, size, eps, **kwargs):
            super().__init__(size, eps=eps, **{"eps": eps}, **kwargs)

    assert "got multiple values for keyword argument 'eps'" in refused(Twice)


def test_who_takes_a_config_is_told_what_to_do() -> None:
    class OfAttributes(nn.LayerNorm):
        def __init__(self, config):
            super().__init__(config.d_model)

    class OfKeys(nn.LayerNorm):
        def __init__(self, cfg):
            super().__init__(cfg["emb_dim"])

    class WithAMistake(nn.LayerNorm):
        def __init__(self, size):
            super().__init__(size, self.epsilon)

    way_out = "; if it takes something else than a size, an eps and a flag, wrap it in a function (size, eps, bias)"
    assert "'int' object has no attribute 'd_model'" in refused(OfAttributes)
    assert refused(OfAttributes).endswith(way_out)
    assert refused(OfKeys).endswith(way_out)
    assert "wrap" not in refused(WithAMistake)


def test_a_flag_for_the_shift_is_passed_on() -> None:
    for cls in (NdimBias, nn.LayerNorm, Kernel, Affine, BiasFlag):
        norm = norms.build(cls, 8, bias=False).eval()
        assert norm.bias is None
        assert list(norm.state_dict()) == ["weight"]
        x = torch.randn(3, 8)
        assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-5), 1e-6, cls.__name__)


@pytest.mark.parametrize("cls", [GammaBeta, DimEps, ParameterShape, EmbDim, Nested, A2B2])
def test_a_shift_that_no_flag_leaves_out_stays_zero(cls: type) -> None:
    norm, x = norms.build(cls, 8, bias=False), torch.randn(3, 8)
    assert norm.bias is None
    assert [name for name, _ in norm.named_parameters()] == list(norm.state_dict()) == ["weight"]
    assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-5), 1e-6, cls.__name__)
    assert_close(copy.deepcopy(norm)(x), norm(x), 0, "its copy")


def test_a_size_by_keyword_alone() -> None:
    class ByKeyword(EmbDim):
        def __init__(self, *, width):
            super().__init__(width)

    assert norms.build(ByKeyword, 8).weight.shape == (8,)


def test_a_size_that_must_be_an_int_whatever_it_is_called() -> None:
    class Sum(GammaBeta):
        def forward(self, x):
            mean = x.sum(-1, keepdim=True) / self.normalized_shape
            var = (x - mean).square().sum(-1, keepdim=True) / self.normalized_shape
            return (x - mean) / torch.sqrt(var + self.eps) * self.gamma + self.beta

        def __init__(self, normalized_shape, eps=1e-5):
            super().__init__(normalized_shape, eps)
            self.normalized_shape = normalized_shape

    x = torch.randn(3, 8)
    assert_close(norms.build(Sum, 8)(x), F.layer_norm(x, (8,), eps=1e-5), 1e-6, "an int")


@pytest.mark.parametrize("name", ["dims", "shape"])
def test_a_size_that_must_be_a_list(name: str) -> None:
    class Listed(EmbDim):
        def __init__(self, dims):
            super().__init__(dims.copy())

    class ListedShape(EmbDim):
        def __init__(self, shape):
            super().__init__(shape.copy())

    norm = norms.build(Listed if name == "dims" else ListedShape, 8)
    assert norm.weight.shape == (8,)


def test_a_factory_is_told_what_it_names() -> None:
    seen = []

    def factory(width, epsilon, with_bias):
        seen.append((width, epsilon, with_bias))
        return nn.LayerNorm(width, epsilon, bias=with_bias)

    norms.build(factory, 8, eps=1e-3, bias=False)
    norms.build(lambda *args, **kwargs: seen.append((args, kwargs)) or nn.LayerNorm(8), 8, eps=1e-4)
    assert seen == [(8, 1e-3, False), ((8,), {"eps": 1e-4, "bias": True})]


def test_a_factory_of_one_of_ours_is_one_of_ours() -> None:
    norm = norms.build(functools.partial(DyT, alpha=0.75), 8, bias=False)
    assert type(norm) is DyT
    assert norm.alpha == 0.75
    assert norm.bias is None


def test_a_registered_class_need_not_be_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(norms.registry._REGISTRY, "emb_dim", norms.NormInfo(EmbDim, True, None))
    norm, x = norms.build("emb_dim", 8), torch.randn(3, 8)
    assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-5), 1e-6, "by its registered name")


def test_a_subclass_of_ours_is_itself_and_may_have_more(model: GPT2) -> None:
    class Gated(LayerNorm):
        def __init__(self, normalized_shape: Any, eps: float = 1e-5, bias: bool = True) -> None:
            super().__init__(normalized_shape, eps, bias)
            self.gate = nn.Linear(1, 1)
            self.alpha = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.alpha

    ids = random_ids(1, 5)
    hidden = model.hidden_states(ids)
    swap_norms(model, Gated, "ln_f")
    assert type(model.ln_f) is Gated
    assert model.ln_f.alpha.dtype == torch.float64
    assert_close(model.hidden_states(ids), 2 * hidden, 1e-13, "doubled")


def test_building_draws_no_random_numbers_of_its_own() -> None:
    before = torch.get_rng_state()
    norms.build(EmbDim, 8)
    assert torch.equal(torch.get_rng_state(), before)


# Refused: the class.


def test_what_is_no_module() -> None:
    class Plain:
        def __init__(self, size):
            self.gamma = torch.ones(size)

    assert refused(Plain).endswith("Plain is a class, but not a torch.nn.Module")
    assert refused(lambda size: "a norm").endswith("<lambda> makes a str, not a torch.nn.Module")
    assert refused(nn.LayerNorm(8)).startswith("LayerNorm is a module already made; give its class, or a function")
    assert refused(lambda: nn.LayerNorm(8)).endswith("takes no arguments, but a norm must be told its size")
    assert refused(nn.GroupNorm).startswith("GroupNorm needs num_channels beside a size, an eps and a flag")


def test_a_class_without_a_shift() -> None:
    assert refused(nn.RMSNorm) == (
        "RMSNorm has no shift under any of the names bias, beta, shift, b, offset, b_2, so the model's would be lost"
    )
    assert isinstance(norms.build(nn.RMSNorm, 8, bias=False), nn.RMSNorm)
    assert refused(lambda size: nn.LayerNorm(size, bias=False)).startswith("LayerNorm has no shift")


def test_a_class_without_a_scale() -> None:
    assert refused(lambda size: nn.LayerNorm(size, elementwise_affine=False)).startswith("LayerNorm has no scale")
    assert refused(nn.Identity).startswith("Identity has no scale")


def test_parameters_of_no_known_role() -> None:
    class Strange(EmbDim):
        def __init__(self, emb_dim):
            super().__init__(emb_dim)
            self.alpha, self.omega = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    assert "Strange has parameters of no known role: alpha, omega; known are weight, gamma," in refused(Strange)


def test_two_scales_or_two_shifts() -> None:
    class Twice(EmbDim):
        def __init__(self, emb_dim):
            super().__init__(emb_dim)
            self.gamma = nn.Parameter(torch.ones(emb_dim))

    assert "Twice has two scales, scale and gamma; a norm has one" in refused(Twice)
    assert "has two shifts, 0.bias and 1.bias" in refused(
        lambda size: nn.Sequential(nn.LayerNorm(size, elementwise_affine=True), nn.LayerNorm(size)).requires_grad_()
    ).replace("two scales, 0.weight and 1.weight", "two shifts, 0.bias and 1.bias")


def test_parameters_of_another_shape() -> None:
    class Row(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(1, size)), nn.Parameter(torch.ones(1, size))

    assert refused(Row).endswith("Row is (1, 8), not (8,)")
    assert refused(lambda size: nn.LayerNorm(4)) == "the scale weight of LayerNorm is (4,), not (8,)"
    assert "has no shape before its first forward" in refused(lambda size: nn.LazyLinear(size))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_script_module() -> None:
    assert "TorchScript module" in refused(lambda size: torch.jit.script(nn.LayerNorm(size)))


def test_sizes_that_make_no_sense() -> None:
    for size in (0, (), (3, 0)):
        assert "normalized_shape must be one or more sizes above 0" in refused(EmbDim, size)


# Refused: what it does.


def test_an_error_in_a_constructor(tmp_path: Path) -> None:
    file = file_with(
        tmp_path,
        "class Fragile(nn.Module):\n"
        "    def __init__(self, size, eps=1e-6):\n"
        "        super().__init__()\n"
        "        torch.ones(3) @ torch.ones(4)\n",
    )
    message = refused(f"{file}:Fragile", eps=1e-5)
    assert message.startswith("Fragile(8, eps=1e-05) raised RuntimeError: ")
    assert message.endswith(f"({file}, line 9)")


@pytest.mark.parametrize("base", ["nn.LayerNorm", "minigpt.LayerNorm", "Other"])
def test_an_error_in_a_forward(base: str, tmp_path: Path, model: GPT2) -> None:
    other = inspect.getsource(EmbDim).replace("EmbDim", "Other")
    file = file_with(
        tmp_path,
        f"import minigpt\n\n{other}\n\nclass Fragile({base}):\n    def forward(self, x):\n        return x @ x\n",
    )
    line = file.read_text().splitlines().index("        return x @ x") + 1
    swap_norms(model, f"{file}:Fragile", "h.1.ln_1")
    with pytest.raises(NormError, match=r"^Fragile raised RuntimeError: ") as caught:
        model(random_ids(1, 5))
    assert f"({file}, line {line}) on an input of (1, 5, 48)" in str(caught.value)
    assert str(caught.value).endswith(" in float64")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_raised_deep_in_a_library_names_the_line_that_called_it(tmp_path: Path) -> None:
    file = file_with(
        tmp_path,
        "class Deep(nn.LayerNorm):\n    def forward(self, x):\n        return F.layer_norm(x, (3,), self.weight)\n",
    )
    assert f"({file}, line 8)" in refused_in_use(f"{file}:Deep")


def test_an_error_of_several_lines_is_told_by_its_first() -> None:
    class Wordy(EmbDim):
        def forward(self, x):
            raise ValueError("this\nand that\nand more")

    assert "Wordy raised ValueError: this (" in refused_in_use(Wordy)


def test_an_error_without_words() -> None:
    class Silent(EmbDim):
        def forward(self, x):
            raise NotImplementedError

    assert "Silent raised NotImplementedError (" in refused_in_use(Silent)


def test_a_norm_does_not_decide_that_the_program_ends() -> None:
    class Quitter(EmbDim):
        def forward(self, x):
            raise SystemExit(0)

    class QuitsAtOnce(EmbDim):
        def __init__(self, size):
            sys.exit("enough")

    assert "Quitter raised SystemExit: 0 (" in refused_in_use(Quitter)
    assert "QuitsAtOnce(8) raised SystemExit: enough (" in refused(QuitsAtOnce)
    with pytest.raises(NormError, match=r"cannot be judged: .*Quitter raised SystemExit"):
        check_norm(Quitter, device="cpu", cases="float32, ordinary rows")


def test_a_norm_that_quits_in_one_case_fails_that_case() -> None:
    class QuitsInHalf(EmbDim):
        def forward(self, x):
            return super().forward(x) if x.dtype == torch.float32 else sys.exit(0)

    report = check_norm(QuitsInHalf, device="cpu", cases=["float32, ordinary rows", "float16, ordinary rows"])
    assert [(case.passed, "SystemExit" in (case.note or "")) for case in report.cases] == [(True, False), (False, True)]


def test_memory_that_runs_out_is_not_the_norm_s_error() -> None:
    class Hungry(EmbDim):
        def forward(self, x):
            raise torch.OutOfMemoryError("there is no more")

    with pytest.raises(torch.OutOfMemoryError):
        norms.build(Hungry, 8)(torch.randn(2, 8))


@pytest.mark.parametrize("base", [EmbDim, nn.LayerNorm, LayerNorm], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y[..., :1], "changes the shape: (2, 3, 8) went in, (2, 3, 1) came out"),
        (lambda y: y.flatten(), "changes the shape: (2, 3, 8) went in, (48,) came out"),
        (lambda y: y.double(), "changes the dtype: torch.float32 went in, torch.float64 came out"),
        (lambda y: y.half(), "changes the dtype: torch.float32 went in, torch.float16 came out"),
        (lambda y: y.to("meta"), "changes the device: cpu went in, meta came out"),
        (lambda y: (y, y), "returns a tuple, where a norm returns one tensor"),
        (lambda y: None, "returns a NoneType, where a norm returns one tensor"),
    ],
    ids=["narrow", "flat", "double", "half", "meta", "tuple", "none"],
)
def test_an_output_unlike_the_input(base: type, change: Callable[[Tensor], Any], said: str) -> None:
    class Changing(base):
        def forward(self, x):
            return change(super().forward(x))

    assert refused_in_use(Changing).endswith(f"Changing {said}")


def test_parameters_wider_than_the_input_may_not_widen_it() -> None:
    assert "changes the dtype" in refused_in_use(EmbDim, torch.randn(2, 3, 8).half())
    assert norms.build(Wide, 8)(torch.randn(2, 3, 8).half()).dtype == torch.float16


def test_autocast_may_widen_it(device: torch.device) -> None:
    norm = norms.build(EmbDim, 8).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert norm(torch.randn(3, 8, device=device).bfloat16()).dtype == torch.float32


def test_an_error_leaves_the_model_as_it_was(model: GPT2) -> None:
    before = model.norm_modules()
    made = []

    def sometimes(size):
        made.append(nn.LayerNorm(size) if len(made) < 3 else nn.RMSNorm(size))
        return made[-1]

    for norm in (sometimes, nn.RMSNorm, "torch.nn:LayrNorm", "nowhere.py:LayerNorm"):
        with pytest.raises(NormError):
            swap_norms(model, norm)
        assert all(model.get_submodule(site) is module for site, module in before.items())


@pytest.mark.parametrize("several", [tuple, iter, np.array, dict.fromkeys], ids=lambda several: several.__name__)
def test_patterns_may_come_in_anything_that_can_be_gone_through(model: GPT2, several: Any) -> None:
    assert swap_norms(model, EmbDim, several(["ln_f", "h.0.ln_1"])) == ["h.0.ln_1", "ln_f"]


def test_no_pattern_at_all(model: GPT2) -> None:
    with pytest.raises(NormError, match=r'^no pattern of norm sites was given; "\*" is all of them$'):
        swap_norms(model, EmbDim, [])


@pytest.mark.parametrize("sites", [None, 3, ["ln_f", 3], [None]], ids=str)
def test_a_pattern_that_is_no_text(model: GPT2, sites: Any) -> None:
    with pytest.raises(NormError, match=r"^a pattern of norm sites is a text such as 'h\.\*\.ln_1', and not (None|3)$"):
        swap_norms(model, EmbDim, sites)


@pytest.mark.parametrize("norm", [3, None, ["fused"]], ids=str)
def test_what_makes_no_norm(model: GPT2, norm: Any) -> None:
    with pytest.raises(NormError, match=r"^a norm is a name, a class, or a function that makes one, not "):
        swap_norms(model, norm)


# Files and packages.


def test_a_file_is_imported_once_and_an_edited_one_anew(tmp_path: Path) -> None:
    body = "print('imported')\nCONSTANT = 1\n\n\nclass Mine(nn.LayerNorm):\n    constant = CONSTANT\n"
    file = file_with(tmp_path, body)
    first, again = norms.build(f"{file}:Mine", 8), norms.build(f"{file}:Mine", 8)
    assert type(first) is type(again)
    assert first.constant == 1
    file_with(tmp_path, body.replace("CONSTANT = 1", "CONSTANT = 2"))
    assert norms.build(f"{file}:Mine", 8).constant == 2
    assert first.constant == 1
    assert not (tmp_path / "__pycache__").exists()


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / str(i)).mkdir()
        file_with(tmp_path / str(i), f"class Mine(nn.LayerNorm):\n    constant = {i}\n")
    assert [norms.build(f"{tmp_path}/{i}/norm_of_mine.py:Mine", 8).constant for i in (1, 2)] == [1, 2]


def test_a_relative_path_and_one_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, EmbDim)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("norm_of_mine.py", "./norm_of_mine.py", "~/norm_of_mine.py"):
        assert norms.build(f"{path}:EmbDim", 8).weight.shape == (8,)


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, EmbDim, name="neighbour_of_mine.py")
    file = file_with(tmp_path, "from neighbour_of_mine import EmbDim\n\n\nclass Mine(EmbDim):\n    pass\n")
    path = list(sys.path)
    assert norms.build(f"{file}:Mine", 8).weight.shape == (8,)
    assert sys.path == path


def test_a_neighbour_hides_no_module_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorsys.py").write_text("raise AssertionError('the neighbour was imported')\n")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert norms.build(f"{file_with(tmp_path, 'import colorsys; Mine = nn.LayerNorm')}:Mine", 8).weight.shape == (8,)
    assert sys.modules["colorsys"].__file__ != str(tmp_path / "colorsys.py")


def test_a_class_within_a_class(tmp_path: Path) -> None:
    file = file_with(tmp_path, "class Outer:\n    class Inner(nn.LayerNorm):\n        pass\n")
    assert isinstance(norms.build(f"{file}:Outer.Inner", 8), nn.LayerNorm)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused(f"{tmp_path}/none.py:Mine") == f"cannot read {tmp_path}/none.py: No such file or directory"
    assert refused("no/folder/norm.py:Mine") == "cannot read no/folder/norm.py: No such file or directory"
    (tmp_path / "folder.py").mkdir()
    assert refused(f"{tmp_path}/folder.py:Mine").endswith("Is a directory")
    (tmp_path / "norm.txt").write_text("text")
    assert refused(f"{tmp_path}/norm.txt:Mine").endswith("norm.txt is not a Python file; its name must end in .py")


@pytest.mark.parametrize(
    ("body", "line", "said"),
    [
        ("x = 1 / 0\n", 6, "ZeroDivisionError: division by zero"),
        ("\nimport package_that_is_not_there\n", 7, "ModuleNotFoundError: No module named 'package_that_is_not_there'"),
        ("def f(:\n    pass\n", 6, "SyntaxError: invalid syntax"),
        ("raise SystemExit('bye')\n", 6, "SystemExit: bye"),
        ("\n\ndef f():\n    raise KeyError('k')\n\n\nf()\n", 9, "KeyError: 'k'"),
        ("F.layer_norm(torch.ones(3), (4,))\n", 6, "RuntimeError: Given normalized_shape=[4]"),
    ],
    ids=["division", "import", "syntax", "exit", "within", "library"],
)
def test_a_file_that_does_not_import(body: str, line: int, said: str, tmp_path: Path) -> None:
    file, modules = file_with(tmp_path, body), set(sys.modules)
    message = refused(f"{file}:Mine")
    assert message.startswith(f"{file} does not import: {said}")
    assert message.endswith(f"({file}, line {line})")
    assert not [name for name in sys.modules.keys() - modules if name.startswith("norm_of_mine")]
    file_with(tmp_path, "class Mine(nn.LayerNorm):\n    pass\n")
    norms.build(f"{file}:Mine", 8)  # mended, it is read anew


def test_a_name_that_a_file_does_not_have(tmp_path: Path) -> None:
    file = file_with(tmp_path, "One = type('One', (nn.Linear,), {})\n\n\nclass Other(One):\n    pass\n\n\nN = 3\n")
    both = "its torch.nn.Module classes are One, Other"
    assert refused(f"{file}:Mine") == f"{file} has no 'Mine'; {both}"
    assert refused(f"{file}:N") == f"{file}:N is of type int, not a class; {both}"
    assert refused(f"{file}:Othr").endswith("its torch.nn.Module classes are Other")
    for which in (f"{file}:", f"{file}"):
        assert refused(which) == f"{which} names no class, as {file}:Name would; {both}"
    empty = file_with(tmp_path, "", name="empty.py")
    assert refused(f"{empty}:Mine").endswith("has no torch.nn.Module at all")


def test_a_file_of_a_package_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "ops.py").touch()
    said = refused(f"{file_with(tmp_path, 'from .ops import nothing')}:Mine")
    assert said.endswith("; name it as package.module:Name, with the folder of its package on PYTHONPATH")


def test_a_shift_that_is_a_buffer_is_told_so() -> None:
    class Fixed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(width))
            self.register_buffer("beta", torch.zeros(width))

    said = refused(Fixed)
    assert said.endswith(
        "Fixed holds its shift, beta, as a buffer, and not as a Parameter, so the model's would be lost"
    )


def test_a_package_that_is_not_there_or_has_no_such_class() -> None:
    hint = "a class in a file of your own is path/to/file.py:Name"
    assert refused("nowhere:Mine") == f"there is no module 'nowhere' on Python's path; {hint}"
    for norm in (":Mine", ".nowhere:Mine", "two words:Mine"):
        assert refused(norm) == f"{norm!r} names no norm; write package.module:Name or path/to/file.py:Name"
    assert refused("torch.nowhere:Mine") == f"there is no module 'torch.nowhere' on Python's path; {hint}"
    assert "its torch.nn.Module classes are LayerNorm" in refused("torch.nn:LayrNorm")
    assert refused("torch.nn:Zzz").endswith(" more")
    assert refused("torch.nn:functional").startswith("torch.nn:functional is of type module, not a class")
    assert refused("torch.nn:Parameter").endswith("Parameter is a class, but not a torch.nn.Module")


def test_a_package_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file_with(tmp_path, "import package_that_is_not_there\n", name="broken_of_mine.py")
    file_with(tmp_path, "x = 1 / 0\n", name="worse_of_mine.py")
    missing, worse = refused("broken_of_mine:Mine"), refused("worse_of_mine:Mine")
    assert "does not import: ModuleNotFoundError: No module named 'package_that_is_not_there'" in missing
    assert worse.endswith(f"ZeroDivisionError: division by zero ({tmp_path}/worse_of_mine.py, line 6)")


def test_an_unknown_name_is_no_file() -> None:
    assert refused("texbook").startswith("unknown norm 'texbook'; registered are ")


# What it costs.


def test_an_adapted_norm_is_looked_at_without_reading_its_values() -> None:
    """Shape, dtype and device only: a norm that makes NaN or is far off is used, for others to judge."""

    class Wrong(EmbDim):
        def forward(self, x):
            return x * math.nan

    assert norms.build(Wrong, 8)(torch.randn(2, 8)).isnan().all()
    with torch.device("meta"):
        assert norms.build(EmbDim, 8)(torch.randn(2, 8)).is_meta


# --- Constructors, and sums of its own ---


class EpsFirst(nn.Module):
    def __init__(self, eps: float = 1e-3, hidden_size: int = 128) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = *_pair(hidden_size), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Sums(EpsFirst):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return residual + delta, 2 * self(residual + delta)


class SumsByItsOwnNames(GammaBeta):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return residual + delta, 2 * self(residual + delta)


class ThreeArguments(EpsFirst):
    def add_norm(self, x: Tensor, residual: Tensor, prenorm: bool) -> Tensor:
        return self(x + residual)


class NoPair(EpsFirst):
    def add_norm(self, residual: Tensor, delta: Tensor) -> Tensor:
        return self(residual + delta)


class NarrowsSums(EpsFirst):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return residual + delta, self(residual + delta).bfloat16()


class RaisesInSums(EpsFirst):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        raise ZeroDivisionError("no sums today")


class SumsByProperty(EpsFirst):
    @property
    def add_norm(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return lambda residual, delta: (residual + delta, self(residual + delta))


class NoSums(EpsFirst):
    """What it has under that name is something else."""

    def __init__(self, eps: float = 1e-3, hidden_size: int = 128) -> None:
        super().__init__(eps, hidden_size)
        self.add_norm = False


class SizeAfterAFlag(EpsFirst):
    def __init__(self, bias: bool = True, size: tuple[int, ...] = (16,), eps: float = 1e-5) -> None:
        super().__init__(eps, size if isinstance(size, int) else size[0])


class NoModes(EpsFirst):
    def train(self, mode: bool = True) -> nn.Module:
        raise RuntimeError("inference only")


class OfMeta(nn.Module):
    """Its Parameters have no values before it is given others."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        with torch.device("meta"):
            self.weight, self.bias = _pair(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


@dataclasses.dataclass
class NoHash(nn.Module):
    """As a dataclass that compares is."""

    dim: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__init__()
        self.weight, self.bias = _pair(self.dim)


def _pair(dim: int) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))


def test_a_size_is_never_taken_for_an_eps(model: GPT2) -> None:
    swap_norms(model, EpsFirst)
    norm: Any = model.ln_f
    assert (norm.eps, norm.weight.shape) == (model.config.layer_norm_epsilon, (model.config.n_embd,))
    swap_norms(model, SizeAfterAFlag)
    assert model.ln_f.weight.shape == (model.config.n_embd,)
    swap_norms(model, NoSums)
    model(torch.tensor([[1, 2]]))
    with pytest.raises(NormError, match="is told no size: it takes eps, elementwise_affine"):
        norms.build(functools.partial(nn.LayerNorm, 64), 64)


def test_what_has_no_name_to_call_it_by_is_told_by_place() -> None:
    class ByPlace(nn.LayerNorm):
        def __init__(self, dim, momentum=0.1, eps=1e-6, /, *, bias=False):
            super().__init__(dim, eps, bias=bias)
            self.momentum = momentum

    norm: Any = norms.build(ByPlace, 8, eps=1e-3, bias=True)
    assert (norm.eps, norm.momentum) == (1e-3, 0.1)
    assert norm.bias is not None
    assert notes(norm) == ()


def test_a_flag_of_the_shift_among_those_of_the_scale() -> None:
    class Elementwise(nn.Module):
        def __init__(self, dim, eps=1e-6, elementwise_affine=False, elementwise_bias=False):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(dim)) if elementwise_affine else None
            self.bias = nn.Parameter(torch.zeros(dim)) if elementwise_bias else None

    assert norms.build(Elementwise, 8).bias is not None
    assert norms.build(Elementwise, 8, bias=False).bias is None


def test_alpha_is_a_scale_where_it_is_as_wide_as_a_row() -> None:
    class AlphaBias(nn.Module):
        def __init__(self, features, eps=1e-6, wide=True):
            super().__init__()
            self.eps = eps
            self.alpha = nn.Parameter(torch.ones(features if wide else 1))
            self.bias = nn.Parameter(torch.zeros(features))

        def forward(self, x):
            return F.layer_norm(x, x.shape[-1:], self.alpha, self.bias, self.eps)

    norm: Any = norms.build(AlphaBias, 8, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(3, 8)
    assert_same_bits(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias, 1e-5), "by the name of weight")
    with pytest.raises(NormError, match="parameters of no known role: alpha; known are"):
        norms.build(functools.partial(AlphaBias, wide=False), 8)


@pytest.mark.parametrize(
    ("scale", "shift"), [("gain", "offset"), ("_gamma", "_beta"), ("w", "b"), ("a", "b"), ("a_2", "b_2"), ("g", "b")]
)
def test_names_of_a_scale_and_a_shift(scale: str, shift: str) -> None:
    class Named(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.register_parameter(scale, nn.Parameter(torch.ones(size)))
            self.register_parameter(shift, nn.Parameter(torch.zeros(size)))

        def forward(self, x):
            return F.layer_norm(x, x.shape[-1:], getattr(self, scale), getattr(self, shift))

    norm: Any = norms.build(Named, 8)
    norm.weight.data.normal_()
    norm.bias.data.normal_()
    x = torch.randn(3, 8)
    assert_same_bits(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias), scale)


@pytest.mark.parametrize("cls", [Sums, SumsByItsOwnNames])
def test_a_residual_addition_of_its_own_is_used(cls: type[nn.Module]) -> None:
    norm, residual, delta = norms.build(cls, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for used in (norm, copy.deepcopy(norm)):
        total, y = norms.add_norm(used, residual, delta)
        assert torch.equal(total, residual + delta)
        assert torch.equal(y, 2 * used(total))


class AsksItselfForMore(nn.Module):
    """A forward that adds the residual where it is given one, and an add_norm that asks it to."""

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(hidden_size)), nn.Parameter(torch.rand(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> Any:
        x = x if residual is None else x + residual
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return (y, x) if prenorm else y

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        y, total = self(delta, residual, prenorm=True)
        return total, y


def test_an_addition_may_ask_its_own_forward_for_more_than_a_model_does() -> None:
    model, ids = small_model(), random_ids(2, 7)
    wanted = model(ids)
    swap_norms(model, AsksItselfForMore)
    assert_close(model(ids), wanted, 1e-5, "logits")
    assert check_norm(AsksItselfForMore, cases=["residual added too*", "float32, ordinary rows"]).passed


def test_a_class_of_a_session_is_in_no_file() -> None:
    """As of `python -c` and notebooks, whose __main__ has no file."""
    lines = """
        import torch, minigpt
        class My(torch.nn.LayerNorm): ...
        class Raises(My):
            def forward(self, x): raise ValueError("no rows today")
        model = minigpt.GPT2(minigpt.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8))
        print(len(minigpt.swap_norms(model, My)))
        minigpt.swap_norms(model, Raises)
        try:
            model(torch.ones(1, 2, dtype=torch.long))
        except minigpt.NormError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"3\nRaises raised ValueError: no rows today \(<string>, line 5\) .*\n", done.stdout), done


class ItsOwnCall(nn.LayerNorm):
    """Comes by no forward, so that a watch set there would not see what it does."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] > 3:
            raise ValueError("three at most")
        return super().__call__(x)[..., :1] if x.shape[1] == 3 else super().__call__(x)


def test_a_norm_that_is_called_by_a_way_of_its_own_is_watched_there() -> None:
    model = small_model()
    ids = random_ids(1, 2)
    expected = model(ids)
    swap_norms(model, ItsOwnCall)
    assert torch.equal(model(ids), expected)
    assert list(model.state_dict()) == list(small_model().state_dict())
    with pytest.raises(NormError, match=r"^ItsOwnCall raised ValueError: three at most"):
        model(random_ids(1, 4))
    with pytest.raises(NormError, match=r"^ItsOwnCall changes the shape"):
        model(random_ids(1, 3))


class Sparse(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to_sparse()


def test_a_sparse_output_is_refused() -> None:
    model = small_model()
    swap_norms(model, Sparse, "ln_f")
    with pytest.raises(NormError, match=r"^Sparse returns a tensor that is sparse_coo, not strided"):
        model(random_ids(1, 3))


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (ThreeArguments, r"add_norm of ThreeArguments cannot be called with \(residual, delta\): missing .*'prenorm'"),
        (NoPair, "add_norm of NoPair does not return the sum and its norm, as a pair"),
        (NarrowsSums, "NarrowsSums changes the dtype: torch.float64 went in, torch.bfloat16 came out"),
        (RaisesInSums, "RaisesInSums raised ZeroDivisionError: no sums today"),
        (SumsByProperty, "add_norm of SumsByProperty is a property; make it a method"),
        (NoModes, "NoModes raised RuntimeError: inference only"),
        (NoHash, "NoHash raised TypeError: unhashable type"),
    ],
)
def test_what_somebody_else_s_code_raises_is_told_in_one_sentence(cls: type, said: str, model: GPT2) -> None:
    def use() -> None:
        swap_norms(model, cls)
        model(torch.tensor([[1, 2]]))

    with pytest.raises(NormError, match=said):
        use()


def test_parameters_without_values_are_only_places(model: GPT2) -> None:
    x = torch.tensor([[1, 2, 3]])
    expected = model(x)
    swap_norms(model, OfMeta)
    torch.testing.assert_close(model(x), expected)


def test_a_module_that_answers_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text("def __getattr__(name):\n    raise RuntimeError('ask somebody else')\n")
    with pytest.raises(NormError, match=r"asked for 'Norm', .*odd\.py raised RuntimeError: ask somebody else"):
        norms.build(f"{file}:Norm", 8)
