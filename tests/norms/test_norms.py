"""Each registered norm is its own formula, in float64, and what it means in a model. The kit checks hard rows."""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_bits, assert_within, max_abs, random_ids, small_model
from norm_classes import Doubling
from torch import Tensor, nn

import minigpt
from minigpt import LayerNorm, NormError, norms, swap_norms
from minigpt.norms import registry
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.precision import HALVES
from minigpt.swap import fit_norms

EXACT = ("fused", "textbook")
ELEMENTWISE = ("dyt", "derf", "hardtanh", "identity", "mix:0.75")  # a constant row is not the shift
VARIANTS = ("std_eps", "rms", "frozen", "taper:0.25", "detached", "no_scale", "no_affine", *ELEMENTWISE)
MORE = {"dyt": {"alpha"}, "hardtanh": {"alpha"}, "derf": {"alpha", "s"}}  # Parameters beside weight and bias
DTYPES = (torch.float64, torch.float32, *HALVES)
DEVIATION = 1.75  # what the frozen norms here divide by; the same number in every dtype

every_norm = pytest.mark.parametrize("name", EXACT + VARIANTS)
every_variant = pytest.mark.parametrize("name", VARIANTS)


def test_every_registered_norm_is_in_a_table_of_the_tests_and_in_that_of_the_docs() -> None:
    """A new norm has a formula here, or tests of its own as the kernels of triton have."""
    names = {*norms.available()}
    assert names == {name.partition(":")[0] for name in (*EXACT, *VARIANTS)} | {"triton"}
    page = (Path(__file__).parents[2] / "docs" / "norms.md").read_text(encoding="utf-8")
    assert names == {name.partition(":")[0] for name in re.findall(r"^\| `([\w:.]+)` \| (?:yes|no) \|", page, re.M)}


