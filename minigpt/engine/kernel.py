"""The reading of new tokens as one call into ``kernel.c``: which models it suits, and how their tensors are passed.

R rows, each a new token, W rows whose logits are wanted, C width of the residual stream, V vocabulary, K inputs of a
product.
"""

import ctypes
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_long, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from minigpt.engine.hooks import is_watched
from minigpt.engine.parts import FastAttention, FastConv1D, FastGPT2, FastLinear, FastMLP
from minigpt.model.conv1d import Conv1D
from minigpt.model.gpt2 import Block
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.textbook import FusedLayerNorm, LayerNorm
from minigpt.norms.variants import RMSNorm, StdEps

BLOCK, PANEL = 64, 16  # inputs that share a scale in int8, and outputs that lie together
SLAB = 64  # the outputs of a row are padded to a multiple of it
MOST_ROWS = 512  # that are read or multiplied at a time, so that they take little memory
COLUMNS = {torch.float32: 0, torch.bfloat16: 1}  # forms of a weight: (in, out)
ROWS = {torch.float32: 2, torch.bfloat16: 3}  # (out, in)
INT8 = 4
NORMS: dict[type[nn.Module], int] = {LayerNorm: 0, FusedLayerNorm: 0, RMSNorm: 1, StdEps: 2, FrozenLayerNorm: 3}
ACTIVATIONS = {"gelu_new": 0, "gelu_pytorch_tanh": 0, "gelu": 1, "relu": 2, "silu": 3, "swish": 3, "tanh": 4}
LEVELS = ("bf16", "vnni", "avx512", "avx2", "portable")  # of instructions, the best first


class Matrix(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("inp", c_int64), ("out", c_int64), ("form", c_int64)]


class Norm(Structure):
    _fields_ = [
        ("scale", c_void_p), ("shift", c_void_p), ("kind", c_int64),
        ("eps", c_float), ("usual", c_float), ("first", c_float),
    ]  # fmt: skip


class Layer(Structure):
    _fields_ = [
        ("ln_1", Norm), ("ln_2", Norm),
        ("c_attn", Matrix), ("attn_proj", Matrix), ("c_fc", Matrix), ("mlp_proj", Matrix),
        ("score_scale", c_float),
    ]  # fmt: skip


class Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "width", "heads", "inner", "is_half", "activation")),
        ("wte", c_void_p), ("wpe", c_void_p), ("h", POINTER(Layer)), ("ln_f", Norm), ("head", Matrix),
    ]  # fmt: skip


class Rows(Structure):
    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("tokens", "slots", "columns")),
        ("outputs", c_int64),
        ("wanted", c_void_p),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("is_half", "layer_stride", "value_stride", "slot_stride", "head_stride")),
        ("logits", c_void_p),
    ]


SIGNATURES = {  # of the functions of ``kernel.c``: what they return, and their arguments
    "memory": (c_long, c_void_p, c_void_p, c_long, c_long),
    "step": (None, c_void_p, c_void_p, c_long, c_long, c_void_p),
    "product_memory": (c_long, c_void_p, c_long, c_long),
    "product": (None, c_void_p, c_void_p, c_void_p, c_long, c_long, c_void_p),
    "round": (None, c_void_p, c_void_p, c_long),
}


@cache
def functions() -> SimpleNamespace | None:
    """Return the functions at the best level that the processor has, and its name; None if they were not built."""
    path = Path(os.environ.get("MINIGPT_KERNEL_LIBRARY", Path(__file__).with_name("libminigpt.so")))
    if not path.is_file():
        return None
    for runtime in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)  # PyTorch's own threads, not a second pool
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    if _is_of_other_sources(library, path):
        warnings.warn(
            f"{path} was built from other sources than those beside it, so decoding takes PyTorch; install minigpt "
            "again, or run python hatch_build.py in its repository",
            stacklevel=2,
        )
        return None
    library.minigpt_supports.argtypes = [ctypes.c_char_p]
    for level in LEVELS:
        if hasattr(library, f"minigpt_step_{level}") and library.minigpt_supports(level.encode()):
            found = {name: getattr(library, f"minigpt_{name}_{level}") for name in SIGNATURES}
            for name, (result, *arguments) in SIGNATURES.items():
                found[name].restype, found[name].argtypes = result, arguments
            return SimpleNamespace(level=level, **found)
    return None


