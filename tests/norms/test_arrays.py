"""Functions of arrays as norms: called as they are written, judged, swapped into a model, or refused."""

import copy
import functools
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_bits, max_abs, random_ids, small_model

import minigpt
from minigpt import NormError, Recipe, norms, swap_norms
from minigpt.conformance import check_norm
from minigpt.norms.foreign.adapt import notes
from minigpt.norms.foreign.arrays import ArrayFunction
from minigpt.norms.foreign.packages import NotSupported, of_numpy, package_of, to_numpy
from minigpt.study.settings import Training
from minigpt.study.training import finetune
from minigpt.testing import assert_norm_parity

QUICK = ["ordinary rows", "mean far from 0", "3-D input", "decoding input"]


def layer_norm(x, weight, bias, eps):
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    centred = wide - wide.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias
    return y.astype(x.dtype)


def backward(grad_y, x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    row, g = centred / deviation, grad_y * weight
    along = g.mean(-1, keepdims=True) + row * (g * row).mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return (g - along) / deviation, (grad_y * row).sum(rows), grad_y.sum(rows)


def other_names(inp, gamma, beta=None, *, epsilon=1e-6):
    shift = np.zeros_like(gamma) if beta is None else beta
    return layer_norm(inp, gamma, shift, epsilon)


def positional(x, bias, scale, eps, /):
    return layer_norm(x, scale, bias, eps)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps).astype(x.dtype) * weight


def no_eps(x, w, b):
    return layer_norm(x, w, b, 1e-3)


def of_tensors(x, weight, bias, eps):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def numpy_norm(function: Any, **attributes: Any) -> Any:
    """Return a copy of a function that says it takes NumPy's arrays."""
    norm = functools.wraps(function)(lambda *args, **keywords: function(*args, **keywords))
    for name, value in {"arrays": "numpy", **attributes}.items():
        setattr(norm, name, value)
    return norm


