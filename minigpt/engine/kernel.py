"""The reading of new tokens as one call into ``kernel.c``: which models it suits, and how their tensors are passed.

R rows, each a new token, W rows whose logits are returned, C width of the residual stream, V vocabulary, K inputs of a
product.
"""

import ctypes
import os
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_long, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from minigpt.engine.parts import FastAttention, FastConv1D, FastGPT2, FastLinear, FastMLP, is_watched
from minigpt.machine import IS_AMD
from minigpt.model.gpt2 import Block
from minigpt.model.mlp import Conv1D, gelu_new, gelu_tanh
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.textbook import FusedLayerNorm, LayerNorm
from minigpt.norms.variants import RMSNorm, StdEps

BLOCK, PANEL = 64, 16  # inputs that share a scale in int8, and outputs that lie together
SLAB = 64  # the outputs of a row are padded to a multiple of it
MOST_ROWS = 512  # that are read or multiplied at a time, so that they take little memory
SOURCES = ("simd.h", "model.h", "products.h", "kernel.c")  # of the library, as in hatch_build.py
COLUMNS = {torch.float32: 0, torch.bfloat16: 1}  # forms of a weight: (in, out)
ROWS = {torch.float32: 2, torch.bfloat16: 3}  # (out, in)
INT8 = 4
Place = tuple[dict[str, Any], str]  # the dict of a module that holds a part, a tensor or an attribute, and its name
NORMS: dict[type[nn.Module], int] = {LayerNorm: 0, FusedLayerNorm: 0, RMSNorm: 1, StdEps: 2, FrozenLayerNorm: 3}
ACTIVATIONS = ((gelu_new, 0), (gelu_tanh, 0), (F.gelu, 1), (F.relu, 2), (F.silu, 3), (torch.tanh, 4))
LEVELS = ("bf16", "vnni", "avx512", "avxvnni", "avx2", "dotprod", "portable")  # of instructions, the best first
AFFINE = (FastConv1D, Conv1D)
ATTRIBUTES = vars(nn.Module()).keys()  # of every module
WATCHED = ("config", "attention", "eps", "scale", "act")  # attributes that the kernel is told
PARTS: dict[str, tuple[type[nn.Module], ...]] = {  # by the last part of a module's name
    "": (FastGPT2,), "wte": (nn.Embedding,), "wpe": (nn.Embedding,), "drop": (nn.Dropout,), "h": (nn.ModuleList,),
    "block": (Block,), "attn": (FastAttention,), "mlp": (FastMLP,), "ln_1": (*NORMS,), "ln_2": (*NORMS,),
    "ln_f": (*NORMS,), "c_attn": AFFINE, "c_fc": AFFINE, "c_proj": AFFINE, "lm_head": (FastLinear, nn.Linear),
    "attn_dropout": (nn.Dropout,), "resid_dropout": (nn.Dropout,), "dropout": (nn.Dropout,),
}  # fmt: skip


class Matrix(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("inp", c_int64), ("out", c_int64), ("form", c_int64)]


class Norm(Structure):
    _fields_ = [
        ("scale", c_void_p), ("shift", c_void_p), ("kind", c_int64), ("eps", c_float), ("constants", c_void_p),
    ]  # fmt: skip


class Vector(Structure):
    _fields_ = [("half", c_void_p), ("wide", c_void_p), ("count", c_int64)]


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
        ("vector_count", c_int64), ("vectors", POINTER(Vector)),
    ]  # fmt: skip


class Rows(Structure):
    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("tokens", "slots", "columns")),
        ("outputs", c_int64),
        ("output_rows", c_void_p),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("is_half", "layer_stride", "value_stride", "slot_stride", "head_stride")),
        ("logits", c_void_p),
    ]


_CHOSEN = os.environ.get("MINIGPT_KERNEL", "")  # "0" turns the kernel off; a level is taken instead of the best
_is_on = _CHOSEN != "0"