def _is_of_other_sources(library: ctypes.CDLL, path: Path) -> bool:
    sources = [path.with_name(name) for name in ("kernel.c", "products.h")]
    if not all(source.is_file() for source in sources):
        return False
    built_from = ctypes.c_uint32(library.minigpt_sources()).value if hasattr(library, "minigpt_sources") else None
    return built_from != zlib.crc32(b"".join(source.read_bytes() for source in sources))


_is_on = os.environ.get("MINIGPT_KERNEL") != "0"


def use_kernel(on: bool) -> None:
    """Turn the decoding kernel on or off for this process. The environment variable MINIGPT_KERNEL=0 does the same."""
    global _is_on
    _is_on = on


def is_at_hand() -> bool:
    """Return True if the kernel was built and is not turned off."""
    return _is_on and functions() is not None


def why_not(model: nn.Module) -> str | None:
    """Return why decoding this model takes the PyTorch path, or None if it takes the kernel."""
    if not _is_on:
        return "the kernel is turned off"
    if functions() is None:
        return "the kernel was not built; installing minigpt where there is a C compiler builds it"
    if not isinstance(model, FastGPT2) or model.attention != "sdpa":
        return 'the model is not a minigpt.GPT2 with arithmetic="fast" and attention="sdpa"'
    dtypes, devices = ({getattr(p, name) for p in model.parameters()} for name in ("dtype", "device"))
    is_known_form = len(dtypes) == 1 and dtypes <= COLUMNS.keys() and {d.type for d in devices} <= {"cpu", "meta"}
    layers = [getattr(block.attn, "layer", None) for block in model.h]
    is_replaced = vars(model).keys() & {"hidden_states", "embed", "run", "head"}
    is_replaced = is_replaced or any(vars(part).keys() & {"forward", "standardize"} for part in model.modules())
    reasons = {
        "the model is in training mode": model.training,
        "the weights are not all on the CPU in float32, or all in bfloat16": not is_known_form,
        "autocast is on": torch.is_autocast_enabled("cpu"),
        "the blocks are not in the order of their layers in the cache": layers != list(range(len(layers))),
        "a module has hooks or a replaced forward": is_watched(model) or is_replaced,
    }
    for name, part in model.named_modules():
        kind = f"{type(part).__module__}.{type(part).__name__}"
        reasons[f"{name or 'the model'} is a {kind}"] = not _is_known(part, model)
        if isinstance(part, LayerNorm) and type(part) in NORMS:
            is_compiled = _is_what_is_compiled(type(part), type(part).forward, type(part).standardize)
            reasons[f"{name} is a {kind} that was edited"] = not is_compiled
    return next((reason for reason, applies in reasons.items() if applies), None)


def path_of(model: nn.Module) -> str:
    """Return which path decodes this model on the CPU, and why: "kernel (avx512)", or "PyTorch: ..."."""
    reason, found = why_not(model), functions()
    return f"kernel ({found.level})" if reason is None and found is not None else f"PyTorch: {reason}"


def _is_known(part: Any, model: Any) -> bool:
    if type(part) in NORMS:
        is_ready = not isinstance(part, FrozenLayerNorm) or part.calibration is not None
        return is_ready and part.normalized_shape == (model.config.n_embd,)
    if type(part) in (FastLinear, nn.Linear):
        return part.bias is None
    known = (FastGPT2, Block, FastAttention, FastMLP, FastConv1D, Conv1D, nn.Embedding, nn.Dropout, nn.ModuleList)
    is_int8 = hasattr(part, "panels")
    return type(part) in known or is_int8 or isinstance(part, type(model.h[0].mlp.act))


