"""The exact norms against float64, examples worked by hand, and the registry. The conformance kit checks hard rows."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_bits, assert_within, max_abs
from torch import Tensor, nn

from minigpt import LayerNorm, NormError, norms
from minigpt.norms import registry
from minigpt.processor import HALVES

EXACT = ("fused", "textbook")
DTYPES = (torch.float64, torch.float32, *HALVES)
SHAPES = [1, 7, 768, (3, 7), (2, 3, 5)]

every_norm = pytest.mark.parametrize("name", EXACT)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def registered_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    norms.available()  # import every norm first: a module registers only once
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def random_norm(name: str, shape: int | tuple[int, ...], *, eps: float = 1e-5, bias: bool = True,
                dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Module:  # fmt: skip
    """A norm whose scale and shift are random: at 1 and 0 a test would not see them."""
    norm = norms.build(name, shape, eps=eps, bias=bias)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn_like(parameter) + 0.5)
    return norm.to(device, dtype)


def formula(norm: nn.Module, x: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias in float64 (Ba et al. 2016, arXiv 1607.06450, equations 3 and 4)."""
    row = tuple(range(-norm.weight.ndim, 0))
    x, weight = x.double(), norm.weight.double()
    var, mean = torch.var_mean(x, dim=row, correction=0, keepdim=True)
    shift = 0 if norm.bias is None else norm.bias.double()
    return (x - mean) / torch.sqrt(var + norm.eps) * weight + shift


def rounding(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the largest error of each element of the output that rounding explains.

    It is one unit in the last place of the output, whose terms may cancel, or the smallest float16. The statistics add
    their own error. They are in float32 or wider, so the mean is off by a few units in the last place of the row's
    largest element. That error is divided by the row's deviation.
    """
    row, own = tuple(range(-norm.weight.ndim, 0)), torch.finfo(x.dtype)
    wide = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    deviation = torch.sqrt(x.double().var(dim=row, correction=0, keepdim=True) + norm.eps)
    lost = 8 * wide * (1 + x.double().abs().amax(dim=row, keepdim=True) / deviation) * norm.weight.double().abs()
    shift = 0 if norm.bias is None else norm.bias.double().abs()
    return own.eps * (formula(norm, x).abs() + shift + own.smallest_normal) + lost


def assert_is_layer_norm(norm: nn.Module, x: Tensor, what: str) -> None:
    """Same shape and dtype, and within rounding of the formula, element by element."""
    y, before = norm(x), x.clone()
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.isfinite().all()
    excess = ((y.double() - formula(norm, x)).abs() / rounding(norm, x)).max().item()
    assert_within(excess, 1.0, max_abs(y), f"{what}: error in units of what rounding allows")
    assert torch.equal(x, before), "the input was written to"


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_norm
def test_is_the_formula(name: str, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    sizes = (shape,) if isinstance(shape, int) else shape
    x = (torch.randn(4, 5, *sizes) * 2 + 0.7).to(device, dtype)
    for bias in (True, False):
        norm = random_norm(name, shape, bias=bias, dtype=dtype, device=device)
        assert (norm.bias is None) == (not bias)
        assert_is_layer_norm(norm, x, f"bias={bias}")


@every_norm
@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3), ()], ids=str)
def test_no_rows_and_a_single_row_without_a_batch(name: str, leading: tuple[int, ...]) -> None:
    norm, x = random_norm(name, (3, 5)), torch.randn(*leading, 3, 5)
    y = norm(x)
    assert y.shape == x.shape
    if y.numel():
        assert_close(y, formula(norm, x), 1e-6, f"leading {leading}")


@every_norm
def test_starts_at_scale_one_and_shift_zero_with_eps_of_gpt2(name: str) -> None:
    norm = norms.build(name, (2, 3))
    assert {key: tuple(value.shape) for key, value in norm.state_dict().items()} == {"weight": (2, 3), "bias": (2, 3)}
    assert torch.equal(norm.weight, torch.ones(2, 3))
    assert torch.equal(norm.bias, torch.zeros(2, 3))
    assert norm.eps == 1e-5
    assert [key for key, _ in norms.build(name, 3, bias=False).named_parameters()] == ["weight"]


@every_norm
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_input_scale_and_shift(name: str, bias: bool) -> None:
    norm = random_norm(name, (2, 3), bias=bias, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, *norm.parameters()))


def test_fused_is_the_library_s_own_bits(device: torch.device) -> None:
    for dtype in DTYPES:
        norm = random_norm("fused", (3, 7), eps=1e-4, dtype=dtype, device=device)
        x = torch.randn(9, 3, 7).to(device, dtype)
        assert_same_bits(norm(x), F.layer_norm(x, (3, 7), norm.weight, norm.bias, 1e-4), str(dtype))


# What the textbooks work out by hand.


@every_norm
def test_two_rows_worked_by_hand(name: str) -> None:
    x = torch.tensor([[0.2, 0.1, 0.3], [0.5, 0.1, 0.1]])
    deviation = torch.sqrt(x.var(dim=-1, correction=0) + 1e-5)  # what a row is divided by
    torch.testing.assert_close(deviation, torch.tensor([0.0817, 0.1886]), atol=5e-5, rtol=0)
    wanted = torch.tensor([[0.0, -1.2238, 1.2238], [1.4140, -0.7070, -0.7070]])
    torch.testing.assert_close(norms.build(name, 3)(x).detach(), wanted, atol=5e-5, rtol=0)
    without_eps = norms.build(name, 3, eps=0.0)(x).detach()
    assert not torch.allclose(without_eps, wanted, atol=5e-4), "these digits are those of eps = 1e-5"


# The registry.


class Doubling(LayerNorm):
    """A norm of a test's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_the_built_in_norms_are_exact_and_available() -> None:
    for name in EXACT:
        info = norms.available()[name]
        assert info.exact
        assert info.available
        assert info.reason is None
        assert isinstance(norms.build(name, 4), LayerNorm)


def test_a_registered_class_is_built_by_its_name() -> None:
    assert norms.register("doubling", exact=False)(Doubling) is Doubling
    assert not norms.available()["doubling"].exact
    norm = norms.build("doubling", (2, 3), eps=1e-3, bias=False)
    assert type(norm) is Doubling
    assert (norm.normalized_shape, norm.eps, norm.bias) == ((2, 3), 1e-3, None)


def test_a_factory_of_something_else_is_refused() -> None:
    with pytest.raises(NormError, match=r"makes a str, not a torch\.nn\.Module"):
        norms.build(lambda *_, **__: "a norm", 3)


def test_a_name_is_taken_once() -> None:
    norms.register("doubling")(Doubling)
    norms.register("doubling")(Doubling)  # the same class again, as a reloaded module registers it
    with pytest.raises(NormError, match=r"'doubling' is taken by .*Doubling"):
        norms.register("doubling")(nn.LayerNorm)
    with pytest.raises(NormError, match="'textbook' is taken"):
        norms.register("textbook")(Doubling)
    assert norms.lookup("textbook").cls is LayerNorm


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "mine.py"])
def test_a_name_that_would_never_be_found_is_no_name(name: str) -> None:
    with pytest.raises(NormError, match="cannot name a norm"):
        norms.register(name)


def test_a_norm_whose_package_is_missing_says_how_to_get_it() -> None:
    said = "needs it: pip install 'minigpt[it]'"
    norms.register("absent", obstacle=lambda device: said)(Doubling)
    info = norms.available()["absent"]
    assert not info.available
    assert info.reason == said
    with pytest.raises(NormError, match=r"norm 'absent' needs it: .*minigpt\[it\]"):
        norms.build("absent", 3)
