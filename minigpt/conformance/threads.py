"""One thread, where more would only wait."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread. As a decorator: the function does.

    After each operation PyTorch's other threads spin for milliseconds, which is most of a check's processor time. The
    kit's own arithmetic is in here. So is the norm, but for the cases that are about threads: ``Case.is_threaded``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
