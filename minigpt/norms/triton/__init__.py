"""LayerNorm on custom Triton kernels: for CUDA devices, and for any device in Triton's interpreter.

Triton is imported when the first of these norms is used.
"""

import math
import os
from importlib.metadata import PackageNotFoundError, version

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import NormError
from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm


def interpreting() -> bool:
    """True if Triton is told to interpret its kernels: on any device, but slowly."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def runs_on(device: torch.device) -> bool:
    """True if the kernels run on ``device``. The meta device has shapes only and needs no kernel."""
    return device.type in ("cuda", "meta") or interpreting()


def _obstacle(device: torch.device | None) -> str | None:
    if interpreting():
        can_count = _release("triton") >= (3, 7) or _release("numpy") < (2, 4)
        return None if can_count else "needs triton 3.7, or an older numpy, to be interpreted: pip install 'numpy<2.4'"
    if torch.cuda.is_available():
        return None if device is None or runs_on(device) else f"runs on CUDA, not on {device.type}"
    return "needs a CUDA device, and PyTorch sees none; TRITON_INTERPRET=1 interprets its kernels without one, slowly"


def _release(package: str) -> tuple[float, float]:
    """Return the first two numbers of a package's version; infinity if it is installed under another name."""
    try:
        major, minor, *_ = version(package).split(".")
    except PackageNotFoundError:
        return math.inf, math.inf
    return int(major), int(minor)


@register("triton", requires="triton", obstacle=_obstacle)
class TritonLayerNorm(LayerNorm):
    """Custom kernels in one pass over the input, the residual addition fused in; statistics in float32 or wider.

    The bits are the same on every run, and those of a row do not depend on the other rows. Under autocast the output
    keeps the input's dtype. There are first derivatives only.
    """

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Normalize ``x`` (..., *normalized_shape); same shape and dtype out.

        Raises:
            NormError: if the shape does not fit, or ``x`` is not where the kernels run.
        """
        self._check(x)
        from minigpt.norms.triton.ops import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps)

    def add_norm(
        self, residual: Float[Tensor, "*dims"], delta: Float[Tensor, "*dims"]
    ) -> tuple[Float[Tensor, "*dims"], Float[Tensor, "*dims"]]:
        """``residual + delta`` and the norm of that sum, both of shape (..., *normalized_shape), from one kernel.

        Bit for bit what the addition and then the norm give, each in the dtype that the two promote to.

        Raises:
            NormError: if the shapes differ or do not fit, or one of the two is not where the kernels run.
        """
        if residual.shape != delta.shape:
            raise NormError(f"delta must have the residual's shape {tuple(residual.shape)}, got {tuple(delta.shape)}")
        self._check(residual)
        self._check(delta)
        from minigpt.norms.triton.ops import add_layer_norm

        return add_layer_norm(residual, delta, self.weight, self.bias, self.eps)

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point() or x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise NormError(
                f"x must be floating-point and end in {self.normalized_shape}, got {x.dtype} {tuple(x.shape)}"
            )
        if self.weight.device != x.device:
            raise NormError(f"this norm's weights are on {self.weight.device}, but the input is on {x.device}")
        if not runs_on(x.device):
            raise NormError(
                f"the triton norm runs on CUDA, but the input is on {x.device}; take norm 'fused' there, "
                "or set TRITON_INTERPRET=1 before Python starts to interpret its kernels, slowly"
            )
