"""A file that is cast or transposed takes little more memory than its size: what has been copied is given back."""

import ctypes
import gc
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, reference, saved
from foreign import WRITERS

import minigpt

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak")

DEEP = dict(n_layer=12, n_embd=256, activation_function="gelu")  # 38 MB, and no tensor above 1 MB


@pytest.fixture(scope="module")
def fast() -> Iterator[Path]:
    """A folder in memory where there is one: a slow disk would be waited for."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "bin, before 1.6", "nanoGPT", "OpenAI"])
def test_a_copy_and_what_is_copied_are_not_held_together(fast: Path, kind: str, dtype: str | None) -> None:
    folder, model = fast / f"deep {kind}", reference(**TINY | DEEP)
    if not folder.exists():
        WRITERS[kind](model, folder) if kind in WRITERS else saved(model, folder)
    file = max((path for path in folder.iterdir()), key=lambda path: path.stat().st_size)
    size = file.stat().st_size / 2**20
    grown, outcome = in_a_process(file if kind in ("nanoGPT", "OpenAI") else folder, dtype)
    print(f"{outcome}: {grown:.1f} MB, bound {1.25 * size:.1f} MB, file {size:.1f} MB")
    assert outcome == "loaded"
    assert grown <= 1.25 * size


def in_a_process(place: Path, dtype: str | None) -> tuple[float, str]:
    """By how many MB the most memory of a process grows that reads this, and what came of it.

    It has read it once before, so that the pages of the libraries' own code are not counted.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_read, args=(place, dtype, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _read(place: Path, dtype: str | None, report: Connection) -> None:
    torch.set_num_threads(1)  # for a forked process has none of the threads that it would wait for
    minigpt.from_pretrained(place, device="cpu", dtype=dtype)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # what the process has had at most is forgotten
    before, outcome = peak_mb(), "loaded"
    try:
        minigpt.from_pretrained(place, device="cpu", dtype=dtype)
    except minigpt.MiniGPTError as error:
        outcome = str(error)
    report.send((peak_mb() - before, outcome))


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1024
