"""What somebody else's code changes in the process is undone and named."""

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import minigpt
from minigpt.watch import changed_on_import, watched

CHANGES: dict[str, Callable[[], object]] = {
    "torch.nn.functional.gelu": lambda: setattr(F, "gelu", F.relu),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("meta"),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic mode": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "whether gradients are recorded": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "the precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "the working directory": lambda: os.chdir("/"),
    "the seed of PyTorch's random numbers": lambda: torch.manual_seed(17),
}


def state() -> tuple[object, ...]:
    """What the changes above change."""
    settings = (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), os.getcwd())
    modes = (torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    return (F.gelu, *settings, *modes, torch.initial_seed(), torch.get_float32_matmul_precision())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named_and_undone_also_by_an_error(change: str) -> None:
    before = state()
    with contextlib.suppress(ZeroDivisionError), watched() as changes:
        CHANGES[change]()
        raise ZeroDivisionError
    assert changes == [change]
    assert state() == before


def test_drawing_numbers_is_undone_and_no_mistake() -> None:
    drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    with watched() as changes:
        expected = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    assert changes == []
    assert [torch.rand(1).item(), random.random(), float(np.random.rand())] == expected != drawn


def test_a_file_is_remembered_for_what_it_changed_when_it_was_imported(tmp_path: Path) -> None:
    file = tmp_path / "replaces.py"
    file.write_text(
        "import torch\ntorch.nn.functional.softmax = torch.sigmoid\ntorch.set_num_threads(3)\n"
        "class Norm(torch.nn.LayerNorm): pass\n"
    )
    before = F.softmax, torch.get_num_threads()
    for _ in range(2):
        norm = minigpt.norms.build(f"{file}:Norm", 8)
        assert changed_on_import(norm) == ("torch.nn.functional.softmax", "the number of threads")
    assert (F.softmax, torch.get_num_threads()) == before
    assert changed_on_import(minigpt.norms.build("textbook", 8)) == ()
