"""The Triton norm: interpreted without a GPU, compiled for one without running, and run on one if there is one.

The conformance kit says whether it is a LayerNorm. Other tests are about what only this norm has: unusual layouts, more
than 2^31 elements, the operator's registration, and its errors.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor, nn

from minigpt import NormError, norms
from minigpt.testing import assert_norm_parity

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton: pip install -e '.[triton]'", allow_module_level=True)

from minigpt.norms.triton import interpreting

if interpreting() and (reason := norms.available()["triton"].reason):
    pytest.skip(f"the triton norm {reason}", allow_module_level=True)

# What the interpreter does in a few seconds; all of it is asked where a GPU runs the kernels.
KIT = ("width [23]", "width 1001", "[12] rows", "ordinary rows", "*sqrt(eps)", "massive*", "infinity*", "*input*",
       "another eps", "no bias", "weights*", "autocast*", "gradients, dy*", "gradients, frozen*", "non-contiguous*",
       "compile")  # fmt: skip


@pytest.fixture
def device(triton_device: torch.device) -> torch.device:
    return triton_device


def norm_of(width: int | tuple[int, ...], *, dtype: torch.dtype = torch.float32, device: torch.device,
            bias: bool = True) -> nn.Module:  # fmt: skip
    norm = norms.build("triton", width, bias=bias).to(device, dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn_like(parameter) + 0.5)
    return norm


@pytest.mark.thorough
@pytest.mark.usefixtures("unchecked")  # torch.compile would trace the shape checks as well
def test_passes_the_conformance_kit(device: torch.device) -> None:
    assert_norm_parity("triton", device=device, cases="*" if device.type == "cuda" else KIT)


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    norm = norm_of(1024, device=torch.device("cuda"), dtype=torch.float16)
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GB of free memory on the GPU")
    x = torch.randn(2**21 + 3, 1024, device="cuda", dtype=torch.float16)
    y = norm(x)
    assert_same_bits(y[-5:], norm(x[-5:].clone()), "the last rows")


@pytest.mark.parametrize("width", [48, 256, 768])
def test_a_row_and_its_gradient_are_the_same_in_any_company(width: int, device: torch.device) -> None:
    norm, rows = norm_of(width, device=device), 5000 if device.type == "cuda" else 300
    x, dy = (torch.randn(rows, width).to(device) for _ in range(2))

    def both(some: slice) -> tuple[Tensor, Tensor]:
        leaf = x[some].clone().requires_grad_()
        y = norm(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, dy[some].clone())[0]

    whole = both(slice(None))
    for few in (1, 3, 200):
        for one, other in zip(both(slice(-few, None)), whole, strict=True):
            assert_same_bits(one, other[-few:], f"the last {few} rows")


def test_the_same_bits_on_every_run(device: torch.device) -> None:
    norm, x = norm_of(96, device=device), torch.randn(3000, 96).to(device).requires_grad_()
    first, again = (torch.autograd.grad(norm(x).square().sum(), [x, *norm.parameters()]) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert_same_bits(one, other, "gradients")


@pytest.mark.thorough
def test_the_operator_is_registered_as_pytorch_wants_it(device: torch.device) -> None:
    x, weight, shift = (torch.randn(*shape).to(device).requires_grad_() for shape in ((3, 40), (40,), (40,)))
    norm_of(40, device=device)(x)  # imports the operators
    for inputs in ((x, weight, shift, 1e-5), (x, weight, None, 1e-5)):
        torch.library.opcheck(torch.ops.minigpt.layer_norm, inputs)


def test_the_operator_lays_out_what_it_says(device: torch.device) -> None:
    """The compiler relies on contiguous results, for every layout of the input."""
    x, weight = torch.randn(3, 2, 40).to(device).transpose(0, 1), torch.randn(40).to(device)
    norm_of(40, device=device)(torch.randn(1, 40).to(device))  # imports the operators
    inputs = (x, weight, None, 1e-5)
    assert not x.is_contiguous()
    torch.library.opcheck(torch.ops.minigpt.layer_norm, inputs, test_utils=("test_schema", "test_faketensor"))
    assert all(output.is_contiguous() for output in torch.ops.minigpt.layer_norm(*inputs))


def test_second_derivatives_are_refused(device: torch.device) -> None:
    norm, x = norm_of(8, device=device), torch.randn(2, 8).to(device).requires_grad_()
    (first,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(NormError, match="first derivatives only"):
        first.sum().backward()


@pytest.mark.usefixtures("unchecked")
def test_what_it_cannot_take_is_refused(device: torch.device) -> None:
    norm = norm_of(8, device=device)
    for x in (torch.ones(2, 8, dtype=torch.long, device=device), torch.ones(2, 8, device="meta"), torch.ones(8, 2)):
        with pytest.raises(NormError, match=r"x must be floating-point, end in \(8,\) and be on c"):
            norm(x)
    with pytest.raises(NormError, match="takes rows of at most 8,192 numbers, got 9,000"):
        norm_of(9000, device=device)(torch.ones(2, 9000, device=device))


def test_says_why_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    info = norms.available()["triton"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not info.available
    assert "needs a CUDA device" in (info.reason or "")
    with pytest.raises(NormError, match="norm 'triton' needs a CUDA device, and PyTorch sees none; TRITON_INTERPRET=1"):
        norms.build("triton", 8)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert info.available
    monkeypatch.setitem(sys.modules, "triton", None)
    assert info.reason == "needs triton: pip install -e '.[triton]'"


# What Triton makes of the kernels for a GPU that need not be there, in a process where they are not interpreted
COMPILE = """
import json, re
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minigpt.norms.triton import ops
from minigpt.norms.triton.ops import BACKWARD_BYTES, FORWARD_BYTES, tile

