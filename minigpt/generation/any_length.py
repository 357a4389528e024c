"""Attention without kernels that prepare for each length, since a text has a new length at every token."""

import contextlib
import threading
from collections.abc import Iterator

from torch.backends import cuda

_lock = threading.Lock()
_found: list[bool] = []  # for each caller, whether it found cuDNN enabled; the first value is restored


@contextlib.contextmanager
def of_any_length() -> Iterator[None]:
    """Disable cuDNN's attention, which makes a slow plan for every new length.

    It stays enabled if no other kernel could replace it, as under ``sdpa_kernel`` for cuDNN alone. The setting belongs
    to the process: the last of several threads restores it.
    """
    with _lock:
        _found.append(cuda.cudnn_sdp_enabled())
        cuda.enable_cudnn_sdp(_found[0] and not cuda.math_sdp_enabled())
    try:
        yield
    finally:
        with _lock:
            was = _found[0]
            _found.pop()
            if not _found:
                cuda.enable_cudnn_sdp(was)