SIGNATURES = {  # of the functions of ``kernel.c``: what they return, and their arguments
    "memory": (c_long, c_void_p, c_void_p, c_long, c_long),
    "step": (None, c_void_p, c_void_p, c_long, c_long, c_void_p),
    "product_memory": (c_long, c_void_p, c_long, c_long),
    "product": (None, c_void_p, c_void_p, c_void_p, c_long, c_long, c_void_p),
    "round": (None, c_void_p, c_void_p, c_long),
}


@cache
def load() -> SimpleNamespace | str:
    """Return the functions at the best level of the processor, and its name; or why there are none.

    MINIGPT_KERNEL may name a level.
    """
    path = Path(os.environ.get("MINIGPT_KERNEL_LIBRARY", Path(__file__).with_name("libminigpt.so")))
    if not path.is_file():
        return "the kernel was not built; installing minigpt where there is a C compiler builds it"
    for runtime in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)  # PyTorch's own threads, not a second pool
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the kernel cannot be loaded: {error}"
    if _is_of_other_sources(library, path):
        reason = f"{path} was built from other sources than those beside it"
        again = "install minigpt again, or run python hatch_build.py in its repository"
        warnings.warn(f"{reason}, so decoding takes PyTorch; {again}", stacklevel=2)
        return reason
    library.minigpt_supports.argtypes = [ctypes.c_char_p]
    built = [level for level in LEVELS if hasattr(library, f"minigpt_step_{level}")]
    levels = [level for level in built if library.minigpt_supports(level.encode())]
    best = levels[levels[0] == "bf16" and not IS_AMD]  # Intel's multiply no faster, and weights must be packed in pairs
    level = best if _CHOSEN in ("", "0", "1") else _CHOSEN
    if level not in levels:
        return f"MINIGPT_KERNEL={level} is none of this processor's levels: {', '.join(levels)}"
    functions = {name: getattr(library, f"minigpt_{name}_{level}") for name in SIGNATURES}
    for name, (result, *arguments) in SIGNATURES.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    return SimpleNamespace(level=level, levels=levels, **functions)


def functions() -> SimpleNamespace:
    """Return the functions of the kernel, which ``is_at_hand``."""
    kernel = load()
    assert not isinstance(kernel, str)
    return kernel


def _is_of_other_sources(library: ctypes.CDLL, path: Path) -> bool:
    sources = [path.with_name(name) for name in SOURCES]
    if not all(source.is_file() for source in sources):
        return False
    built_from = ctypes.c_uint32(library.minigpt_sources()).value if hasattr(library, "minigpt_sources") else None
    return built_from != zlib.crc32(b"".join(source.read_bytes() for source in sources))


def use_kernel(on: bool) -> None:
    """Turn the decoding kernel on or off for this process. The environment variable MINIGPT_KERNEL=0 does the same."""
    global _is_on
    _is_on = on


def is_at_hand() -> bool:
    """Return True if the kernel can be loaded and is not turned off."""
    return _is_on and not isinstance(load(), str)


def why_not(model: nn.Module) -> str | None:
    """Return why decoding this model takes the PyTorch path, or None if it takes the kernel."""
    return next(_reasons(model), None)


def path_of(model: nn.Module) -> str:
    """Return which path decodes this model on the CPU, and why: "kernel (avx512)", or "PyTorch: ..."."""
    reason = why_not(model)
    return f"kernel ({functions().level})" if reason is None else f"PyTorch: {reason}"