POINTERS = "x weight bias y dy dx".split()

def cases():
    for width, narrow in ((64, "bf16"), (768, "bf16"), (1600, "fp32"), (4096, "fp16"), (8192, "bf16")):
        for name, of_warp in ("forward_rows", FORWARD_BYTES), ("backward_rows", BACKWARD_BYTES):
            held = tile(width, torch.float32, of_warp)
            constants = dict(WIDTH=width, ROWS=held.rows, BLOCK=held.block)
            constants |= dict(EPS=1e-5) if name == "forward_rows" else {}
            yield name, narrow, held.warps, constants
            yield name, narrow, held.warps, constants | dict(rounds=1)

def code(name, narrow, warps, constants):
    kernel = getattr(ops, name)
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(POINTERS, "*" + narrow)
    types |= dict(stats="*fp32", partials="*fp32") | dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm

def order(code):
    # How the numbers of a row are shared among threads where they are added up.
    known = dict(re.findall(r"^(#\\w+) = (.*)$", code, re.M))
    sums = r'"tt.reduce"[^<]*<{axis = 1 : i32}>.*?}\\) : \\(tensor<[^,]*, (#\\w+)>'
    return [known[layout] for layout in re.findall(sums, code, re.S)]

for name, narrow, warps, constants in cases():
    made = code(name, narrow, warps, constants)
    assert made["cubin"]
    print(json.dumps(dict(kernel=name, width=constants["WIDTH"], order=order(made["ttgir"]))))
"""


@pytest.mark.thorough
def test_few_rows_are_added_up_in_the_order_of_many() -> None:
    """There are two programs of each kernel, one of them without a loop, and a row must come out of both the same."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    orders: dict[tuple[str, int], list[list[str]]] = {}
    for kernel in map(json.loads, done.stdout.splitlines()):
        orders.setdefault((kernel["kernel"], kernel["width"]), []).append(kernel["order"])
    assert len(orders) == 10
    for place, (many, few) in orders.items():
        assert many == few, place
        assert len(many) == 2, "mean and deviation, or two means"
