"""The norm under check: build it at any width and dtype, with random weights."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from minigpt import norms
from minigpt.conformance.rows import ORDINARY, RowKind, Weights, ordinary_weights
from minigpt.conformance.truth import Truth, gradient_truth, truth
from minigpt.errors import RAISED, NormError
from minigpt.norms.add import own_addition
from minigpt.norms.foreign.construct import construct, naming, require_same_shape, title
from minigpt.norms.foreign.locate import last_line, locate
from minigpt.placement import dtype_name

EPS = 1e-5  # GPT-2's


class Unsupported(Exception):
    """The norm does not support this, and GPT-2 does not need it. The case is not judged, and does not fail."""


@dataclasses.dataclass
class Candidate:
    """A norm that is built, in eval mode, with its weights. ``bias`` is None if it is built without one."""

    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    eps: float
    name: str

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its weight and, if it has one, its bias, by name."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def __call__(self, x: Tensor, *, dtypes: Sequence[torch.dtype] = ()) -> Tensor:
        """Return the norm of ``x``, in the dtype of ``x`` or one of ``dtypes``.

        Raises:
            NormError: if the norm raises, or returns another shape or dtype.
            Unsupported: if the input is float64 and the norm raises.
        """
        try:
            y = self.module(x)
        except RAISED as error:
            if x.dtype == torch.float64:
                raise Unsupported(f"it refuses float64: {described(error)}") from error
            given = f"an input of {tuple(x.shape)} in {dtype_name(x.dtype)}"
            raise NormError(f"{self.name} raised {described(error)} on {given}") from error
        require_same_shape(y, x, self.module)
        if y.dtype not in (x.dtype, *dtypes):
            raise NormError(f"{self.name} changes the dtype: {x.dtype} went in, {y.dtype} came out")
        return y

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Call the norm's own ``add_norm``: return the sum, and the norm of the sum.

        Raises:
            Unsupported: if it has none.
        """
        fused = own_addition(self.module)
        if fused is None:
            raise Unsupported("it leaves the addition to the model")
        return fused(residual, delta)

    def reference(self, x: Tensor) -> Tensor:
        """Return PyTorch's own layer_norm of ``x`` with the same weights."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))  # CUDA's layer_norm needs one dtype
        return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)

    def truth(self, x: Tensor) -> Truth:
        """Return LayerNorm of ``x`` in float64 with the same weights, and the bound on rounding; on the CPU."""
        return truth(x, self.weight, self.bias, self.eps)

    def gradient_truth(self, x: Tensor, dy: Tensor) -> dict[str, Truth]:
        """Return the gradients of that for an incoming ``dy``, by name."""
        return gradient_truth(x, self.weight, self.bias, self.eps, dy)


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
        seed = zlib.crc32(f"{self.seed} {purpose}".encode())
        return Subject(self.norm, self.device, seed=seed, compile_backend=self.compile_backend)

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
            module = module.to(device=self.device, dtype=dtype).eval()
        return Candidate(module, module.weight, module.bias, eps, self.name)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32, kind: RowKind = ORDINARY) -> Tensor:
        """Return rows of a kind in this shape, (..., width), on the device."""
        return self.put(kind.rows(math.prod(shape[:-1]), shape[-1], self.generator, dtype), dtype).view(shape)

    def put(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Round a float64 tensor to ``dtype``, and move it to the norm's device."""
        return tensor.to(device=self.device, dtype=dtype)

    def require_judgeable(self) -> None:
        """Check that the norm can be built, and runs on 4 rows of 64 float32 numbers.

        Raises:
            NormError: if it cannot be built, or raises.
        """
        module = self.candidate().module
        try:
            module(self.put(torch.ones(4, 64)))
        except RAISED as error:
            said = f"norm {self.name!r} cannot be judged: {described(error)}"
            raise NormError(f"{said}; it must take rows of shape (rows, width)") from error

    @property
    def notes(self) -> list[str]:
        """Remarks of its adapter, for example on an eps that cannot be set."""
        return list(norms.notes(norms.build(self.norm, 64, eps=EPS)))

    @property
    def takes_eps(self) -> bool:
        """True if its constructor takes an eps."""
        make = locate(self.norm) if isinstance(self.norm, str) else self.norm
        return construct(make, (64,), eps=EPS, bias=True).takes_eps


def described(error: BaseException) -> str:
    """Return one line: what was raised and where, or the norm's own explanation."""
    return str(error) if isinstance(error, NormError) else last_line(error)
