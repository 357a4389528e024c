"""The models that the decoding kernel computes, and why it does not compute the others."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minigpt.config import GPT2Config
from minigpt.engine.kernel import functions, is_on, load
from minigpt.engine.parts import FastAttention, FastConv1D, FastGPT2, FastLinear, FastMLP, is_watched
from minigpt.engine.structs import COLUMN_FORMS
from minigpt.model.gpt2 import Block
from minigpt.model.mlp import Conv1D, gelu_new, gelu_tanh
from minigpt.norms.formulas import norm_by_pytorch
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.textbook import FusedLayerNorm, LayerNorm
from minigpt.norms.variants import RMSNorm, StdEps

# The number of a norm, and of an activation, in ``kernel.c``.
NORMS: dict[type[nn.Module], int] = {LayerNorm: 0, FusedLayerNorm: 0, RMSNorm: 1, StdEps: 2, FrozenLayerNorm: 3}
COMPILED_ACTIVATIONS = ((gelu_new, 0), (gelu_tanh, 0), (F.gelu, 1), (F.relu, 2), (F.silu, 3), (torch.tanh, 4))

Parts = Mapping[str, nn.Module]  # a model's modules, by their names
AFFINE = (FastConv1D, Conv1D)
ATTRIBUTES = vars(nn.Module()).keys()  # of every module
INT8_ROLES = ("c_attn", "c_fc", "c_proj", "lm_head")
SERVED_CLASSES: dict[str, tuple[type[nn.Module], ...]] = {  # by the last part of a module's name
    "": (FastGPT2,), "wte": (nn.Embedding,), "wpe": (nn.Embedding,), "drop": (nn.Dropout,), "h": (nn.ModuleList,),
    "block": (Block,), "attn": (FastAttention,), "mlp": (FastMLP,), "ln_1": (*NORMS,), "ln_2": (*NORMS,),
    "ln_f": (*NORMS,), "c_attn": AFFINE, "c_fc": AFFINE, "c_proj": AFFINE, "lm_head": (FastLinear, nn.Linear),
    "attn_dropout": (nn.Dropout,), "resid_dropout": (nn.Dropout,), "dropout": (nn.Dropout,),
}  # fmt: skip


def why_not(model: nn.Module) -> str | None:
    """Return why decoding this model takes the PyTorch path, or None if it takes the kernel."""
    if not is_on():
        return "the kernel is turned off"
    library = load()
    if isinstance(library, str):
        return library
    if not isinstance(model, FastGPT2) or model.attention != "sdpa":
        return 'the model is not a minigpt.GPT2 with arithmetic="fast" and attention="sdpa"'
    parts = dict(model.named_modules())
    reason = _state_reason(model, parts) or _class_reason(parts)
    return reason or _layer_reason(model) or _size_reason(model, parts)


def path_of(model: nn.Module) -> str:
    """Return which path decodes this model on the CPU, and why: "kernel (avx512)", or "PyTorch: ..."."""
    reason = why_not(model)
    if reason is None:
        return f"kernel ({functions().level})"
    return f"PyTorch: {reason}"


def _state_reason(model: FastGPT2, parts: Parts) -> str | None:
    if any(part.training for part in parts.values()):
        return "the model is in training mode"
    dtypes: set[torch.dtype] = set()
    devices: set[str] = set()
    for name, parameter in model.named_parameters():
        dtypes.add(parameter.dtype)
        devices.add(parameter.device.type)
        if parameter.is_inference() and not parameter.is_contiguous():
            return f"{name} is an inference tensor that is not contiguous"
    if len(dtypes) > 1 or not dtypes <= COLUMN_FORMS.keys() or not devices <= {"cpu", "meta"}:
        return "the weights are not all on the CPU in float32, or all in bfloat16"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if is_watched(*parts.values()) or any(map(_has_replaced_method, parts.values())):
        return "a module has hooks or a replaced forward"
    return None


def _has_replaced_method(part: nn.Module) -> bool:
    added = vars(part).keys() - ATTRIBUTES
    return any(callable(getattr(type(part), name, None)) for name in added)


def _class_reason(parts: Parts) -> str | None:
    for name, part in parts.items():
        role = name.rpartition(".")[2]
        served = SERVED_CLASSES.get("block" if role.isdigit() else role, ())
        is_int8 = role in INT8_ROLES and hasattr(part, "panels")
        if not is_int8 and type(part) not in served:
            return f"{name or 'the model'} is a {_class_name(part)}"
        if isinstance(part, LayerNorm):
            reason = _norm_reason(name, part)
            if reason is not None:
                return reason
        if isinstance(part, nn.Embedding) and part.max_norm is not None:
            return f"{name} has a max_norm"
    return None


def _norm_reason(name: str, norm: LayerNorm) -> str | None:
    if not _is_what_is_compiled(type(norm), type(norm).forward, type(norm).standardize):
        return f"{name} is a {_class_name(norm)} that was edited"
    if not isinstance(norm, FrozenLayerNorm):
        return None
    constants = norm.calibration
    if constants is None:
        return f"{name} is not calibrated"
    if constants.dtype not in COLUMN_FORMS or not constants.is_cpu or not constants.is_contiguous():
        return f"{name} has constants that do not lie on the CPU in float32 or bfloat16"
    return None


def _class_name(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__name__}"


def _layer_reason(model: Any) -> str | None:
    """Return which block has another attribute than the model. The blocks have served classes."""
    for layer, block in enumerate(model.h):
        if block.attn.layer != layer:
            return "the blocks are not in the order of their layers in the cache"
        if block.attn.n_head != model.config.n_head or block.attn.attention != "sdpa":
            return f"h.{layer}.attn has another n_head or attention than the model"
        if activation_of(block) is None or block.mlp.act is not model.h[0].mlp.act:
            return f"h.{layer}.mlp.act is not one that the kernel knows, the same in all blocks"
    return None


def _size_reason(model: FastGPT2, parts: Parts) -> str | None:
    """Return which module has another size than the config says. The modules have served classes."""
    for name, size in _sizes(model.config, len(model.h)).items():
        shape = _shape_of(name, parts[name])
        if shape != size:
            return f"{name} has shape {shape}, and not {size}"
    return None


def _sizes(config: GPT2Config, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the modules, by their names."""
    c, inner = config.n_embd, config.inner_size
    sizes: dict[str, tuple[int, ...]] = {"ln_f": (c,)}
    sizes["wte"] = (config.vocab_size, c)
    sizes["wpe"] = (config.n_positions, c)
    if not config.tie_word_embeddings:
        sizes["lm_head"] = (config.vocab_size, c)
    for layer in range(layers):
        block = f"h.{layer}"
        sizes[f"{block}.ln_1"] = sizes[f"{block}.ln_2"] = (c,)
        sizes[f"{block}.attn.c_attn"] = (c, 3 * c)
        sizes[f"{block}.attn.c_proj"] = (c, c)
        sizes[f"{block}.mlp.c_fc"] = (c, inner)
        sizes[f"{block}.mlp.c_proj"] = (inner, c)
    return sizes


