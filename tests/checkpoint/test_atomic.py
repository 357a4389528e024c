"""A folder is replaced at one moment: whenever it is killed, it is the old or the new, and what is not ours stays."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import reference, saved
from transformers import AutoModelForCausalLM

import minigpt
from minigpt.checkpoint import atomic
from minigpt.checkpoint.atomic import replacing

KILLS = 50


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fill(folder: Path, **contents: str) -> None:
    for name, text in contents.items():
        (folder / name.replace("_", ".")).write_text(text)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    fill(folder, config_json="old", model_safetensors="old", README_md="mine")
    return folder


def save(folder: Path, **contents: str) -> None:
    with replacing(folder) as new:
        fill(new, **contents)


NEW = dict(config_json="new", model_safetensors="new")
WANTED = {"config.json": b"new", "model.safetensors": b"new", "README.md": b"mine"}


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    with replacing(tmp_path / "a" / "b") as new:
        fill(new, config_json="new")
        assert not (tmp_path / "a" / "b").exists()
    assert files(tmp_path / "a" / "b") == {"config.json": b"new"}
    assert os.listdir(tmp_path / "a") == ["b"]


def test_the_old_is_there_until_the_end_and_what_is_not_ours_stays(old: Path, tmp_path: Path) -> None:
    """Nor do shards of the old, and what a killed process has left."""
    fill(old, **{"model-00001-of-00002_safetensors": "old", "model_safetensors_index_json": "old"})
    (tmp_path / ".model.being-saved").mkdir()
    before, folder = files(old), old.stat().st_ino
    with replacing(old) as new:
        fill(new, **NEW)
        assert files(old) == before
    assert files(old) == WANTED
    assert old.stat().st_ino != folder, "no file of it was exchanged by itself"
    assert os.listdir(tmp_path) == ["model"]


def test_an_error_leaves_everything_as_it_was(old: Path, tmp_path: Path) -> None:
    before = files(old)

    def fail() -> None:
        with replacing(old) as new:
            fill(new, **NEW)
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fail()
    assert files(old) == before
    assert os.listdir(tmp_path) == ["model"]


def no_exchange(monkeypatch: pytest.MonkeyPatch, old: Path) -> None:
    monkeypatch.setattr(atomic, "_exchanged", lambda *_: False)


def a_folder_inside(monkeypatch: pytest.MonkeyPatch, old: Path) -> None:
    (old / "runs").mkdir()


def the_working_directory(monkeypatch: pytest.MonkeyPatch, old: Path) -> None:
    monkeypatch.chdir(old)


OBSTACLES: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "no such call": no_exchange,
    "a folder in it": a_folder_inside,
    "the working directory": the_working_directory,
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("shape", ["same", "other"])
def test_files_are_moved_in_where_folders_cannot_be_exchanged(
    old: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str, shape: str
) -> None:
    """And at no moment do an old and a new file stand together as one checkpoint; shards of the old go."""
    fill(old, **{"model-00001-of-00002_safetensors": "old", "model_safetensors_index_json": "old"})
    OBSTACLES[obstacle](monkeypatch, old)
    config, before = "old" if shape == "same" else "new", old.stat().st_ino
    replace, seen = Path.replace, []

    def watched(source: Path, target: Path) -> None:
        replace(source, target)
        seen.append(tuple((old / name).read_text() if (old / name).exists() else None for name in
                          ("config.json", "model.safetensors")))  # fmt: skip

    monkeypatch.setattr(Path, "replace", watched)
    save(old, config_json=config, model_safetensors="new")
    assert {path.name: path.read_bytes() for path in old.iterdir() if path.is_file()} == WANTED | {
        "config.json": config.encode()
    }
    assert seen
    assert set(seen) <= {(None, "new"), (config, "new")}
    assert old.stat().st_ino == before, "it is the folder that it was"
    assert not list(old.parent.glob(".*"))


def test_a_link_to_a_folder_stays_a_link(old: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(old)
    save(tmp_path / "latest", **NEW)
    assert (tmp_path / "latest").is_symlink()
    assert files(old) == WANTED


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a slow disk would be waited for, and the first save never be over."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.thorough
def test_killed_at_fifty_random_moments(tmp_path: Path, fast: Path) -> None:
    """The old checkpoint or the new is there each time, whole; the two differ in their shape, and one is sharded."""
    theirs = [reference(), reference(seed=1, n_layer=1, n_embd=64)]
    sources = [saved(model, tmp_path / f"source {number}") for number, model in enumerate(theirs)]
    place, chance, found = fast / "out", random.Random(0), [0, 0]
    minigpt.save_pretrained(minigpt.from_pretrained(sources[0], device="cpu"), place)
    savers = Savers(place, sources)
    for _ in range(KILLS):
        savers.kill_one_after(chance.uniform(0, 3) * savers.seconds_for_both)
        model = minigpt.from_pretrained(place, device="cpu")
        which = 0 if model.config.n_layer == 2 else 1
        expected = {name.removeprefix("transformer."): tensor for name, tensor in theirs[which].state_dict().items()}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        found[which] += 1
    print(f"of {KILLS} kills, {found[0]} left the first and {found[1]} the second")
    assert min(found) > 0
    assert AutoModelForCausalLM.from_pretrained(place).config.n_layer in (1, 2)
    minigpt.save_pretrained(minigpt.from_pretrained(sources[0], device="cpu"), place)
    assert os.listdir(fast) == ["out"], "what the killed left behind is still there"


class Savers:
    """Processes that save without end, each a fork of one that has imported and loaded all it needs."""

    def __init__(self, place: Path, sources: list[Path]) -> None:
        self.place, self.models = place, [minigpt.from_pretrained(source, device="cpu") for source in sources]
        started = time.perf_counter()
        self.save_both()
        self.seconds_for_both = time.perf_counter() - started

    def save_both(self) -> None:
        """The second and the first, so that whoever is not killed too soon has replaced the first."""
        for model in reversed(self.models):
            most = 30_000 if model.config.n_layer == 1 else 10**9
            minigpt.save_pretrained(model, self.place, max_shard_bytes=most)

    def kill_one_after(self, seconds: float) -> None:
        child = os.fork()
        if not child:
            try:
                while True:
                    self.save_both()
            finally:
                os._exit(1)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
