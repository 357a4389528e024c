"""The norm under check: built at any width and dtype, with weights that hide nothing."""

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from minigpt import norms
from minigpt.conformance.rows import Weights, ordinary, ordinary_weights
from minigpt.conformance.truth import Truth, gradient_truth, truth
from minigpt.errors import RAISED, NormError
from minigpt.norms.add import norm_by_addition, own_addition
from minigpt.norms.foreign.construct import construct, naming, title
from minigpt.norms.foreign.locate import last_line, locate
from minigpt.placement import dtype_name

EPS = 1e-5  # GPT-2's
OTHER_EPS = 1e-3


class Mismatch(Exception):
    """What came out cannot be compared: another shape, dtype or device, no gradient, finite for NaN. A failed case."""


class Unsupported(Exception):
    """The norm says that it does not do this, and no GPT-2 needs it. Not judged, and no failed case."""


class Candidate:
    """A norm that has been built, and what was put into it.

    Attributes:
        module: the norm, in eval mode.
        weight, bias: the Parameters that it was given; bias is None where it was built without.
        eps: the eps that it was asked for.
    """

    def __init__(self, module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None, eps: float) -> None:
        self.module, self.weight, self.bias, self.eps = module, weight, bias, eps

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of the two that it has."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def __call__(self, x: Tensor, *, dtypes: Sequence[torch.dtype] = ()) -> Tensor:
        """The norm of ``x``: same shape and device, and of the same dtype (or of one of ``dtypes``).

        Raises:
            Mismatch: it is not.
            Unsupported: the input is float64 and the norm refuses it.
        """
        try:
            y = self.module(x)
        except RAISED as error:
            if isinstance(error, NormError) and error.__cause__ is None:  # it ran, but its output is not like its input
                raise Mismatch(str(error)) from error
            if x.dtype == torch.float64:
                raise Unsupported(f"it refuses float64: {described(error)}") from error
            raise
        _require_alike(y, x, dtypes or (x.dtype,))
        return y

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """What its own ``add_norm`` makes of the two: their sum, and the norm of that.

        Raises:
            Unsupported: it has none.
        """
        fused = own_addition(self.module)
        if fused is None:
            raise Unsupported("it leaves the addition to the model")
        return fused(residual, delta)

    def ways(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """How a model may ask for it: by itself, and where it adds the residual too, so of two parts."""
        alone: dict[str, Callable[[Tensor], Tensor]] = {"": self}
        added = {", in add_norm": partial(norm_by_addition, self.add_norm)}
        return alone | (added if own_addition(self.module) else {})

    def reference(self, x: Tensor) -> Tensor:
        """What PyTorch's own layer_norm makes of ``x`` with the same weights."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))  # outside autocast, CUDA's takes no two dtypes
        return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)

    def truth(self, x: Tensor) -> Truth:
        """LayerNorm of ``x`` with the same weights in float64, and the bound on what rounding adds; on the CPU."""
        return truth(x, self.weight, self.bias, self.eps)

    def gradient_truth(self, x: Tensor, dy: Tensor) -> dict[str, Truth]:
        """The gradients that ``dy`` brings back through that, both (rows, width), by the names of what takes them."""
        return gradient_truth(x, self.weight, self.bias, self.eps, dy)


class Subject:
    """How to build the norm under check, and where its random numbers come from.

    Attributes:
        name: what to call it.
        device: where it is built and runs.
        generator: draws the rows and the weights; the same for the same seed.
        compile_backend: what torch.compile is to compile it with.
    """

    def __init__(
        self, norm: norms.NormSpec, device: torch.device, *, seed: int = 0, compile_backend: str = "aot_eager"
    ) -> None:
        self.norm, self.device, self.seed, self.compile_backend = norm, device, seed, compile_backend
        self.name = norm if isinstance(norm, str) else title(norm)
        self.generator = Generator().manual_seed(seed)

    def drawing_for(self, purpose: str) -> "Subject":
        """The same norm with random numbers of its own, so that no case depends on which others ran before it."""
        seed = zlib.crc32(f"{self.seed} {purpose}".encode())
        return Subject(self.norm, self.device, seed=seed, compile_backend=self.compile_backend)

    def candidate(
        self,
        shape: int | tuple[int, ...] = 64,
        dtype: torch.dtype = torch.float32,
        *,
        eps: float = EPS,
        bias: bool = True,
        weights: Callable[[int, Generator], Weights] = ordinary_weights,
    ) -> Candidate:
        """The norm over ``shape`` with ``weights(width, generator)`` in it, rounded to ``dtype``.

        They are put in as ``swap_norms`` puts a model's own in: as the Parameters ``weight`` and ``bias``.

        Raises:
            NormError: it cannot be built.
        """
        module: Any = norms.build(self.norm, shape, eps=eps, bias=bias)
        sizes = (shape,) if isinstance(shape, int) else shape
        scale, shift = weights(torch.Size(sizes).numel(), self.generator)
        module.weight = nn.Parameter(self.put(scale.view(sizes), dtype))
        module.bias = nn.Parameter(self.put(shift.view(sizes), dtype)) if bias else None
        with naming(module):
            module = module.to(device=self.device, dtype=dtype).eval()
        return Candidate(module, module.weight, module.bias, eps)

    def without_bias(self, width: int) -> Candidate:
        """The norm without a shift.

        Raises:
            Unsupported: it cannot be built so.
        """
        try:
            return self.candidate(width, bias=False)
        except NormError as error:
            raise Unsupported(f"it cannot be built without a bias: {error}") from error

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Ordinary rows of this shape, (..., width), as ``put`` puts them."""
        return self.put(ordinary(math.prod(shape[:-1]), shape[-1], self.generator), dtype).view(shape)

    def put(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor drawn in float64, rounded to ``dtype`` and on the norm's device."""
        return tensor.to(device=self.device, dtype=dtype)

    def require_judgeable(self) -> None:
        """Find out whether it can be made in different widths, and runs at all, on 4 rows of 64 float32 numbers.

        Raises:
            NormError: it cannot be built, or raises.
        """
        candidate, _ = self.candidate(64), self.candidate(768)
        x = self.put(torch.randn(4, 64, generator=self.generator))
        if error := _raised(candidate.module, x):
            said = described(error)
            if not _raised(candidate.module, x[None]):
                said += "; it takes (batch, sequence, width) alone, and is judged by rows (n, width) as well"
            raise NormError(f"norm {self.name!r} cannot be judged: {said}") from error

    @property
    def notes(self) -> list[str]:
        """What its adapter has to say of it."""
        return list(norms.notes(norms.build(self.norm, 64, eps=EPS)))

    @property
    def takes_eps(self) -> bool:
        """Whether its constructor can be told an eps."""
        make = locate(self.norm) if isinstance(self.norm, str) else self.norm
        return construct(make, (64,), eps=EPS, bias=True).takes_eps


def described(error: BaseException) -> str:
    """One line: what was raised and where; of an error that the adapter explains, its explanation."""
    return str(error) if isinstance(error, NormError) else last_line(error)


@torch.no_grad()
def _raised(module: nn.Module, x: Tensor) -> BaseException | None:
    """What it raises when it is called with ``x``."""
    try:
        module(x)
    except RAISED as error:
        return error
    return None


def _require_alike(y: object, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(y, Tensor):
        raise Mismatch(f"it returns a {type(y).__name__}, not a tensor")
    if y.shape != x.shape:
        raise Mismatch(f"it returns shape {tuple(y.shape)} for an input of {tuple(x.shape)}")
    if y.dtype not in dtypes:
        raise Mismatch(f"it returns {dtype_name(y.dtype)} for {dtype_name(x.dtype)} input")
    if y.device != x.device:
        raise Mismatch(f"it returns a tensor on {y.device} for an input on {x.device}")