@cache
def _is_what_is_compiled(norm: type[nn.Module], *_methods: Callable[..., object]) -> bool:
    """Return True if a class of norms computes what ``kernel.c`` computes in its place: its source may be edited."""
    with torch.device("cpu"), torch.no_grad():
        x = 2 + torch.linspace(0, 90, 48, dtype=torch.float32).sin().view(6, 8) * torch.arange(1, 7)[:, None]
        part: Any = norm(8, eps=0.1).to(torch.float32)
        part.weight.copy_(x[0])
        part.bias.copy_(x[1])
        if norm is FrozenLayerNorm:
            part.calibration = torch.tensor([1.5, 4.0])
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, correction=0, keepdim=True)
        by_deviation = (deviation.square() + 0.1).sqrt()
        standardized = (
            (x - mean) / by_deviation,
            x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt(),
            (x - mean) / (deviation + 0.1),
            (x - mean) / torch.tensor([4.0, *[1.5] * 5])[:, None],
        )
        return torch.allclose(part(x), standardized[NORMS[norm]] * x[0] + x[1], rtol=1e-5, atol=1e-5)


def step_of(model: nn.Module) -> "StepKernel | None":
    """Return the kernel for decoding this model, or None if it takes the PyTorch path."""
    return StepKernel(model) if why_not(model) is None else None


