"""How weights lie in memory: as the checkpoint has them, (in, out), by rows, (out, in), or packed. Values stay."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.packed import LetGo, keep, pack, require_free_layout
from minigpt.engine.strips import stripe
from minigpt.model.conv1d import Conv1D
from minigpt.model.gpt2 import GPT2
from minigpt.processor import HAS_BFLOAT16, HAS_ONEDNN, HAS_TILES, MIXES_MKL, PREFERS_ONEDNN, SLOW_HALVES

MANY = 100  # steps of a single text in float32 that win back the time of a copy: each is a fifth faster


def lay_out(
    model: GPT2,
    tokens: int = 1,
    let_go: LetGo = keep,
    steps: float = math.inf,
) -> GPT2:
    """Lay the weights out as this processor multiplies them fastest, ``tokens`` at a time, in place; return ``model``.

    It pays before much is written: in float32 on AMD's processors with AVX-512, in bfloat16 where the processor has
    instructions for it, in halves that oneDNN does not know on x86, and in every dtype where several tokens are
    multiplied at a time. The model can then only compute: weights that are packed (see ``pack``) are no Parameters.
    Where nothing is to be gained, as on a GPU or with weights of eight bits, it stays as it is.

    Args:
        tokens: how many are mostly multiplied at a time: one of every text, and what is guessed of it (``--lookup``).
        let_go: is handed each weight, as it was, once it has been copied.
        steps: the most that will be taken, where that is known: few may not be worth the copy.

    Raises:
        ConfigError: the arithmetic is "reference", whose bits depend on the layout, or ``tokens`` is no whole number,
            1 or more.
    """
    require_free_layout(model, tokens)
    weight = model.wte.weight
    if not weight.is_cpu or model.quantize is not None:
        return model
    if weight.dtype == torch.bfloat16 and HAS_BFLOAT16 and HAS_ONEDNN:
        return stripe(model, let_go) if tokens == 1 and HAS_TILES else pack(model, tokens, let_go)
    is_worth_it = tokens > 1 or (steps >= MANY and not MIXES_MKL)
    if weight.dtype == torch.float32 and PREFERS_ONEDNN and is_worth_it:
        return pack(model, tokens, let_go)
    return lay_by_rows(model, let_go) if tokens > 1 or weight.dtype in SLOW_HALVES else model


def by_rows(
    weight: Float[Tensor, "inp out"], device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Float[Tensor, "inp out"]:
    """The same shape and values, there and in that dtype, laid out as (out, in): what ``product`` reads fastest.

    For where a weight is copied anyway, to another dtype for instance. One that lies in a file is used as it lies.
    """
    rows = weight.t().to(device, dtype, memory_format=torch.contiguous_format)
    return rows.contiguous().t()


@torch.no_grad()
def lay_by_rows(model: GPT2, let_go: LetGo = keep) -> GPT2:
    """Copy the affine weights out of the file they lie in, by rows, in place; return ``model``.

    ``lay_out`` and ``compile_steps`` call it where it pays; the copy takes a fraction of a second. The last bits of the
    logits may differ. ``let_go`` is handed each weight, as it was, once it has been copied.

    Raises:
        ConfigError: the arithmetic is "reference", whose bits depend on the layout.
    """
    require_free_layout(model)
    for module in model.modules():
        if isinstance(module, Conv1D):
            was, module.weight.data = module.weight.data, by_rows(module.weight)
            let_go(was)
    return model
