"""The norm under check: how to build it, how it is called, and its random numbers."""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from minigpt.conformance.compare import Outcome, compare
from minigpt.conformance.truth import ORDINARY, PERIOD, RowKind, TrueValues, Weights, gradient_truth, truth
from minigpt.errors import NormError, raised
from minigpt.machine import on_threads, one_thread
from minigpt.norms.foreign.adapt import AdaptedNorm
from minigpt.norms.foreign.arrays import array_function, lacks_gradients
from minigpt.norms.foreign.builder import Builder, is_ours
from minigpt.norms.foreign.construct import construct, naming, require_same_shape, title
from minigpt.norms.formulas import GPT2_EPS
from minigpt.norms.registry import NormSpec
from minigpt.precision import DTYPES, dtype_name

OTHER_EPS = 1e-3  # one that GPT-2 does not have
NEEDED = (64, 768, 1024, 1280, 1600)  # widths of GPT-2s; a norm may refuse others


class Unsupported(NormError):
    """The norm does not support this, and GPT-2 does not need it. The case is not judged, and does not fail."""


class Built:
    """A norm that is built, in eval mode, with its weights.

    While it runs, no truth is in memory, where its code could look for it: a case computes the truth after its last
    call.

    Attributes:
        takes_dtype: False if it raises for any rows of its Parameters' dtype.
        adapted: the wrapper around somebody else's module; None for a norm that is used as it is.
        foreign: the module without what was put around it: its class is what a message names.
        rounds_row: if scale or shift may be applied to a rounded row, by the wrapper or in an RMSNorm like Llama's.
    """

    def __init__(self, module: Any, subject: "Subject", eps: float, takes_dtype: bool) -> None:
        self.module, self.subject = module, subject
        self.eps, self.takes_dtype = eps, takes_dtype
        self.adapted = module if isinstance(module, AdaptedNorm) else None
        self.foreign: nn.Module = self.adapted.norm if self.adapted else module
        self.lacks_gradients = lacks_gradients(self.foreign)
        self.rounds_row = not subject.centers
        if self.adapted and (self.adapted.multiplies or self.adapted.adds):
            self.rounds_row = True

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
        with one_thread():
            x.new_full(x.shape, torch.nan)  # in free memory: what a norm does not write is then no earlier result
        try:
            y = self.call(x)
        except NormError as error:
            if self._refuses_width_of(x):
                raise Unsupported(str(error)) from error
            raise
        require_same_shape(y, x, self.foreign)
        if y.dtype not in (x.dtype, *dtypes):
            raise NormError(f"{self.subject.name} changes the dtype: {x.dtype} went in, {y.dtype} came out")
        return y

    def call(self, x: Tensor) -> Any:
        """Return what the module returns for ``x``.

        Raises:
            NormError: if it raises; the message names it and its input.
        """
        name = f"{self.subject.name}, given {tuple(x.shape)} in {dtype_name(x.dtype)},"
        with naming(self.foreign, name), on_threads(self.subject.threads):
            return self.module(x)

    def _refuses_width_of(self, x: Tensor) -> bool:
        """Return True if the norm raises for two rows of a width that no GPT-2 has."""
        width = x.shape[-1]
        if width in NEEDED or not self.takes_dtype:
            return False
        try:
            self.module(x.new_ones(2, width))
        except raised():
            return True
        return False

    def in_float32(self) -> "Built":
        """Return a norm with the same scale and shift in float32."""
        scale, shift = self.module.weight, self.module.bias
        return self.subject.candidate(len(scale), weights=lambda *_: (scale, shift))

    def compared(self, inputs: Iterable[tuple[str, Tensor]]) -> list[Outcome]:
        """Compare the norm of each input with the truth. One may be an earlier one whose numbers have changed."""
        calls = []
        for what, x in inputs:
            rows = first_rows(x).clone()  # the norm may write into its input
            calls.append((what, rows, self(x).clone()))
        return [compare(what, y, *self.truth(rows)) for what, rows, y in calls]

    def truth(self, x: Tensor, roundings: int | None = None) -> TrueValues:
        """Return the norm of the first rows of ``x`` in float64 with the same weights, and the bound on rounding."""
        bias = self.module.bias
        if self.rounds_row:  # the row, its product with the scale, and that plus the shift
            roundings = 2 if bias is None else 3
        rows = first_rows(x)
        return truth(rows, self.module.weight, bias, self.eps, centers=self.subject.centers, roundings=roundings)

    def gradient_truth(self, x: Tensor, dy: Tensor, rows: int | None = None) -> dict[str, TrueValues]:
        """Return the gradients of that for an incoming ``dy``, by name.

        Args:
            rows: how many rows repeat the rows of ``x`` and ``dy``; by default no more.
        """
        return gradient_truth(x, self.module.weight, self.eps, dy, centers=self.subject.centers, rows=rows)


def first_rows(x: Tensor) -> Tensor:
    """Return the rows (at most PERIOD, width) that a longer input repeats; a shorter one as it is."""
    if x[..., 0].numel() <= PERIOD:
        return x
    return x.reshape(-1, x.shape[-1])[:PERIOD]


