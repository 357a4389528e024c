"""Dtypes, and how precise a float32 product is."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minigpt.choices import DTYPE_NAMES, check_option

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
HALVES = (torch.bfloat16, torch.float16)
BELOW_FLOAT64 = (torch.float32, torch.float16, torch.bfloat16)
_backends: Any = torch.backends
_PRODUCTS = (_backends.cuda.matmul, _backends.mkldnn.matmul)


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype of a name; None, "the checkpoint's own", stays None.

    Raises:
        ConfigError: if the dtype is not one of float32, bfloat16, float16 and float64.
    """
    if dtype is not None and dtype not in DTYPES.values():
        check_option("dtype", dtype, DTYPE_NAMES)
    if isinstance(dtype, str):
        return DTYPES[dtype]
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def product_precision() -> tuple[str | None, ...]:
    """Return how precise float32 products are: PyTorch's old setting, and its new ones on a GPU and a CPU.

    The old one is None while it differs from the new ones, since it cannot be read then.
    """
    older = None
    with contextlib.suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    return older, *(backend.fp32_precision for backend in _PRODUCTS)


def set_product_precision(precisions: tuple[str | None, ...]) -> None:
    """Restore what ``product_precision`` returned."""
    older, *newer = precisions
    if older is None:
        older = "high" if newer[0] == "tf32" else "highest"
    torch.set_float32_matmul_precision(older)
    for backend, precision in zip(_PRODUCTS, newer, strict=True):
        backend.fp32_precision = precision


@contextlib.contextmanager
def full_products() -> Iterator[None]:
    """Compute float32 products in full: no TF32 on a GPU, no bfloat16 on a CPU, no autocast on either."""
    before = product_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        set_product_precision(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Make tensors in a dtype, whatever default a training script has set in the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Float64(TorchFunctionMode):
    """Computes in float64 in the block what a float64 model asks to compute in a narrower dtype.

    RMSNorms, softmaxes and rotary embeddings of transformers cast to float32 whatever the dtype of the model.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        options = {name: _in_float64(value) for name, value in (kwargs or {}).items()}
        return func(*map(_in_float64, args), **options)


def _in_float64(argument: Any) -> Any:
    if isinstance(argument, torch.dtype) and argument in BELOW_FLOAT64:
        return torch.float64
    return argument


def cut(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round towards zero: the bits that a narrower format lacks are left out."""
    y = x.to(dtype)
    inside = torch.nextafter(y, torch.zeros_like(y))
    return torch.where(y.to(x.dtype).abs() > x.abs(), inside, y).to(x.dtype)
