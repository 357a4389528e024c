"""Names of dtypes and devices: the known ones resolve, the others are refused with the way out."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minigpt import ConfigError
from minigpt.device import resolve_device
from minigpt.machine import ENVIRONMENT, settle_memory
from minigpt.precision import DTYPES, dtype_name, resolve_dtype


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_a_dtype_by_its_name_and_as_itself(name: str, dtype: torch.dtype) -> None:
    assert resolve_dtype(name) is dtype
    assert resolve_dtype(dtype) is dtype
    assert dtype_name(dtype) == name


@pytest.mark.parametrize("dtype", ["fp16", "half", "torch.float32", "Float32", "", torch.int8, torch.complex64, 32])
def test_an_unknown_dtype_lists_the_known(dtype: object) -> None:
    with pytest.raises(ConfigError, match=r"^dtype must be float32 or bfloat16 or float16 or float64, got "):
        resolve_dtype(dtype)


@pytest.mark.parametrize("device", ["gpu", "CPU", "", "cuda:x", "cuda:-1", 1.5])
def test_an_unknown_device_lists_the_known(device: object) -> None:
    with pytest.raises(ConfigError, match=r"^unknown device .*; known are cpu, cuda, cuda:N, mps and meta$"):
        resolve_device(device)


@pytest.mark.parametrize(("count", "device"), [(0, "cuda"), (0, torch.device("cuda", 3)), (2, "cuda:2"), (0, "fpga")])
def test_a_device_that_is_not_there(count: int, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"^device '{device}' is not on this machine, where PyTorch sees {count}"):
        resolve_device(device)
    assert count == 0 or resolve_device("cuda:1") == torch.device("cuda", 1)


def test_no_piece_of_memory_is_so_large_that_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *what: told.append(what)))
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)
    settle_memory()
    assert told == [(-1, 2**30), (-3, 2**30)]
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