def repeat_rows(rows: Tensor, count: int) -> Tensor:
    """Return ``count`` rows that repeat the first ``PERIOD``; no more than these as they are."""
    if count <= PERIOD:
        return rows
    return rows.repeat(math.ceil(count / PERIOD), 1)[:count]


class Subject:
    """The norm under check: how to build it, and its random numbers.

    Args:
        norm: what ``norms.build`` takes.
        device: where it is built and runs.
        seed: of all random numbers.
        kind: what it should be: "layer_norm" or "rms_norm".
        builder: builds it; by default a new one.

    Attributes:
        array_function: the norm as a function of arrays of another package than PyTorch; None if it is none.
        has_few_shapes: whether its package compiles each operation again for each shape, so that it is asked few.
        repeats_bits: whether a row must have the same bits alone as among others. PyTorch's and NumPy's sums keep them;
            other packages choose another order of sums for another shape.
        raises: by dtype, what it raises for any rows of it.
        threads: on how many threads of PyTorch it runs; None for as many as PyTorch has.
    """

    def __init__(
        self,
        norm: NormSpec,
        device: torch.device,
        seed: int = 0,
        kind: str = "layer_norm",
        builder: Builder | None = None,
    ) -> None:
        self.name = norm if isinstance(norm, str) else title(norm)
        self.device, self.seed, self.kind = device, seed, kind
        self.builder = builder or Builder(norm)
        self.centers = kind == "layer_norm"  # whether it should subtract the mean
        function = array_function(self.builder.make)
        package = "torch" if function is None else function.package.name
        self.array_function = None if package == "torch" else function
        self.has_few_shapes = self.array_function is not None and self.array_function.package.compiles_by_shape
        self.repeats_bits = package in ("torch", "numpy")
        self.raises: dict[torch.dtype, str] = {}
        self.generator = Generator()
        self.drawing_for("")

    def drawing_for(self, purpose: str, threads: int | None = None) -> "Subject":
        """Draw the random numbers for a purpose from here on, so that no case depends on earlier cases."""
        self.generator.manual_seed(zlib.crc32(f"{self.seed} {purpose}".encode()))
        self.threads = threads
        return self

    def try_dtypes(self) -> None:
        """Find what it raises for two plain rows of each dtype."""
        for dtype in DTYPES.values():
            try:
                norm = self.drawing_for("a first call").candidate(64, dtype)
                with torch.no_grad():
                    norm.call(self.put(torch.ones(2, 64), dtype))
            except raised() as error:
                self.raises[dtype] = str(error)

    def candidate(
        self,
        width: int = 64,
        dtype: torch.dtype = torch.float32,
        *,
        eps: float = GPT2_EPS,
        bias: bool = True,
        weights: Callable[[int, Generator], Weights] = ORDINARY.weights,
    ) -> Built:
        """Build the norm over ``width`` with ``weights(width, generator)``, rounded to ``dtype``.

        Sets the Parameters ``weight`` and ``bias``, as ``swap_norms`` does.

        Raises:
            NormError: if it cannot be built.
        """
        try:
            module: Any = self.builder.build(width, eps=eps, bias=bias)
        except NormError as error:
            if width in NEEDED:
                raise
            raise Unsupported(str(error)) from error
        scale, shift = weights(width, self.generator)
        module.weight = nn.Parameter(self.put(scale, dtype))
        module.bias = nn.Parameter(self.put(shift, dtype)) if bias else None
        with naming(module):
            module = module.to(device=self.device, dtype=dtype).eval()
        return Built(module, self, eps, takes_dtype=dtype not in self.raises)

    @one_thread()
    def rows(self, *shape: int, dtype: torch.dtype = torch.float32, kind: RowKind = ORDINARY) -> Tensor:
        """Return rows of a kind in this shape, (..., width), on the device; they repeat after ``PERIOD``."""
        count = math.prod(shape[:-1])
        x = self.put(kind.rows(count, shape[-1], self.generator, dtype), dtype)
        return repeat_rows(x, count).view(shape)

    def put(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Round a float64 tensor to ``dtype``, and move it to the norm's device."""
        return tensor.to(device=self.device, dtype=dtype)

    @torch.no_grad()
    def ask(
        self,
        x: Tensor,
        scale: float | Tensor = 1.0,
        shift: float | Tensor = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return the norm of ``x`` (..., C) in float64 on the CPU; scale and shift are numbers or (C,) tensors."""
        blank = torch.ones(x.shape[-1], dtype=torch.float64)
        weights = blank * scale, blank * shift
        norm = self.candidate(x.shape[-1], dtype, weights=lambda width, generator: weights)
        return norm(self.put(x, dtype).clone()).cpu().double()  # a clone: it may be written into

    @property
    def takes_eps(self) -> bool:
        """True if its constructor, or its function, takes an eps."""
        make = self.builder.make
        function = array_function(make)
        if function is not None:
            return "eps" in function.roles
        if is_ours(getattr(make, "func", make)):
            return True
        return construct(make, (64,), eps=OTHER_EPS, bias=True).call.takes_eps