def built(norm: Any, width: int = 48, **how: Any) -> Any:
    """Return the norm with random weight and bias, where it has them."""
    module = norms.build(norm, width, **how)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("function", [layer_norm, other_names, positional], ids=lambda one: one.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_function_gets_its_arguments_by_their_names(function: Any, dtype: torch.dtype) -> None:
    norm = built(numpy_norm(function), eps=1e-3).to(dtype)
    x = torch.randn(2, 5, 48).to(dtype)
    y = norm(x)
    exact = F.layer_norm(x.double(), (48,), norm.weight.double(), norm.bias.double(), 1e-3)
    assert y.dtype == dtype
    assert_close(y.double(), exact, 4 * torch.finfo(dtype).eps, f"{function.__name__} at {dtype}")


def test_what_a_function_lacks_is_beside_it_or_said() -> None:
    norm = built(numpy_norm(rms_norm), eps=1e-3)
    x = torch.randn(3, 48)
    exact = F.rms_norm(x.double(), (48,), norm.weight.double(), 1e-3) + norm.bias.double()
    assert_close(norm(x).double(), exact, 1e-6, "rms_norm and the model's shift")
    assert norms.notes(norm) == ("rms_norm has no shift: the model's shift is applied to its output",)
    assert norms.notes(built(numpy_norm(no_eps))) == ("eps cannot be set in no_eps",)


def test_a_model_without_a_shift_gives_a_neutral_one() -> None:
    x = torch.randn(3, 48)
    for function in (layer_norm, other_names):
        norm = built(numpy_norm(function), bias=False)
        assert norm.bias is None
        exact = F.layer_norm(x.double(), (48,), norm.weight.double(), None, 1e-5)
        assert_close(norm(x).double(), exact, 1e-6, function.__name__)


def test_a_row_of_two_dimensions_is_one_row_for_the_function() -> None:
    norm = norms.build(numpy_norm(layer_norm), (4, 12))
    x = torch.randn(3, 4, 12)
    assert_close(norm(x).double(), F.layer_norm(x.double(), (4, 12)), 1e-6, "a row of (4, 12)")


def test_memory_is_shared_so_that_a_write_into_the_input_is_seen() -> None:
    def writes(x, weight, bias, eps):
        x -= x.mean(-1, keepdims=True)
        return layer_norm(x, weight, bias, eps)

    report = check_norm(writes, arrays="numpy", device="cpu", cases=["input left*"], seed=0)
    assert report.diagnoses == ["it modifies its input"]


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize("role", ["weight", "bias"])
def test_a_function_that_writes_into_its_parameters_leaves_the_model_as_it_was(role: str, arrays: str) -> None:
    """It gets copies, also in its vjp; the kit and a model's judge say so."""

    def writes(x, weight, bias, eps):
        {"weight": weight, "bias": bias}[role][:] += 1
        return x * weight + bias

    writes.arrays = arrays
    writes.vjp = lambda dy, x, weight, bias, eps: (weight.__imul__(0) * dy, weight, bias.__imul__(0))
    model = minigpt.from_pretrained("demo", device="cpu")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    minigpt.swap_norms(model, writes, "h.0.*")
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    sentence = f"it writes into its {role}, of which it gets a copy"
    assert sentence in notes(model.get_submodule("h.0.ln_1"))
    assert sentence in check_norm(writes, device="cpu", cases=["input left*"], seed=0).notes
    minigpt.swap_norms(model, "fused")
    assert [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_tensors_and_arrays_have_the_same_numbers_in_any_layout(dtype: torch.dtype) -> None:
    for x in (torch.randn(3, 8).to(dtype), torch.randn(8, 3).to(dtype).t(), torch.randn(1, 8).to(dtype).expand(3, 8)):
        array = to_numpy(x)
        assert array.strides == tuple(stride * x.element_size() for stride in x.stride())
        assert_same_bits(of_numpy(array), x, f"strides {x.stride()}")
        assert_same_bits(of_numpy(array[::-1]), x.flip(0), "a negative stride")


def test_bfloat16_is_judged_with_ml_dtypes() -> None:
    pytest.importorskip("ml_dtypes")
    x = torch.randn(3, 8).bfloat16()
    assert_same_bits(of_numpy(to_numpy(x)), x, "bfloat16")
    report = check_norm(layer_norm, arrays="numpy", device="cpu", cases=QUICK, seed=0)
    assert report.dtypes == dict.fromkeys(("float32", "bfloat16", "float16", "float64"), True), report


def test_bfloat16_without_ml_dtypes_is_not_judged_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    report = check_norm(layer_norm, arrays="numpy", device="cpu", cases=QUICK, seed=0)
    assert report.passed
    assert "bfloat16" not in report.dtypes
    assert report.verdicts["bfloat16"].startswith("not judged: numpy has no bfloat16 here; pip install ml_dtypes")
    with pytest.raises(NotSupported, match="pip install ml_dtypes"):
        built(numpy_norm(layer_norm)).bfloat16()(torch.randn(2, 48).bfloat16())


def test_gradients_of_vjp_are_those_of_pytorch() -> None:
    norm = built(numpy_norm(layer_norm, vjp=backward)).double()
    x, dy = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True), torch.randn(2, 5, 48, dtype=torch.float64)
    leaves = (x, norm.weight, norm.bias)
    expected = torch.autograd.grad(F.layer_norm(x, (48,), norm.weight, norm.bias, 1e-5), leaves, dy)
    for name, value, exact in zip(
        ("x", "weight", "bias"), torch.autograd.grad(norm(x), leaves, dy), expected, strict=True
    ):
        assert_close(value, exact, 1e-12, f"the gradient of {name}")


def test_without_vjp_a_backward_pass_is_refused() -> None:
    norm = built(numpy_norm(layer_norm))
    with pytest.raises(NotSupported, match=r"^layer_norm gives no gradients: it has no attribute vjp$"):
        norm(torch.randn(2, 48, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("vjp", "sentence"),
    [
        (lambda *_: None, "must return a tuple, got a NoneType"),
        (lambda *_: (1, 2), "must return 3 gradients, got 2"),
        (lambda dy, x, w, b, eps: (x, w, x), r"the gradient of bias of layer_norm must have the shape \(48,\), got"),
        (lambda dy, x, w, b, eps: (x, w, [1.0]), "the gradient of bias of layer_norm must be one array of numpy"),
        (lambda: None, "vjp of layer_norm raised TypeError"),
    ],
)
def test_a_wrong_vjp_is_one_sentence(vjp: Any, sentence: str) -> None:
    norm = built(numpy_norm(layer_norm, vjp=vjp))
    with pytest.raises(NormError, match=sentence):
        norm(torch.randn(2, 48, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda x, weight, bias, eps: x[0], r"must have the shape \(2, 48\), got \(48,\)"),
        (lambda x, weight, bias, eps: (x, x), "must be one array of numpy, got a tuple"),
        (lambda x, weight, bias, eps: torch.ones(2, 48), "must be one array of numpy, got a Tensor"),
        (lambda x, weight, bias, eps: 1 // 0, "raised ZeroDivisionError"),
        (lambda x, weight, bias, eps, mask: x, "also requires 'mask'"),
        (lambda *rows: rows[0], "must take x, and weight, bias and eps by name"),
    ],
)
def test_a_function_that_is_no_norm_is_one_sentence(function: Any, sentence: str) -> None:
    function.arrays = "numpy"
    with pytest.raises(NormError, match=sentence):
        norms.build(function, 48)(torch.randn(2, 48))


def test_a_function_that_does_not_say_its_arrays_is_told_how() -> None:
    for norm in (layer_norm, rms_norm, other_names, of_tensors, functools.partial(layer_norm, eps=1e-5)):
        with pytest.raises(
            NormError, match=r"say which arrays it takes, by minigpt norms --arrays numpy, .*\.arrays = "
        ):
            norms.build(norm, 48)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ("nonesuch", "must be a package that imports here, got 'nonesuch'"),
        ("json", "must be a package with from_dlpack, which json has not"),
        ("num.py", "must be the name of a package"),
        (5, "must be the name of a package, numpy, torch, jax, ..., got 5"),
    ],
)
def test_a_package_without_arrays_is_one_sentence(arrays: Any, sentence: str) -> None:
    with pytest.raises(NormError, match=f"^arrays {sentence}"):
        package_of(arrays)
    with pytest.raises(NormError, match=rf"^layer_norm.arrays {sentence}"):
        norms.build(numpy_norm(layer_norm, arrays=arrays), 48)


