"""Attention by kernels that are ready for every length, since a text has another at every token."""

import contextlib
import threading
from collections.abc import Iterator

from torch.backends import cuda

_lock = threading.Lock()
_found: list[bool] = []  # for each that is at work, whether it found cuDNN permitted: the first is what is put back


@contextlib.contextmanager
def of_any_length() -> Iterator[None]:
    """Without cuDNN's attention, which makes a plan for every length it meets, and takes much longer for that.

    Where nobody could take its place, as under ``sdpa_kernel`` for it alone, it stays. The setting is the process's: of
    several threads at work, the last puts it back.
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
