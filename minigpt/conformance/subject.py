"""The norm under check: build it at any width and dtype, with random weights."""

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
WITHOUT_BIAS = "without a bias, "  # begins what is said of a norm that raises without one


class Mismatch(Exception):
    """The output cannot be compared: another shape, dtype or device, no gradient, finite for NaN. The case fails."""


class Unsupported(Exception):
    """The norm does not support this, and GPT-2 does not need it. The case is not judged, and does not fail."""


class Candidate:
    """A norm that is built, with its weights.

    Attributes:
        module: the norm, in eval mode.
        weight, bias: its Parameters; bias is None if it is built without one.
        eps: the eps that it must have.
    """

    def __init__(
        self, module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, name: str = "it"
    ) -> None:
        self.module, self.weight, self.bias, self.eps, self.name = module, weight, bias, eps, name

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its weight and, if it has one, its bias, by name."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def __call__(self, x: Tensor, *, dtypes: Sequence[torch.dtype] = ()) -> Tensor:
        """Return the norm of ``x``, which must have the same shape, device and dtype (or one of ``dtypes``).

        Raises:
            Mismatch: if it has not.
            Unsupported: if the input is float64 and the norm raises.
        """
        try:
            y = self.module(x)
        except RAISED as error:
            if _is_mismatch(error):
                raise Mismatch(str(error)) from error
            if x.dtype == torch.float64:
                raise Unsupported(f"it refuses float64: {described(error)}") from error
            if isinstance(error, NormError):  # the adapter has explained it
                raise
            given = f"an input of {tuple(x.shape)} in {dtype_name(x.dtype)}"
            raise NormError(f"{self.name} raised {last_line(error)} on {given}") from error
        _require_alike(self.name, y, x, dtypes or (x.dtype,))
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

    def ways(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return the ways in which a model calls the norm: alone and, if it adds the residual too, through add_norm."""
        alone: dict[str, Callable[[Tensor], Tensor]] = {"": self}
        added = {", in add_norm": partial(norm_by_addition, self.add_norm)}
        return alone | (added if own_addition(self.module) else {})

    def reference(self, x: Tensor) -> Tensor:
        """Return PyTorch's own layer_norm of ``x`` with the same weights."""
        wide = x.to(
            torch.promote_types(x.dtype, self.weight.dtype)
        )  # outside autocast, CUDA's layer_norm needs one dtype
        return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)

    def truth(self, x: Tensor) -> Truth:
        """Return LayerNorm of ``x`` in float64 with the same weights, and the bound on rounding; on the CPU."""
        return truth(x, self.weight, self.bias, self.eps)

    def gradient_truth(self, x: Tensor, dy: Tensor) -> dict[str, Truth]:
        """Return the gradients of that for an incoming ``dy``, by name; both arguments are (rows, width)."""
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
        shape: int | tuple[int, ...] = 64,
        dtype: torch.dtype = torch.float32,
        *,
        eps: float = EPS,
        bias: bool = True,
        weights: Callable[[int, Generator], Weights] = ordinary_weights,
    ) -> Candidate:
        """Build the norm over ``shape`` with ``weights(width, generator)``, rounded to ``dtype``.

        Sets the Parameters ``weight`` and ``bias``, as ``swap_norms`` does.

        Raises:
            NormError: if it cannot be built.
        """
        module: Any = norms.build(self.norm, shape, eps=eps, bias=bias)
        sizes = (shape,) if isinstance(shape, int) else shape
        scale, shift = weights(torch.Size(sizes).numel(), self.generator)
        module.weight = nn.Parameter(self.put(scale.view(sizes), dtype))
        module.bias = nn.Parameter(self.put(shift.view(sizes), dtype)) if bias else None
        with naming(module):
            module = module.to(device=self.device, dtype=dtype).eval()
        return Candidate(module, module.weight, module.bias, eps, self.name)

    def without_bias(self, width: int) -> Candidate:
        """Build the norm without a bias.

        Raises:
            Unsupported: if it cannot be built, or raises although it does not raise with a bias. Every GPT-2 has one.
        """
        try:
            candidate = self.candidate(width, bias=False)
        except NormError as error:
            raise Unsupported(f"it cannot be built without a bias: {error}") from error
        x = self.rows(12, width)
        error = _raised(candidate.module, x)
        if error and not _raised(self.candidate(width).module, x):
            raise Unsupported(f"{WITHOUT_BIAS}{described(error)}") from error
        return candidate

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ordinary rows of this shape, (..., width), on the device."""
        return self.put(ordinary(math.prod(shape[:-1]), shape[-1], self.generator), dtype).view(shape)

    def put(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Round a float64 tensor to ``dtype``, and move it to the norm's device."""
        return tensor.to(device=self.device, dtype=dtype)

    def require_judgeable(self) -> None:
        """Check that the norm can be built in two widths, and runs on 4 rows of 64 float32 numbers.

        Raises:
            NormError: if it cannot be built, or raises.
        """
        candidate, _ = self.candidate(64), self.candidate(768)
        x = self.put(torch.randn(4, 64, generator=self.generator))
        if error := _raised(candidate.module, x):
            said = described(error)
            if not _raised(candidate.module, x[None]):
                said += "; it takes only (batch, sequence, width), but the check needs (rows, width) as well"
            raise NormError(f"norm {self.name!r} cannot be judged: {said}") from error

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
    """Return one line: what was raised and where, or the adapter's own explanation."""
    return str(error) if isinstance(error, NormError) else last_line(error)


@torch.no_grad()
def _raised(module: nn.Module, x: Tensor) -> BaseException | None:
    """Return what the norm raises for ``x``. An output unlike its input is no exception of the norm."""
    try:
        module(x)
    except RAISED as error:
        return None if _is_mismatch(error) else error
    return None


def _is_mismatch(error: BaseException) -> bool:
    """Return True if the norm ran, but its adapter refused its output."""
    said = str(error)
    return isinstance(error, NormError) and (" went in, " in said or " returns a " in said)


def _require_alike(name: str, y: object, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(y, Tensor):
        raise Mismatch(f"{name} returns a {type(y).__name__}, where a norm returns one tensor")
    if y.shape != x.shape:
        raise Mismatch(f"{name} changes the shape: {tuple(x.shape)} went in, {tuple(y.shape)} came out")
    if y.device != x.device:
        raise Mismatch(f"{name} changes the device: {x.device} went in, {y.device} came out")
    if y.dtype not in dtypes:
        raise Mismatch(f"{name} changes the dtype: {x.dtype} went in, {y.dtype} came out")
