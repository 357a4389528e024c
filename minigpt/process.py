"""Settings of the whole process. The project's programs make them when they begin; importing never does."""

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt: the largest piece that it does not give back at once
ENVIRONMENT = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
    "THP_MEM_ALLOC_ENABLE": "1",
}


def settle_memory() -> None:
    """Keep freed memory, use large pages for tensors, and limit the programs that oneDNN keeps.

    On Linux with glibc, freed memory stays with the process. Otherwise the next layer asks the system for the same
    pages again, which takes a tenth of the time of a long prompt. PyTorch's large tensors get pages of 2 MiB, which
    were read up to 1.7 times as fast as pages of 4 KiB. oneDNN keeps its compiled programs for 32 shapes, and not for
    every length of a prompt. Variables that the environment already has keep their values. Call it before the first
    tensor.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with contextlib.suppress(TypeError, AttributeError, OSError):  # another system, another library
        mallopt = ctypes.CDLL(None).mallopt
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(threshold, 2**30)
