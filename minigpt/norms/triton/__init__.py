"""LayerNorm on custom Triton kernels: for CUDA devices, and for any device in Triton's interpreter.

Triton is imported when the first of these norms is used.
"""

import importlib.util
import os

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import NormError, to_install
from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm


def interpreting() -> bool:
    """True if Triton interprets its kernels: on any device, but slowly."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _obstacle(device: torch.device | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return f"needs triton: {to_install('triton')}"
    if interpreting():
        return None
    if not torch.cuda.is_available():
        return "needs a CUDA device, and PyTorch sees none; TRITON_INTERPRET=1 interprets its kernels, slowly"
    return None if device is None or device.type in ("cuda", "meta") else f"runs on CUDA, not on {device.type}"


@register("triton", obstacle=_obstacle)
class TritonLayerNorm(LayerNorm):
    """Custom kernels in one pass over the input; statistics in float32 or wider.

    The bits are the same on every run, and a row's bits do not depend on the other rows. Under autocast the output
    keeps the input's dtype. It has first derivatives only, and takes rows of at most 8,192 float32 numbers.
    """

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Normalize ``x`` (..., *normalized_shape); same shape and dtype out."""
        row, device = self.normalized_shape, self.weight.device
        if not x.is_floating_point() or x.shape[-len(row) :] != row or x.device != device:  # the kernels rely on it
            actual = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise NormError(f"x must be floating-point, end in {row} and be on {device}, got {actual}")
        from minigpt.norms.triton.ops import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps)[0]