def _reasons(model: Any) -> Iterator[str]:
    """Yield why the kernel does not compute what the model's modules compute. A check may rely on those before it."""
    if not _is_on:
        yield "the kernel is turned off"
    if isinstance(reason := load(), str):
        yield reason
    if not isinstance(model, FastGPT2) or model.attention != "sdpa":
        yield 'the model is not a minigpt.GPT2 with arithmetic="fast" and attention="sdpa"'
    parts = dict(model.named_modules())
    if any(part.training for part in parts.values()):
        yield "the model is in training mode"
    parameters = [p for part in parts.values() for p in part._parameters.values() if p is not None]
    dtypes, devices = {p.dtype for p in parameters}, {p.device.type for p in parameters}
    if len(dtypes) > 1 or not dtypes <= COLUMNS.keys() or not devices <= {"cpu", "meta"}:
        yield "the weights are not all on the CPU in float32, or all in bfloat16"
    if torch.is_autocast_enabled("cpu"):
        yield "autocast is on"
    if is_watched(*parts.values()) or any(map(_has_replaced_method, parts.values())):
        yield "a module has hooks or a replaced forward"
    for name, part in parts.items():
        role = name.rpartition(".")[2]
        is_int8 = hasattr(part, "panels") and role in ("c_attn", "c_fc", "c_proj", "lm_head")
        if not is_int8 and type(part) not in PARTS.get("block" if role.isdigit() else role, ()):
            yield f"{name or 'the model'} is a {_kind(part)}"
        if isinstance(part, LayerNorm) and not _is_what_is_compiled(type(part), *_methods_of(type(part))):
            yield f"{name} is a {_kind(part)} that was edited"
        if isinstance(part, FrozenLayerNorm):
            yield from _uncalibrated(name, part.calibration)
        if isinstance(part, nn.Embedding) and part.max_norm is not None:
            yield f"{name} has a max_norm"
    for name, parameter in model.named_parameters():
        if parameter.is_inference() and not parameter.is_contiguous():
            yield f"{name} is an inference tensor that is not contiguous"
    yield from _unlike_config(model, parts)


def _uncalibrated(name: str, constants: Tensor | None) -> Iterator[str]:
    if constants is None:
        yield f"{name} is not calibrated"
    elif constants.dtype not in COLUMNS or not constants.is_cpu or not constants.is_contiguous():
        yield f"{name} has constants that do not lie on the CPU in float32 or bfloat16"


def _kind(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__name__}"


def _methods_of(norm: type[LayerNorm]) -> tuple[Callable[..., object], ...]:
    return norm.forward, norm.standardize


def _has_replaced_method(part: nn.Module) -> bool:
    return any(callable(getattr(type(part), name, None)) for name in vars(part).keys() - ATTRIBUTES)