class StepKernel:
    """Reads new tokens. Holds the addresses of the model's Parameters, which must not move meanwhile.

    Args:
        panels_of: returns int8 panels to take in place of a weight, given the weight and whether it is (out, in).
    """

    def __init__(self, model: Any, panels_of: Callable[[Tensor, bool], Tensor] | None = None) -> None:
        found = functions()
        assert found is not None
        self.functions, self.vocabulary = found, model.config.vocab_size
        self.held: list[Tensor] = []
        self.panels_of = panels_of
        config, c, inner = model.config, model.config.n_embd, model.config.inner_size
        self.layers = (Layer * config.n_layer)(*(
            Layer(
                self._norm(block.ln_1), self._norm(block.ln_2),
                self._matrix(block.attn.c_attn, c, 3 * c), self._matrix(block.attn.c_proj, c, c),
                self._matrix(block.mlp.c_fc, c, inner), self._matrix(block.mlp.c_proj, inner, c),
                block.attn.scale,
            )
            for block in model.h
        ))  # fmt: skip
        head = model.wte if config.tie_word_embeddings and model.quantize is None else model.lm_head
        self.model = Model(
            config.n_layer, c, config.n_head, inner, model.wte.weight.dtype == torch.bfloat16,
            ACTIVATIONS[config.activation_function],
            self._address(model.wte.weight), self._address(model.wpe.weight), self.layers, self._norm(model.ln_f),
            self._matrix(head, c, config.vocab_size, by_rows=True),
        )  # fmt: skip
        self.memory: Tensor | None = None
        self.parts = [(part._modules, name, child) for part in model.modules() for name, child in part._modules.items()]
        self.parameters = list(model.parameters())
        self.addresses = [parameter.data_ptr() for parameter in self.parameters]

    def is_outdated(self) -> bool:
        """Return True if a module of the model, or the memory of a Parameter, was replaced since."""
        is_replaced = any(children.get(name) is not child for children, name, child in self.parts)
        return is_replaced or [parameter.data_ptr() for parameter in self.parameters] != self.addresses

    def __call__(
        self, tokens: Sequence[int], slots: Sequence[int], columns: Sequence[int], store: Tensor,
        wanted: Sequence[int] | None = None,
    ) -> Float[Tensor, "wanted vocab"]:  # fmt: skip
        """Return logits (W, V) after the wanted tokens. The keys and values of all go to the cache.

        Several tokens may be of one text, in the order of their columns, without a gap. Each sees all columns of its
        text up to its own. The bits of its logits depend on them alone.

        Args:
            tokens: the new tokens.
            slots: the place of each one's text in the cache. The text begins at its column 0.
            columns: the token's own column, which is its position.
            store: (L, 2, B, H, S, D), the keys and values of a cache in float32 or bfloat16.
            wanted: rows, in ascending order; by default all.
        """
        wanted = range(len(tokens)) if wanted is None else wanted
        logits = torch.empty(len(wanted), _padded(self.vocabulary), dtype=torch.float32, device="cpu")
        done = 0
        for first in range(0, len(tokens), MOST_ROWS):
            some, last = slice(first, first + MOST_ROWS), first + MOST_ROWS
            outputs = [row - first for row in wanted[done : done + MOST_ROWS] if row < last]
            self._read(tokens[some], slots[some], columns[some], store, outputs, logits[done:])
            done += len(outputs)
        return logits[:, : self.vocabulary]

    def _read(
        self, tokens: Sequence[int], slots: Sequence[int], columns: Sequence[int], store: Tensor, outputs: list[int],
        logits: Tensor,
    ) -> None:  # fmt: skip
        rows = torch.tensor([tokens, slots, columns], device="cpu")  # (3, R)
        wanted = torch.tensor(outputs, dtype=torch.long, device="cpu")  # (W,)
        asked = Rows(
            len(tokens), *(row.data_ptr() for row in rows), len(outputs), wanted.data_ptr(), store.data_ptr(),
            store.dtype == torch.bfloat16, *store.stride()[:4], logits.data_ptr(),
        )  # fmt: skip
        how = byref(self.model), byref(asked), torch.get_num_threads(), max(columns) + 1
        self.memory, place = _room(self.memory, self.functions.memory(*how))
        self.functions.step(*how, place)

    def _address(self, tensor: Tensor) -> int:
        self.held.append(tensor.detach().contiguous())
        return self.held[-1].data_ptr()

    def _vector(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._address(tensor.detach().float())

    def _norm(self, norm: Any) -> Norm:
        constants = getattr(norm, "calibration", None)
        constants = [0.0] * 2 if constants is None else constants.tolist()
        return Norm(self._vector(norm.weight), self._vector(norm.bias), NORMS[type(norm)], norm.eps, *constants)

    def _matrix(self, layer: Any, inp: int, out: int, by_rows: bool = False) -> Matrix:
        """Pass the weight of a layer. The head's has shape (out, in), and is passed by rows."""
        bias, panels = self._vector(getattr(layer, "bias", None)), getattr(layer, "panels", None)
        if panels is None and self.panels_of is not None:
            panels = self.panels_of(layer.weight, by_rows)
        if panels is not None:
            return Matrix(self._address(panels), bias, inp, out, INT8)
        rows = layer.weight if by_rows else layer.weight.t()  # (out, in)
        if rows.shape != (out, inp):
            raise ValueError(f"weight must have shape ({inp}, {out}), got {tuple(rows.t().shape)}")
        weight, forms = (rows, ROWS) if by_rows or rows.is_contiguous() else (rows.t(), COLUMNS)
        return Matrix(self._address(weight), bias, inp, out, forms[rows.dtype])


def int8_product(
    x: Float[Tensor, "rows inp"], panels: UInt8[Tensor, "panels blocks bytes"], out: int
) -> Float[Tensor, "rows out"]:
    """Return ``x W^T`` by the kernel; ``panels`` as ``int8.panels_of`` makes them."""
    found = functions()
    assert found is not None
    x = x.contiguous()
    y, threads = x.new_empty(len(x), _padded(out)), torch.get_num_threads()
    matrix = Matrix(panels.data_ptr(), None, x.shape[1], out, INT8)
    memory, place = _room(None, found.product_memory(byref(matrix), min(len(x), MOST_ROWS), threads))
    for some, result in zip(x.split(MOST_ROWS), y.split(MOST_ROWS), strict=True):
        found.product(byref(matrix), some.data_ptr(), result.data_ptr(), len(some), threads, place)
    del memory
    return y[:, :out]


def int8_panels(rows: Float[Tensor, "out inp"], panels: UInt8[Tensor, "panels blocks bytes"]) -> None:
    """Round a weight in float32 or bfloat16 to ``panels``, as ``int8.panels_of`` does."""
    found = functions()
    assert found is not None
    is_by_columns = rows.t().is_contiguous() and not rows.is_contiguous()
    weight = rows if is_by_columns else rows.contiguous()
    form = (COLUMNS if is_by_columns else ROWS)[rows.dtype]
    matrix = Matrix(weight.data_ptr(), None, rows.shape[1], len(rows), form)
    found.round(byref(matrix), panels.data_ptr(), torch.get_num_threads())


def _padded(outputs: int) -> int:
    """Return the columns that the kernel writes for so many outputs."""
    return -(-outputs // SLAB) * SLAB


def _room(memory: Tensor | None, size: int) -> tuple[Tensor, int]:
    """Return memory of at least this size, and where in it a multiple of 64 is."""
    if memory is None or len(memory) < size + 64:
        memory = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
    return memory, -(-memory.data_ptr() // 64) * 64