def _shape_of(name: str, part: Any) -> tuple[int, ...]:
    """Return the shape of a norm, or of the weight of a layer; of one in int8 that of the layer which it replaced."""
    if type(part) in NORMS:
        return tuple(part.normalized_shape)
    if not hasattr(part, "panels"):
        return tuple(part.weight.shape)
    if name == "lm_head":
        return part.shape
    return part.shape[::-1]


def activation_of(block: Any) -> int | None:
    """Return the number of a block's activation in ``kernel.c``, or None."""
    for function, number in COMPILED_ACTIVATIONS:
        if block.mlp.act is function:
            return number
    return None


@cache
def _is_what_is_compiled(norm: type[nn.Module], *_methods: Callable[..., object]) -> bool:
    """Return True if a class of norms computes what ``kernel.c`` computes in its place: its source may be edited."""
    with torch.device("cpu"), torch.no_grad():
        waves = torch.linspace(0, 90, 48, dtype=torch.float32).sin().view(6, 8)
        x = 2 + waves * torch.arange(1, 7)[:, None]
        part: Any = norm(8, eps=0.1).to(torch.float32)
        part.weight.copy_(x[0])
        part.bias.copy_(x[1])
        if norm is FrozenLayerNorm:
            part.calibration = torch.tensor([1.5, 4.0])
        expected = norm_by_pytorch(x, "rms_norm" if norm is RMSNorm else "layer_norm", x[0], x[1], eps=0.1)
        if norm in (StdEps, FrozenLayerNorm):
            divisor = x.std(-1, correction=0) + 0.1
            if norm is FrozenLayerNorm:
                divisor = torch.tensor([4.0, 1.5, 1.5, 1.5, 1.5, 1.5])  # the first of position 0
            centred = x - x.mean(-1, keepdim=True)
            expected = centred / divisor[:, None] * x[0] + x[1]
        return torch.allclose(part(x), expected, rtol=1e-5, atol=1e-5)
