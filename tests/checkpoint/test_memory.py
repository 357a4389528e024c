"""Reading a file takes no more memory than twice its size, also where it is found to be damaged or another model's.

And a whole one, cast or transposed on its way, little more than its size: what has been copied is given back at once.
"""

import ctypes
import gc
import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, reference, saved
from foreign import WRITERS, write_openai, write_pickle

import minigpt

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak")

WIDE = dict(vocab_size=90_000, n_embd=64)
DEEP = dict(n_layer=12, n_embd=256, activation_function="gelu")  # 38 MB, and no tensor above 1 MB


@pytest.fixture(scope="module")
def fast() -> Iterator[Path]:
    """A folder in memory where there is one: a slow disk would be waited for."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def wholes(fast: Path) -> dict[str, Path]:
    """The same model of 23 MB in each kind of file."""
    model = reference(**TINY | WIDE)
    return {
        "safetensors": saved(model, fast / "single") / "model.safetensors",
        "bin": write_pickle(model, fast / "bin") / "pytorch_model.bin",
        "bin, before 1.6": write_pickle(model, fast / "legacy", legacy=True) / "pytorch_model.bin",
        "npz": write_openai(model, fast / "openai"),
    }


def whole(file: Path) -> None:
    pass


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)


def changed(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\xff\0\xff\0")


def misfit(file: Path) -> None:
    name, field = ("hparams.json", "n_vocab") if file.suffix == ".npz" else ("config.json", "vocab_size")
    config = file.with_name(name)
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: 90_001}))


@pytest.mark.parametrize("damage", [whole, cut, changed, misfit])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "bin, before 1.6", "npz"])
def test_no_more_than_twice_the_file(
    wholes: dict[str, Path], fast: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    shutil.rmtree(fast / "model", ignore_errors=True)
    shutil.copytree(wholes[kind].parent, fast / "model")
    file = fast / "model" / wholes[kind].name
    damage(file)
    size = file.stat().st_size / 2**20
    grown, outcome = in_a_process(file if kind == "npz" else file.parent)
    print(f"{outcome}: {grown:.1f} MB, bound {2 * size:.1f} MB, file {size:.1f} MB")
    assert grown <= 2 * size
    assert outcome == "loaded" or damage is not whole


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "bin, before 1.6", "nanoGPT", "OpenAI"])
def test_a_copy_and_what_is_copied_are_not_held_together(fast: Path, kind: str, dtype: str | None) -> None:
    folder, model = fast / f"deep {kind}", reference(**TINY | DEEP)
    if not folder.exists():
        WRITERS[kind](model, folder) if kind in WRITERS else saved(model, folder)
    file = max((path for path in folder.iterdir()), key=lambda path: path.stat().st_size)
    size = file.stat().st_size / 2**20
    grown, outcome = in_a_process(file if kind in ("nanoGPT", "OpenAI") else folder, warm=True, dtype=dtype)
    print(f"{outcome}: {grown:.1f} MB, bound {1.25 * size:.1f} MB, file {size:.1f} MB")
    assert outcome == "loaded"
    assert grown <= 1.25 * size


def in_a_process(place: Path, *, warm: bool = False, **how: Any) -> tuple[float, str]:
    """By how many MB the most memory of a process grows that reads this, and what came of it.

    One that is warm has read it once before, so that the pages of the libraries' own code are not counted.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_read, args=(place, warm, how, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _read(place: Path, warm: bool, how: dict[str, Any], report: Connection) -> None:
    torch.set_num_threads(1)  # for a forked process has none of the threads that it would wait for
    if warm:
        minigpt.from_pretrained(place, device="cpu", **how)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # what the process has had at most is forgotten
    before, outcome = peak_mb(), "loaded"
    try:
        minigpt.from_pretrained(place, device="cpu", **how)
    except minigpt.MiniGPTError as error:
        outcome = str(error)
    report.send((peak_mb() - before, outcome))


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1024
