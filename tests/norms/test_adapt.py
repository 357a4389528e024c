"""Somebody else's class as a norm: found, called, loaded and held as it is written, or refused in one sentence."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_bits, max_abs, random_ids, small_model
from norm_classes import EmbDim
from sabotages import NanoGPT
from torch import nn

from minigpt import GPT2, LayerNorm, NormError, norms, swap_norms
from minigpt.norms.foreign.adapt import OnePlusNorm, notes
from minigpt.norms.foreign.builder import claim_of, name_of
from minigpt.norms.variants import DyT


class WithEps(nn.Module):
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


class ParameterShape(WithEps):
    """(parameter_shape, eps) over as many trailing dimensions as the shape has: an int has none."""

    def __init__(self, parameter_shape, eps=1e-7):
        super().__init__(parameter_shape, eps)
        self.parameter_shape = parameter_shape

    def forward(self, inputs):
        return F.layer_norm(inputs, self.parameter_shape, self.gamma, self.beta, self.eps)


class ChannelsLast(ParameterShape):
    """(normalized_shape, eps) as ConvNeXt's, which makes a shape of the size by itself."""

    def __init__(self, normalized_shape, eps=1e-6):
        super().__init__(normalized_shape, eps)
        self.parameter_shape = (normalized_shape,)


class Kernel(nn.Module):
    """A kernel's module: eps under its own name, a flag for the shift that is off by default, and buffers."""

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


class Nested(nn.Module):
    """Its parameters are those of a module within."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x):
        return self.norm(x)


class A2B2(nn.Module):
    """Parameters as the annotated transformer calls them; one of them under two names."""

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.weight, self.eps = self.a_2, eps

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], (self.a_2 + self.weight) / 2, self.b_2, self.eps)


class WholeEps(EmbDim):
    """Its eps is a whole number."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__(emb_dim)
        self.eps = 0


EVERY = [WithEps, ParameterShape, ChannelsLast, EmbDim, nn.LayerNorm, Kernel, Affine, Nested, A2B2]
SOME = [EmbDim, Kernel, Nested, A2B2]  # as they are, with buffers, within another, under two names
every_class = pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
some_class = pytest.mark.parametrize("cls", SOME, ids=lambda cls: cls.__name__)


class OwnFlag(nn.LayerNorm):
    def __init__(self, num_channels, eps=1e-6, affine=True, **kwargs):
        super().__init__(num_channels, eps=eps, elementwise_affine=affine, **kwargs)


class TellsItsBase(nn.LayerNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, eps=1e-4, **kwargs)


@pytest.fixture
def model() -> GPT2:
    return small_model(dtype=torch.float64)


@torch.no_grad()
def test_torch_s_own_layer_norm_is_the_fused_one_to_the_bit() -> None:
    model, ids = small_model(), random_ids(2, 17)
    expected = model(ids)
    swap_norms(model, "torch.nn:LayerNorm")
    assert type(model.ln_f) is nn.LayerNorm
    assert_same_bits(model(ids), expected, "logits")


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
def test_logits_and_gradients_are_those_of_layer_norm(cls: type, model: GPT2) -> None:
    ids = random_ids(2, 9)
    logits = model(ids)
    logits.square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    swap_norms(model, cls)
    actual = model(ids)
    actual.square().mean().backward()
    assert_close(actual, logits, 1e-13, "logits in float64")
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], 1e-11, name)


@some_class
@torch.no_grad()
def test_weights_loaded_into_it_are_what_it_computes_with(cls: type, model: GPT2) -> None:
    weights, ids = small_model(dtype=torch.float64, n_inner=192).state_dict(), random_ids(2, 9)
    weights = {name: tensor + 0.25 for name, tensor in weights.items()}
    for assign in (False, True):
        hf, ours = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
        swap_norms(ours, cls)
        for each in (hf, ours):
            each.load_state_dict(weights, strict=True, assign=assign)
        assert_close(ours(ids), hf(ids), 1e-13, f"assign={assign}")


