"""Memory that is freed stays the process's own, so that it is not fetched and cleared again for each tensor."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT = 2**31 - 1  # bytes
LARGEST_BLOCK = 32 * 2**20  # bytes: what glibc's own threshold grows to at most


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the process during the block, and give it back at the end.

    By default glibc gives each block of more than 32 MB back to the system when it is freed. The next tensor of that
    size then costs a page fault for each 4 kB, which takes longer than a norm of it. Does nothing without glibc.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_BLOCK)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library of the process if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc
