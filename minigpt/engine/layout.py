"""Affine weights by rows: the values and shape of (in, out), in the memory order of (out, in)."""

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.pages import MappedFiles
from minigpt.engine.root import GPT2
from minigpt.model.conv1d import Conv1D


def placed(weight: Float[Tensor, "inp out"], device: torch.device, dtype: torch.dtype) -> Float[Tensor, "inp out"]:
    """Return a copy of an affine weight on another device or in another dtype, by rows, which is faster to read."""
    rows = weight.t().to(device, dtype, memory_format=torch.contiguous_format)
    return rows.contiguous().t()


@torch.no_grad()
def lay_by_rows(model: GPT2) -> None:
    """Copy the affine weights out of their file, by rows. The last bits of the logits may differ."""
    files = MappedFiles()
    for module in model.modules():
        if isinstance(module, Conv1D):
            was = module.weight.data
            module.weight.data = placed(was, was.device, was.dtype)
            files.give_back(was)
