"""Settings of the whole process, made where a program of ours begins, and never by an import."""

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt: the largest piece that it does not give back at once
CACHED_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}


def settle_memory() -> None:
    """Keep freed memory, and oneDNN's compiled programs for a few shapes only.

    On Linux with glibc, memory that is freed stays with the process: its pages would be asked for anew at the next
    layer, which takes a tenth of the time of a long prompt. And oneDNN, before anything has been computed, is told to
    keep its programs for few shapes, and not for every length of a prompt there has been; where the environment says
    for how many, it is left at that.
    """
    for capacity, shapes in CACHED_SHAPES.items():
        os.environ.setdefault(capacity, shapes)
    with contextlib.suppress(TypeError, AttributeError, OSError):  # another system, another library
        mallopt = ctypes.CDLL(None).mallopt
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(threshold, 2**30)
