"""The norm under check: build it at any width and dtype, with random weights."""

import copy
import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from minigpt import norms
from minigpt.conformance.rows import ORDINARY, RowKind, Weights, ordinary_weights
from minigpt.conformance.truth import Truth, gradient_truth, truth
from minigpt.device import dtype_name
from minigpt.errors import NormError
from minigpt.norms.add import own_addition
from minigpt.norms.foreign.construct import naming, require_same_shape, title

EPS, OTHER_EPS = 1e-5, 1e-3  # GPT-2's, and one that it does not have


class Unsupported(NormError):
    """The norm does not support this, and GPT-2 does not need it. The case is not judged, and does not fail."""


@dataclasses.dataclass
class Candidate:
    """A norm that is built, in eval mode, with its weights."""

    module: Any
    eps: float
    name: str

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its weight and, if it has one, its bias, by name."""
        both = {"weight": self.module.weight, "bias": self.module.bias}
        return {name: parameter for name, parameter in both.items() if parameter is not None}

    def __call__(self, x: Tensor, *, dtypes: Sequence[torch.dtype] = ()) -> Tensor:
        """Return the norm of ``x``, in the dtype of ``x`` or one of ``dtypes``.

        Raises:
            NormError: if the norm raises, or returns another shape or dtype.
        """
        with naming(self.module, f"{self.name}, given {tuple(x.shape)} in {dtype_name(x.dtype)},"):
            y = self.module(x)
        require_same_shape(y, x, self.module)
        if y.dtype not in (x.dtype, *dtypes):
            raise NormError(f"{self.name} changes the dtype: {x.dtype} went in, {y.dtype} came out")
        return y

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Call the norm's own ``add_norm``: return the sum, and the norm of the sum.

        Raises:
            Unsupported: if it has none.
        """
        if fused := own_addition(self.module):
            return fused(residual, delta)
        raise Unsupported("it leaves the addition to the model")

    def compared(self, x: Tensor, what: str = "") -> tuple[str, Tensor, Tensor, Tensor]:
        """Return ``what``, the norm of ``x``, the truth and its bound."""
        values, bound = self.truth(x)  # before the norm, which may write into its input
        return what, self(x), values, bound

    def truth(self, x: Tensor) -> Truth:
        """Return LayerNorm of ``x`` in float64 with the same weights, and the bound on rounding; on the CPU."""
        return truth(x, self.module.weight, self.module.bias, self.eps)

    def gradient_truth(self, x: Tensor, dy: Tensor) -> dict[str, Truth]:
        """Return the gradients of that for an incoming ``dy``, by name."""
        return gradient_truth(x, self.module.weight, self.eps, dy)


class Subject:
    """The norm under check: how to build it, and its random numbers.

    Attributes:
        name: its name in messages.
        device: where it is built and runs.
        generator: draws rows and weights, by the seed.
        compile_backend: the compiler that torch.compile uses.
    """

    def __init__(
        self, norm: norms.NormSpec, device: torch.device, *, seed: int = 0, compile_backend: str = "aot_eager"
    ) -> None:
        self.norm, self.device, self.seed, self.compile_backend = norm, device, seed, compile_backend
        self.name = norm if isinstance(norm, str) else title(norm)
        self.generator = Generator().manual_seed(seed)

    def drawing_for(self, purpose: str) -> "Subject":
        """Return the same norm with separate random numbers, so that no case depends on earlier cases."""
        other = copy.copy(self)
        other.generator = Generator().manual_seed(zlib.crc32(f"{self.seed} {purpose}".encode()))
        return other

    def candidate(
        self,
        width: int = 64,
        dtype: torch.dtype = torch.float32,
        *,
        eps: float = EPS,
        bias: bool = True,
        weights: Callable[[int, Generator], Weights] = ordinary_weights,
    ) -> Candidate:
        """Build the norm over ``width`` with ``weights(width, generator)``, rounded to ``dtype``.

        Sets the Parameters ``weight`` and ``bias``, as ``swap_norms`` does.

        Raises:
            NormError: if it cannot be built.
        """
        module: Any = norms.build(self.norm, width, eps=eps, bias=bias)
        scale, shift = weights(width, self.generator)
        module.weight = nn.Parameter(self.put(scale, dtype))
        module.bias = nn.Parameter(self.put(shift, dtype)) if bias else None
        with naming(module):
            return Candidate(module.to(device=self.device, dtype=dtype).eval(), eps, self.name)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32, kind: RowKind = ORDINARY) -> Tensor:
        """Return rows of a kind in this shape, (..., width), on the device."""
        return self.put(kind.rows(math.prod(shape[:-1]), shape[-1], self.generator, dtype), dtype).view(shape)

    def put(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Round a float64 tensor to ``dtype``, and move it to the norm's device."""
        return tensor.to(device=self.device, dtype=dtype)

    @property
    def takes_eps(self) -> bool:
        """True if it can be built with another eps."""
        return not any("eps " in note for note in norms.notes(self.candidate(eps=OTHER_EPS).module))
