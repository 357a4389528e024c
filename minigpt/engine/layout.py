"""How weights lie in memory: (in, out) as in the checkpoint, by rows as (out, in), or packed. Values stay."""

import contextlib
import ctypes
import math

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.kernel import why_not
from minigpt.engine.packed import check_layout, pack
from minigpt.engine.pages import MappedFiles
from minigpt.engine.root import GPT2
from minigpt.model.conv1d import Conv1D
from minigpt.processor import HAS_BFLOAT16, HAS_ONEDNN, PREFERS_ONEDNN, SLOW_HALVES

MANY = 100  # decoding steps of one text in float32 that pay for a copy: each step is a fifth faster


def lay_out(model: GPT2, tokens: int = 1, steps: float = math.inf) -> GPT2:
    """Lay the weights out as this processor multiplies them fastest, in place; return ``model``.

    The model is for inference then: packed weights (see ``pack``) are no Parameters. A model stays as it is where
    nothing is to be gained: on a GPU, with weights of eight bits, where the kernel decodes,
    or where few ``steps`` would not pay for the copy.

    Args:
        tokens: how many tokens are mostly multiplied at a time: one of every text, and each guess of prompt lookup.
        steps: the most decoding steps that will be taken, if that is known.

    Raises:
        ConfigError: if the arithmetic is "reference", whose bits depend on the layout, or ``tokens`` is below 1.
    """
    check_layout(model, tokens)
    weight = model.wte.weight
    if not weight.is_cpu or model.quantize is not None or why_not(model) is None:
        return model
    suits_bfloat16 = weight.dtype == torch.bfloat16 and HAS_BFLOAT16 and HAS_ONEDNN
    suits_float32 = weight.dtype == torch.float32 and PREFERS_ONEDNN and (tokens > 1 or steps >= MANY)
    if suits_bfloat16 or suits_float32:
        pack(model, tokens)
    elif tokens > 1 or weight.dtype in SLOW_HALVES:
        lay_by_rows(model)
    _give_back_free_memory()
    return model


def placed(weight: Float[Tensor, "inp out"], device: torch.device, dtype: torch.dtype) -> Float[Tensor, "inp out"]:
    """Return an affine weight on another device or in another dtype, laid out by rows, as processors read it faster."""
    rows = weight.t().to(device, dtype, memory_format=torch.contiguous_format)
    return rows.contiguous().t()


@torch.no_grad()
def lay_by_rows(model: GPT2) -> GPT2:
    """Copy the affine weights out of their file, by rows, in place; return ``model``.

    The last bits of the logits may differ.

    Raises:
        ConfigError: if the arithmetic is "reference", whose bits depend on the layout.
    """
    check_layout(model)
    files = MappedFiles()
    for module in model.modules():
        if isinstance(module, Conv1D):
            was = module.weight.data
            module.weight.data = placed(was, was.device, was.dtype)
            files.give_back(was)
    return model


def _give_back_free_memory() -> None:
    """Return free memory to the system where glibc keeps it."""
    with contextlib.suppress(TypeError, AttributeError):  # another system, another library
        ctypes.CDLL(None).malloc_trim(0)