@pytest.fixture(autouse=True)
def registered_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    norms.available()  # import every norm first: a module registers only once
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def layer_norm(x: Tensor, eps: float, row: tuple[int, ...]) -> Tensor:
    """(x - mean) / sqrt(var + eps) (Ba et al. 2016, arXiv 1607.06450, equations 3 and 4)."""
    var, mean = torch.var_mean(x, row, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(var + eps)


def centred(x: Tensor, eps: float, row: tuple[int, ...]) -> Tensor:
    return x - x.mean(row, keepdim=True)


FORMULAS: dict[str, Callable[[Tensor, float, tuple[int, ...]], Tensor]] = {  # with the papers' numbers of variants.py
    "std_eps": lambda x, eps, row: (
        centred(x, eps, row) / (centred(x, eps, row).square().mean(row, keepdim=True).sqrt() + eps)
    ),
    "rms": lambda x, eps, row: x * torch.rsqrt((x * x).sum(row, keepdim=True) / x[0, 0].numel() + eps),
    "dyt": lambda x, eps, row: (1 - torch.exp(-x)) / (1 + torch.exp(-x)),  # tanh(x / 2)
    "derf": lambda x, eps, row: 2 * torch.special.ndtr(0.5 * x * math.sqrt(2)) - 1,  # erf(x / 2)
    "hardtanh": lambda x, eps, row: torch.minimum(torch.maximum(0.5 * x, -torch.ones_like(x)), torch.ones_like(x)),
    "frozen": lambda x, eps, row: centred(x, eps, row) / DEVIATION,
    "taper:0.25": lambda x, eps, row: 0.25 * layer_norm(x, eps, row) + 0.75 * centred(x, eps, row) / DEVIATION,
    "no_scale": centred,
}


def random_norm(name: str, shape: int | tuple[int, ...], *, eps: float = 1e-5, bias: bool = True,
                dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LayerNorm:  # fmt: skip
    """A norm whose scale and shift are random: at 1 and 0 a test would not see them. A frozen one is calibrated."""
    norm = norms.build(name, shape, eps=eps, bias=bias)
    assert isinstance(norm, LayerNorm)
    with torch.no_grad():
        for parameter in (norm.weight, norm.bias):
            if parameter is not None:
                parameter.copy_(torch.randn_like(parameter) + 0.5)
    if isinstance(norm, FrozenLayerNorm):
        norm.calibration = torch.tensor([DEVIATION, DEVIATION])
    return norm.to(device, dtype)


def truth(name: str, norm: LayerNorm, x: Tensor) -> Tensor:
    """The norm's own formula in float64, on what the parameters and the input are rounded to."""
    row = tuple(range(-norm.weight.ndim, 0))
    shift = 0 if norm.bias is None else norm.bias.double()
    standard = layer_norm(x.double(), norm.eps, row)
    if name in ("identity", "no_affine"):
        return x.double() if name == "identity" else standard
    if name == "mix:0.75":
        return 0.75 * (standard * norm.weight.double() + shift) + 0.25 * x.double()
    return FORMULAS.get(name, layer_norm)(x.double(), norm.eps, row) * norm.weight.double() + shift


def rounding(norm: LayerNorm, x: Tensor, expected: Tensor) -> Tensor:
    """How far rounding alone may bring each element: the output's own, and that of statistics in float32 or wider.

    The mean is off by a few units in the last place of the row's largest element, and is then divided by the deviation.
    """
    row, single = tuple(range(-norm.weight.ndim, 0)), torch.finfo(x.dtype)
    wide = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    deviation = torch.sqrt(x.double().var(row, correction=0, keepdim=True) + norm.eps)
    reach = x.double().abs().amax(row, keepdim=True) / deviation
    lost = 4 * wide * (1 + reach) * norm.weight.double().abs().clamp(min=1)
    shift = 0 if norm.bias is None else norm.bias.double().abs()
    return single.eps * (expected.abs() + shift) + single.smallest_normal + lost


# Formulas.


@every_norm
@pytest.mark.parametrize("shape", [1, 2, 7, 768, (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_is_its_own_formula(name: str, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    sizes = (shape,) if isinstance(shape, int) else shape
    x = (torch.randn(4, 6, *sizes) * 2 + 0.7).to(device, dtype)
    before = x.clone()
    for bias in (True, False):
        norm = random_norm(name, shape, bias=bias, dtype=dtype, device=device)
        y, expected = norm(x), truth(name, norm, x)
        assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
        excess = max_abs((y.double() - expected) / rounding(norm, x, expected))
        assert_within(excess, 1.0, max_abs(expected), f"bias={bias}: error in units of what rounding allows")
    assert torch.equal(x, before), "the input was written to"
    assert_same_bits(norm(x[2:3, 4:5]), norm(x)[2:3, 4:5], "one row")


@pytest.mark.parametrize("name", [*EXACT, "std_eps", "rms"])
@torch.no_grad()
def test_uses_the_eps_that_it_is_given(name: str) -> None:
    for eps in (0.0, 1e-12, 1e-3, 1.0):
        norm, x = random_norm(name, 24, eps=eps, dtype=torch.float64), torch.randn(2, 3, 24).double() * 0.1
        assert_close(norm(x), truth(name, norm, x), 1e-14, f"eps={eps}")


@every_norm
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_its_formula(name: str, bias: bool) -> None:
    norm = random_norm(name, (2, 3), bias=bias, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    if name != "detached":
        assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, *norm.parameters()))
        return
    (slope,) = torch.autograd.grad(norm(x).sum(), x)
    deviation = torch.sqrt(x.var((1, 2), correction=0, keepdim=True) + norm.eps)
    assert_close(slope, (norm.weight / deviation).detach(), 1e-12, "linear in each row")


@every_norm
def test_constant_rows_have_finite_values_and_gradients(name: str) -> None:
    norm = random_norm(name, 8)
    for value in (0.0, 3.0):
        x = torch.full((2, 8), value, requires_grad=True)
        norm(x).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        if name not in ELEMENTWISE and (name != "rms" or value == 0):
            shift = torch.zeros(8) if name == "no_affine" else norm.bias
            assert_close(norm(x), shift.expand(2, 8), 1e-6, "a constant row is the shift")


def test_fused_is_the_library_s_own_bits(device: torch.device) -> None:
    for dtype in DTYPES:
        norm = random_norm("fused", (3, 7), eps=1e-4, dtype=dtype, device=device)
        x = torch.randn(9, 3, 7).to(device, dtype)
        assert_same_bits(norm(x), F.layer_norm(x, (3, 7), norm.weight, norm.bias, 1e-4), str(dtype))


@pytest.mark.parametrize("name", EXACT)
def test_two_rows_worked_by_hand(name: str) -> None:
    x = torch.tensor([[0.2, 0.1, 0.3], [0.5, 0.1, 0.1]])
    expected = torch.tensor([[0.0, -1.2238, 1.2238], [1.4140, -0.7070, -0.7070]])
    torch.testing.assert_close(norms.build(name, 3)(x).detach(), expected, atol=5e-5, rtol=0)
    without_eps = norms.build(name, 3, eps=0.0)(x).detach()
    assert not torch.allclose(without_eps, expected, atol=5e-4), "these digits are those of eps = 1e-5"


# The registry.


@every_norm
def test_what_is_registered_and_how_it_starts(name: str) -> None:
    info, norm = norms.available()[name.partition(":")[0]], norms.build(name, (2, 3))
    assert norms.name_of(norm) == name
    assert norms.is_exact(norm) is norms.is_exact(name) is info.exact
    assert (info.exact, info.available, info.reason) == (name in EXACT, True, None)
    assert info.summary.endswith(".")
    assert "`" not in info.summary
    assert torch.equal(norm.weight, torch.ones(2, 3))
    assert torch.equal(norm.bias, torch.zeros(2, 3))
    assert norm.eps == 1e-5
    assert {key for key, _ in norms.build(name, 3, bias=False).named_parameters()} == {"weight"} | MORE.get(name, set())


def test_a_registered_class_is_built_by_its_name_which_is_taken_once() -> None:
    for _ in range(2):  # the same class again, as a reloaded module registers it
        assert norms.register("doubling", exact=False)(Doubling) is Doubling
    assert not norms.available()["doubling"].exact
    norm = norms.build("doubling", (2, 3), eps=1e-3, bias=False)
    assert type(norm) is Doubling
    assert (norm.normalized_shape, norm.eps, norm.bias) == ((2, 3), 1e-3, None)
    with pytest.raises(NormError, match="'textbook' is taken"):
        norms.register("textbook")(Doubling)
    assert norms.lookup("textbook") is LayerNorm


ClaimsNothing = type("ClaimsNothing", (nn.LayerNorm,), {"exact": False})


@pytest.mark.parametrize(
    ("norm", "exact"),
    [(nn.LayerNorm, True), (nn.RMSNorm, False), (ClaimsNothing, False),
     ("torch.nn:RMSNorm", False), ("mix:1", False), ("triton", True)],
)  # fmt: skip
def test_a_norm_says_whether_it_claims_to_be_layer_norm(norm: norms.NormSpec, exact: bool) -> None:
    assert norms.is_exact(norm) is exact
    if norm != "triton":
        assert norms.is_exact(norms.build(norm, 8)) is exact
    assert norms.is_exact(type("Child", (ClaimsNothing,), {"exact": True}))


@pytest.mark.parametrize("name", ["mix:2", "mix:half", "taper:-1", "taper:nan"])
def test_a_number_behind_a_name_is_checked(name: str) -> None:
    with pytest.raises(NormError, match=name.partition(":")[2]):
        norms.build(name, 8)


@pytest.mark.parametrize("norm", ["textbook", "rms", torch.nn.LayerNorm])
@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf"), None, "1e-5", True])
def test_an_eps_that_no_norm_can_have_is_refused(norm: norms.NormSpec, eps: Any) -> None:
    with pytest.raises(NormError, match=r"^eps must be a float, 0 or more, got ") as caught:
        norms.build(norm, 8, eps=eps)
    assert caught.value.argument == "eps"


def test_a_name_with_its_number_is_saved_and_read(tmp_path: Path) -> None:
    model = minigpt.from_pretrained("demo", norm={"h.*": "mix:0.75", "ln_f": "mix:1"}, device="cpu")
    minigpt.save_pretrained(model, tmp_path)
    again = minigpt.from_pretrained(tmp_path, device="cpu")
    assert [norms.name_of(norm) for norm in again.norm_modules().values()] == ["mix:0.75"] * 8 + ["mix:1.0"]
    ids = random_ids(1, 9)
    assert_same_bits(again(ids), model(ids), "the logits of what was read")


def test_a_norm_whose_package_is_missing_says_how_to_get_it() -> None:
    message = "needs it: pip install it"
    norms.register("absent", obstacle=lambda device: message)(Doubling)
    assert norms.available()["absent"].reason == message
    with pytest.raises(NormError, match=r"norm 'absent' needs it: pip install it"):
        norms.build("absent", 3)


# In a model.


@every_variant
def test_shares_the_model_s_parameters_and_gives_them_back(name: str) -> None:
    model, ids = small_model(), random_ids(2, 9)
    expected, before = model(ids).detach(), dict(model.named_parameters())
    swap_norms(model, name)
    after = dict(model.named_parameters())
    assert {key: after[key] for key in before} == before
    assert {key.rpartition(".")[2] for key in after.keys() - before.keys()} == MORE.get(name, set())
    assert not model.ln_f.training
    swap_norms(model, "fused")
    assert_same_bits(model(ids).detach(), expected, "after swapping back")


@every_variant
def test_its_whole_state_is_in_the_state_dict(name: str) -> None:
    model = small_model(name)
    if name in ("frozen", "taper:0.25"):
        fit_norms(model, random_ids(8, 16))
    if name == "dyt":
        with torch.no_grad():
            model.h[1].ln_2.alpha.fill_(0.875)
    other = small_model(name, initializer_range=0.5)
    other.load_state_dict(model.state_dict(), strict=True)
    ids = random_ids(2, 9)
    assert_same_bits(other(ids), model(ids), "loaded")
    assert_same_bits(copy.deepcopy(model)(ids), model(ids), "copied")


@pytest.mark.usefixtures("unchecked")
@every_variant
@torch.no_grad()
def test_compiled_it_is_one_graph_and_the_same_norm(name: str) -> None:
    torch.compiler.reset()
    norm, x = random_norm(name, 8), torch.randn(2, 3, 8)
    assert_close(torch.compile(norm, backend="eager", fullgraph=True)(x), norm(x), 1e-6, "compiled")


def test_before_calibration_it_says_how_to_calibrate() -> None:
    model = small_model("frozen")
    with pytest.raises(NormError, match=r"no deviation to divide by yet; .* minigpt\.fit_norms\(model, "):
        model(random_ids(1, 4))
    assert "calibration" not in " ".join(model.state_dict())


@torch.no_grad()
def test_layer_norm_is_constructed_as_torch_constructs_its_own() -> None:
    x = torch.randn(3, 5, 4)
    for supplied, how in (((4, 1e-3, False), {}), ((4,), {"bias": False}), (((5, 4), 1e-3, True, True), {}),
                       ((4,), {"elementwise_affine": False, "dtype": torch.float64, "device": "cpu"})):  # fmt: skip
        for cls in (minigpt.LayerNorm, type(minigpt.norms.build("fused", 4))):
            ours, hf = cls(*supplied, **how), torch.nn.LayerNorm(*supplied, **how)
            assert ours.state_dict().keys() == hf.state_dict().keys()
            assert {p.dtype for p in ours.parameters()} == {p.dtype for p in hf.parameters()}
            for parameter in (*ours.parameters(), *hf.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 1)
            torch.testing.assert_close(ours(x.to(next(ours.parameters(), x).dtype)), hf(x))
    with pytest.raises(TypeError):
        type(minigpt.norms.build("dyt", 4))(4, 1e-5, False)


@pytest.mark.parametrize("name", [name for name, info in norms.available().items() if info.available])
@pytest.mark.parametrize(("rows", "parameters"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_rows_may_have_another_dtype_than_the_parameters(name: str, rows: str, parameters: str) -> None:
    """As in Mamba, whose residual stream is float32 in a bfloat16 model (fla#137, Megatron-LM#1402)."""
    generator = torch.Generator().manual_seed(1)
    norm = norms.build(name, 32)
    for parameter in norm.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    norm = norm.to(getattr(torch, parameters))
    x = torch.randn(2, 3, 32, generator=generator).to(getattr(torch, rows))
    if name in ("frozen", "taper"):
        norm.calibrate(x)
    y = norm(x)
    exact = copy.deepcopy(norm).double()(x.double())
    error = (y.double() - exact).abs().max().item()
    bound = 2 * torch.finfo(y.dtype).eps * exact.abs().max().item()
    print(f"{name}: error {error:.3g}, bound {bound:.3g}")
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert error < bound
