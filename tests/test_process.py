"""A process of ours keeps the memory that it frees, and few of the programs that oneDNN compiles."""

import ctypes
import os
from types import SimpleNamespace

import pytest

from minigpt.device import ENVIRONMENT, settle_memory


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What glibc's allocator is told, in place of telling it: this process is the tests' own."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *what: told.append(what)))
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)
    return told


def test_no_piece_is_so_large_that_it_is_given_back(allocator: list[tuple[int, int]]) -> None:
    settle_memory()
    assert allocator == [(-1, 2**30), (-3, 2**30)]
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
