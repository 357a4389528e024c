"""PyTorch's settings of precision for the whole process."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_products() -> Iterator[None]:
    """Compute float32 products in full: no TF32 on a GPU, no bfloat16 on a CPU, no autocast on either.

    PyTorch has an old and a new setting for this. Reading the old one raises an error while the two differ.
    """
    backends: Any = torch.backends
    products = [backends.cuda.matmul, backends.mkldnn.matmul]
    newer, older = [backend.fp32_precision for backend in products], None
    with contextlib.suppress(RuntimeError):  # the two differ already
        older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(older or ("high" if newer[0] == "tf32" else "highest"))
        for backend, precision in zip(products, newer, strict=True):
            backend.fp32_precision = precision