@some_class
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


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@some_class
@torch.no_grad()
def test_a_copy_and_a_pickle_are_models_of_their_own(cls: type, twin_of: Any, model: GPT2) -> None:
    swap_norms(model, cls)
    ids = random_ids(2, 9)
    other, expected = twin_of(model), model(ids)
    assert_same_bits(other(ids), expected, "the copy")
    other.ln_f.weight.zero_()
    other.ln_f.bias.zero_()
    assert max_abs(other(ids)) == 0
    assert_same_bits(model(ids), expected, "the model that it was copied from")


@some_class
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
        assert (norm.norm.ones.dtype, norm.norm.ones.device.type) == (torch.bfloat16, device.type)
        assert norm.norm.calls.dtype == torch.long
    model(random_ids(1, 4, device=device))
    assert model.ln_f.norm.calls == 1, "asked before it was put in, it would have counted that"


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = small_model(EmbDim, device="meta")
        assert model.ln_f(torch.empty(1, 4, 48)).shape == (1, 4, 48)
    swap_norms(model, Kernel)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("cls", [WithEps, ParameterShape, Kernel, Affine, Nested, A2B2])
def test_the_model_s_eps_is_passed_on(cls: type) -> None:
    x = torch.randn(5, 8) * 1e-2
    norm = norms.build(cls, 8, eps=1e-3).eval()
    with torch.no_grad():
        norm.bias.zero_()
    assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-3), 1e-6, "eps 1e-3")
    assert notes(norm) == ()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("make", "eps", "message"),
    [
        ("fused", 1e-3, None),
        (WithEps, 1e-3, None),
        (EmbDim, 1e-5, None),  # it has an eps of its own, which is the model's
        (EmbDim, 1e-6, "eps is 1e-05 in EmbDim, where the model's is 1e-06"),
        (WholeEps, 1e-5, "eps is 0 in WholeEps, where the model's is 1e-05"),
        (NanoGPT, 1e-5, "eps cannot be set in NanoGPT"),
        (OwnFlag, 1e-3, None),
        (TellsItsBase, 1e-4, None),  # what a class tells its base by itself it is not told
        (TellsItsBase, 1e-3, "eps is 0.0001 in TellsItsBase, where the model's is 0.001"),
        (lambda size, **more: nn.LayerNorm(size, eps=1e-4, **more), 1e-3, "eps is 0.0001 in LayerNorm, where the "),
        (lambda size, eps, bias: LayerNorm(size, eps, bias=bias), 1e-3, None),
        (
            lambda size, eps, bias: LayerNorm(size, 1e-3, bias=bias),
            1e-5,
            "eps is 0.001 in LayerNorm, where the model's is",
        ),
    ],
)
def test_another_eps_than_the_model_s_is_said(make: Any, eps: float, message: str | None, bias: bool) -> None:
    norm = norms.build(make, 8, eps=eps, bias=bias)
    assert (norm.bias is not None) is bias
    actual = notes(norm)
    assert len(actual) == (message is not None)
    assert all(note.startswith(message or "") for note in actual)


def test_a_flag_for_the_shift_is_passed_on() -> None:
    for cls in (NanoGPT, nn.LayerNorm, Kernel, Affine):
        norm = norms.build(cls, 8, bias=False).eval()
        assert norm.bias is None
        assert list(norm.state_dict()) == ["weight"]
        x = torch.randn(3, 8)
        assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-5), 1e-6, cls.__name__)


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


def test_an_error_at_the_third_site_leaves_the_model_as_it_was(model: GPT2) -> None:
    before, made = model.norm_modules(), list[Any]()

    def sometimes(size):
        made.append(nn.LayerNorm(size) if len(made) < 3 else nn.BatchNorm1d)
        return made[-1]

    with pytest.raises(NormError):
        swap_norms(model, sometimes)
    assert model.norm_modules() == before
    with pytest.raises(NormError, match=r"^sites is empty; give at least one pattern"):
        swap_norms(model, EmbDim, [])


@pytest.mark.parametrize(("name", "claim"), [("fused", "layer_norm"), ("rms", "rms_norm"), ("dyt", "")])
def test_a_norm_keeps_its_name_and_claim_where_the_weight_is_smaller_by_one(name: str, claim: str) -> None:
    norm = norms.build(name, 8, eps=1e-5)
    lent = OnePlusNorm(norm, norm.get_parameter("weight"), 1e-5, is_wide=False)
    assert (name_of(lent), claim_of(lent)) == (name, claim)