def test_arrays_are_for_functions() -> None:
    for norm in ("textbook", torch.nn.LayerNorm, torch.nn.LayerNorm(4)):
        with pytest.raises(NormError, match=r"^arrays is for a function norm\(x, weight, bias, eps\), which "):
            ArrayFunction(norm, "numpy")  # pyright: ignore[reportArgumentType]


def test_a_function_of_tensors_keeps_autograd() -> None:
    x = torch.randn(2, 48, requires_grad=True)
    of_tensors_norm = numpy_norm(of_tensors, arrays="torch")
    (gradient,) = torch.autograd.grad(built(of_tensors_norm)(x).square().sum(), x)
    assert gradient.any()


VERDICTS = {  # of functions that are right and wrong, by a computation in float64
    "layer_norm": layer_norm,
    "eps outside": lambda x, weight, bias, eps: (
        (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + eps) * weight + bias
    ),
    "n - 1": lambda x, weight, bias, eps: (
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True, ddof=1) + eps).astype(x.dtype) * weight
        + bias
    ),
    "not centred": lambda x, weight, bias, eps: (
        x / np.sqrt((x**2).mean(-1, keepdims=True) + eps).astype(x.dtype) * weight + bias
    ),
    "one pass": lambda x, weight, bias, eps: (
        (x - x.mean(-1, keepdims=True))
        / np.sqrt(np.maximum((x**2).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2, 0) + eps).astype(x.dtype)
        * weight
        + bias
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_is_that_of_a_computation_in_float64(name: str) -> None:
    function = VERDICTS[name]
    x = torch.cat([torch.randn(12, 64) + side * 1000 for side in (-1, 0, 1)])
    x[:4] *= 1e-2
    weight, bias = 1 + 0.7 * torch.randn(64), torch.randn(64)
    y = of_numpy(function(x.numpy(), weight.numpy(), bias.numpy(), 1e-5)).double()
    truth = F.layer_norm(x.double(), (64,), weight.double(), bias.double(), 1e-5)
    own = max_abs(F.layer_norm(x, (64,), weight, bias, 1e-5) - truth)
    is_right = max_abs(y - truth) <= 8 * own
    print(f"{name}: {max_abs(y - truth):.2g} beside PyTorch's own {own:.2g}")
    report = check_norm(function, arrays="numpy", device="cpu", cases=[*QUICK, "deviation*"], seed=0)
    assert report.dtypes["float32"] is is_right is (name == "layer_norm")
    assert report.notes[0].startswith("gradients: not judged, since ")


def test_gradients_that_are_given_are_judged() -> None:
    cases = ["gradients, ordinary rows", "gradients, as heads"]
    right = numpy_norm(layer_norm, vjp=backward)
    report = check_norm(right, device="cpu", cases=cases, seed=0)
    assert report.dtypes["float32"]
    assert report.dtypes["float64"]
    assert not [note for note in report.notes if "gradients" in note]
    wrong = numpy_norm(layer_norm, vjp=lambda *call: (backward(*call)[0] * 0.9, *backward(*call)[1:]))
    report = check_norm(wrong, device="cpu", cases=cases[:1], seed=0)
    assert report.diagnoses[0] == "the gradient of the input is wrong: it is multiplied by 0.9"


def test_a_test_of_a_function_names_the_mistake() -> None:
    assert_norm_parity(layer_norm, arrays="numpy", cases=QUICK, device="cpu")
    with pytest.raises(AssertionError, match="no mean subtracted"):
        assert_norm_parity(VERDICTS["not centred"], arrays="numpy", cases="values", device="cpu")


def test_a_function_stands_in_a_model_and_goes_again() -> None:
    model, ids = small_model(), random_ids(2, 9)
    before = model(ids)
    sites = swap_norms(model, numpy_norm(layer_norm))
    assert len(sites) == 2 * model.config.n_layer + 1
    assert_close(model(ids), before, 1e-5, "logits with NumPy's norms")
    twin = copy.deepcopy(model)
    assert_same_bits(twin(ids), model(ids), "a copy")
    assert minigpt.generate(model, ids, max_new_tokens=3).shape == (2, 12)
    swap_norms(model, "fused")
    assert_same_bits(model(ids), before, "the model again")


def test_a_named_function_survives_a_pickle() -> None:
    layer_norm_of_numpy = ArrayFunction(layer_norm, "numpy")
    again = pickle.loads(pickle.dumps(layer_norm_of_numpy))
    assert again.func is layer_norm
    assert again.package.name == "numpy"


FILE = """
import numpy as np
def norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps).astype(x.dtype) * weight + bias
norm.arrays = "numpy"
"""


def test_training_refuses_a_function_without_gradients(tmp_path: Path) -> None:
    (tmp_path / "my_norm.py").write_text(FILE)
    (tmp_path / "text.txt").write_text("Once upon a time. " * 40)
    name = f"{tmp_path / 'my_norm.py'}:norm"
    with pytest.raises(NormError, match="cannot be trained: it gives no gradients, since it has no attribute vjp"):
        finetune(Recipe(norm=name, device="cpu"), Training(str(tmp_path / "text.txt"), 2), tmp_path / "out")


@pytest.mark.thorough
def test_a_function_in_a_file_is_judged_in_the_demo(tmp_path: Path) -> None:
    (tmp_path / "my_norm.py").write_text(FILE)
    name = f"{tmp_path / 'my_norm.py'}:norm"
    report = minigpt.parity("demo", norm=name, device="cpu")
    print(f"{report.logits.ratio:.3f} times the noise floor")
    assert report.passed
    assert report.norm == name
    with pytest.raises(NotSupported, match="gives no gradients"):
        minigpt.parity("demo", norm=name, device="cpu", gradients=True)
    with_vjp = numpy_norm(layer_norm, vjp=backward)
    assert minigpt.parity("demo", norm=with_vjp, device="cpu", gradients=True).passed


@pytest.mark.thorough
def test_torch_compile_leaves_a_function_as_it_is() -> None:
    calls = []

    def counted(x, weight, bias, eps):
        assert type(x) is np.ndarray
        calls.append(x.shape)
        return layer_norm(x, weight, bias, eps)

    counted.arrays = "numpy"  # pyright: ignore[reportFunctionMemberAccess]
    norm, x = norms.build(counted, 48), torch.randn(2, 48)
    compiled = torch.compile(norm, backend="aot_eager")
    assert_same_bits(compiled(x), norm(x), "compiled")
    assert len(calls) == 2


@pytest.mark.thorough
def test_a_function_of_jax_arrays_is_judged_at_few_shapes() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def norm(x, weight, bias, eps):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(-1, keepdims=True)
        y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias
        return y.astype(x.dtype)

    def vjp(grad_y, x, weight, bias, eps):
        _, pull = jax.vjp(lambda x, weight, bias: norm(x, weight, bias, eps), x, weight, bias)
        return pull(grad_y)

    norm.vjp = vjp  # pyright: ignore[reportFunctionMemberAccess]
    report = check_norm(norm, arrays="jax", device="cpu", seed=0)
    assert report.passed, report
    assert report.verdicts["float64"].startswith("not judged: jax has no float64 here; jax.config.update")
    assert any(note.startswith("few shapes, ") for note in report.notes)
    assert any(case.is_backward for case in report.cases)
