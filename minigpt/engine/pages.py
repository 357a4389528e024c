"""Give back the pages of a mapped file once they have been copied, so that file and copy are not in memory together.

This works on Linux. Elsewhere the system takes such pages when it runs out of others.
"""

import ctypes
import mmap
import re
from functools import cached_property
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/smaps")
# A private mapping of a file: its first and last address, and the kilobytes in memory and on disk that differ from it.
MAPPED = re.compile(
    rb"^(\w+)-(\w+) ...p \S+ \S+ [1-9].*\n(?:[A-Z].*\n)*?Anonymous: +(\d+) kB\n(?:[A-Z].*\n)*?Swap: +(\d+) kB$",
    re.MULTILINE,
)


class MappedFiles:
    """The files that are mapped into this process, as of the first call; later tensors must not be passed."""

    def give_back(self, original: Tensor, copy: Tensor | None = None) -> None:
        """Give back the pages of a tensor that is part of a file, unless ``copy`` shares them.

        A later access to the original reads them again. Pages that were written to stay.
        """
        lies_at, size = original.untyped_storage().data_ptr(), original.untyped_storage().nbytes()
        start, end = -(-lies_at // mmap.PAGESIZE) * mmap.PAGESIZE, (lies_at + size) // mmap.PAGESIZE * mmap.PAGESIZE
        is_copied = copy is None or copy.is_meta or copy.untyped_storage().data_ptr() != lies_at
        if is_copied and start < end and any(low <= start and end <= high for low, high in self._ranges):
            advise = ctypes.CDLL(None).madvise
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """First and last address of every private mapping that is as its file; anything else would be lost."""
        found = MAPPED.findall(MAPS.read_bytes()) if MAPS.exists() else []
        return [(int(low, 16), int(high, 16)) for low, high, *changed in found if not any(map(int, changed))]