def _unlike_config(model: Any, parts: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield which modules have other sizes or attributes than the kernel is told: it gets the config's."""
    config, c, inner = model.config, model.config.n_embd, model.config.inner_size
    sizes = {"wte": (config.vocab_size, c), "wpe": (config.n_positions, c), "ln_f": (c,)}
    if not config.tie_word_embeddings:
        sizes["lm_head"] = (config.vocab_size, c)
    for layer, block in enumerate(model.h):
        sizes |= {f"h.{layer}.ln_1": (c,), f"h.{layer}.attn.c_attn": (c, 3 * c), f"h.{layer}.attn.c_proj": (c, c)}
        sizes |= {f"h.{layer}.ln_2": (c,), f"h.{layer}.mlp.c_fc": (c, inner), f"h.{layer}.mlp.c_proj": (inner, c)}
        if block.attn.layer != layer:
            yield "the blocks are not in the order of their layers in the cache"
        if (block.attn.n_head, block.attn.attention) != (config.n_head, "sdpa"):
            yield f"h.{layer}.attn has another n_head or attention than the model"
        if activation_of(block) is None or block.mlp.act is not model.h[0].mlp.act:
            yield f"h.{layer}.mlp.act is not one that the kernel knows, the same in all blocks"
    for name, size in sizes.items():
        if (shape := _shape_of(name, parts[name])) != size:
            yield f"{name} has shape {shape}, and not {size}"


def _shape_of(name: str, part: Any) -> tuple[int, ...]:
    """Return the shape of a norm, or of the weight of a layer; of one in int8 that of the layer which it replaced."""
    if type(part) in NORMS:
        return tuple(part.normalized_shape)
    if hasattr(part, "panels"):
        return part.shape if name == "lm_head" else part.shape[::-1]
    return tuple(part.weight.shape)


def activation_of(block: Any) -> int | None:
    """Return the number of a block's activation in ``kernel.c``, or None."""
    return next((number for function, number in ACTIVATIONS if block.mlp.act is function), None)


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

    Each step reads the values at these addresses, so it sees any change in place. ``is_outdated`` sees a replacement,
    and a change in place of what is copied: a tensor that is not contiguous, or is rounded to eight bits.

    Args:
        panels_of: returns int8 panels to take in place of a weight, given the weight and whether it is (out, in).
    """

    def __init__(self, model: Any, panels_of: Callable[[Tensor, bool], Tensor] | None = None) -> None:
        self.functions, self.vocabulary = functions(), model.config.vocab_size
        self.keep_alive: list[Tensor] = []
        self.vectors: list[Vector] = []
        self.panels_of, self.has_copies = panels_of, panels_of is not None
        config, c, inner = model.config, model.config.n_embd, model.config.inner_size
        self.layers = (Layer * len(model.h))(*(
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
            len(model.h), c, config.n_head, inner, model.wte.weight.dtype == torch.bfloat16,
            activation_of(model.h[0]),
            self._address(model.wte.weight), self._address(model.wpe.weight), self.layers, self._norm(model.ln_f),
            self._matrix(head, c, config.vocab_size, by_rows=True),
        )  # fmt: skip
        self.model.vector_count = len(self.vectors)
        self.model.vectors = (Vector * len(self.vectors))(*self.vectors)
        self.memory: Tensor | None = None
        self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        """Note the modules, attributes and tensors of the model as they are."""
        parts: list[Place] = [(vars(model), "training"), (model._modules, "lm_head")]
        tensors: list[Place] = []
        self.hooks: list[Mapping[int, Any]] = []
        for part in model.modules():
            own = vars(part)
            parts += [(part._modules, name) for name in part._modules]
            parts += [(own, name) for name in WATCHED if name in own]
            for contents in (part._parameters, part._buffers):
                for name, tensor in contents.items():
                    (parts if tensor is None else tensors).append((contents, name))
            if "panels" in own:
                tensors.append((own, "panels"))
            self.hooks += [part._forward_hooks, part._forward_pre_hooks]
        self.parts = [[owner for owner, _ in parts], [name for _, name in parts]]
        self.tensors = [[owner for owner, _ in tensors], [name for _, name in tensors]]
        self.state = self._state()

    def is_outdated(self) -> bool:
        """Return True if the kernel would compute another model than the modules now do.

        A module, an attribute, a tensor or its memory was replaced since, or a hook was added. If the kernel has copies
        of tensors, also if a tensor was changed in place.
        """
        try:
            return any(self.hooks) or self.state != self._state()
        except TypeError:  # a tensor is None now
            return True

    def _state(self) -> tuple[list[Any], list[int], list[int]]:
        """Return the modules and attributes, the addresses of the tensors, and their versions if some are copied."""
        # Maps, since a step of a small model takes a fifth of a millisecond.
        parts = list(map(dict.get, *self.parts))
        addresses = list(map(Tensor.data_ptr, map(dict.get, *self.tensors)))
        if not self.has_copies:
            return parts, addresses, []
        tensors: list[Any] = list(map(dict.get, *self.tensors))
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return parts, addresses, versions

    def __call__(
        self, tokens: Sequence[int], slots: Sequence[int], columns: Sequence[int], store: Tensor,
        output_rows: Sequence[int] | None = None,
    ) -> Float[Tensor, "outputs vocab"]:  # fmt: skip
        """Return logits (W, V) after some of the tokens. The keys and values of all go to the cache.

        Several tokens may be of one text, in the order of their columns, without a gap. Each sees all columns of its
        text up to its own. The bits of its logits depend on them alone.

        Args:
            tokens: the new tokens.
            slots: the place of each one's text in the cache. The text begins at its column 0.
            columns: the token's own column, which is its position.
            store: (L, 2, B, H, S, D), the keys and values of a cache in float32 or bfloat16.
            output_rows: rows whose logits are returned, in ascending order; by default all.
        """
        output_rows = range(len(tokens)) if output_rows is None else output_rows
        logits = torch.empty(len(output_rows), _padded(self.vocabulary), dtype=torch.float32, device="cpu")
        done = 0
        for first in range(0, len(tokens), MOST_ROWS):
            some, last = slice(first, first + MOST_ROWS), first + MOST_ROWS
            outputs = [row - first for row in output_rows[done : done + MOST_ROWS] if row < last]
            self._read(tokens[some], slots[some], columns[some], store, outputs, logits[done:])
            done += len(outputs)
        return logits[:, : self.vocabulary]

    def _read(
        self, tokens: Sequence[int], slots: Sequence[int], columns: Sequence[int], store: Tensor, outputs: list[int],
        logits: Tensor,
    ) -> None:  # fmt: skip
        arrays = [array("q", values) for values in (tokens, slots, columns, outputs)]  # until the step is done
        *rows, output_rows = (values.buffer_info()[0] for values in arrays)
        new = Rows(
            len(tokens), *rows, len(outputs), output_rows, store.data_ptr(), store.dtype == torch.bfloat16,
            *store.stride()[:4], logits.data_ptr(),
        )  # fmt: skip
        arguments = byref(self.model), byref(new), torch.get_num_threads(), max(columns) + 1
        self.memory, place = _room(self.memory, self.functions.memory(*arguments))
        self.functions.step(*arguments, place)

    def _address(self, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            self.has_copies = True
        self.keep_alive.append(tensor.detach().contiguous())
        return self.keep_alive[-1].data_ptr()

    def _vector(self, tensor: Tensor | None) -> int | None:
        """Return the address of a vector's values in float32, which each step writes anew if it is in bfloat16."""
        if tensor is None or tensor.dtype == torch.float32:
            return None if tensor is None else self._address(tensor)
        wide = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        self.vectors.append(Vector(self._address(tensor), self._address(wide), tensor.numel()))
        return wide.data_ptr()

    def _norm(self, norm: Any) -> Norm:
        scale, shift, constants = norm.weight, norm.bias, getattr(norm, "calibration", None)
        return Norm(self._vector(scale), self._vector(shift), NORMS[type(norm)], norm.eps, self._vector(constants))

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
    x = x.contiguous()
    y, threads = x.new_empty(len(x), _padded(out)), torch.get_num_threads()
    matrix = Matrix(panels.data_ptr(), None, x.shape[1], out, INT8)
    memory, place = _room(None, functions().product_memory(byref(matrix), min(len(x), MOST_ROWS), threads))
    for some, result in zip(x.split(MOST_ROWS), y.split(MOST_ROWS), strict=True):
        functions().product(byref(matrix), some.data_ptr(), result.data_ptr(), len(some), threads, place)
    del memory
    return y[:, :out]


def int8_panels(rows: Float[Tensor, "out inp"], panels: UInt8[Tensor, "panels blocks bytes"]) -> None:
    """Round a weight in float32 or bfloat16 to ``panels``, as ``int8.panels_of`` does."""
    is_by_columns = rows.t().is_contiguous() and not rows.is_contiguous()
    weight = rows if is_by_columns else rows.contiguous()
    form = (COLUMNS if is_by_columns else ROWS)[rows.dtype]
    matrix = Matrix(weight.data_ptr(), None, rows.shape[1], len(rows), form)
    functions().round(byref(matrix), panels.data_ptr(), torch.get_num_threads())


def _padded(outputs: int) -> int:
    """Return the columns that the kernel writes for so many outputs."""
    return -(-outputs // SLAB) * SLAB


def _room(memory: Tensor | None, size: int) -> tuple[Tensor, int]:
    """Return memory of at least this size, and where in it a multiple of 64 is."""
    if memory is None or len(memory) < size + 64:
        memory = torch.empty(size + 64, dtype=torch.uint8, device="cpu")
    return memory, -(-memory.data_ptr() // 64) * 64
