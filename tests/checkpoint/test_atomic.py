"""A folder's model is replaced at one moment: whenever its savers are killed, one whole model is there."""

import contextlib
import errno
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import reference, saved, tiny_bpe
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import minigpt
from minigpt import CheckpointError, Tokenizer
from minigpt.checkpoint.replace import replacing

NEW = {"config.json": "{}", "model.safetensors": "new"}
OLD = {"config.json": '{"n_head": 1}', "model.safetensors": "old", "README.md": "mine"}


def fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() if path.is_file() else "" for path in folder.iterdir()}


def save(folder: Path) -> None:
    with replacing(folder) as new:
        fill(new, NEW)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    fill(tmp_path / "model", OLD)
    return tmp_path / "model"


def test_what_is_not_ours_stays_and_the_rest_of_the_old_goes(old: Path) -> None:
    """Shards go, and what a killed process has left."""
    (old / "checkpoints").mkdir()
    fill(old, {"model-00001-of-00002.safetensors": "old", "model.safetensors.index.json": "old"})
    fill(old / ".saving.0123.partial", NEW)
    fill(old / ".current.0123.partial", NEW)
    save(old)
    assert contents(old) == OLD | NEW | {"checkpoints": ""}


def test_a_link_to_a_folder_stays_a_link(old: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(old)
    save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert contents(old) == OLD | NEW


def test_without_links_files_are_copied(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    save(old)
    assert contents(old) == OLD | NEW


# Stopped at every step, and killed at any moment: two models of other shapes, weights and vocabularies.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, GPT2LMHeadModel]:
    """By their number of layers."""
    return {2: reference(vocab_size=300), 1: reference(seed=1, n_layer=1, n_embd=64, vocab_size=280)}


class Saver:
    """Saves either model into a folder."""

    def __init__(self, place: Path, models: dict[int, GPT2LMHeadModel], folder: Path, shard: int = 10**9) -> None:
        self.place, self.shard = place, shard
        sources = {layers: saved(model, folder / f"source {layers}") for layers, model in models.items()}
        self.models = {
            layers: minigpt.from_pretrained(source, device="cpu", arithmetic="reference")
            for layers, source in sources.items()
        }
        self.tokenizers = {layers: Tokenizer(tiny_bpe(model.config.vocab_size)) for layers, model in models.items()}

    def save(self, layers: int) -> None:
        most = self.shard if layers == 1 else 10**9
        minigpt.save_pretrained(self.models[layers], self.place, self.tokenizers[layers], max_shard_bytes=most)


def layers_of_whole(place: Path, models: dict[int, GPT2LMHeadModel]) -> int:
    """Which model minigpt finds, after a check that each value of it is that model's."""
    model = minigpt.from_pretrained(place, device="cpu")
    layers = model.config.n_layer
    expected = {name.removeprefix("transformer."): tensor for name, tensor in models[layers].state_dict().items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    return layers


def assert_whole(place: Path, models: dict[int, GPT2LMHeadModel]) -> int:
    """The same of transformers, and of minigpt's tokenizer."""
    layers = layers_of_whole(place, models)
    hf_model = AutoModelForCausalLM.from_pretrained(place)
    assert hf_model.config.n_layer == layers
    assert all(torch.equal(tensor, models[layers].state_dict()[name]) for name, tensor in hf_model.state_dict().items())
    assert Tokenizer.from_pretrained(place).vocab_size == models[layers].config.vocab_size
    return layers


STEPS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "fcntl.flock")


def stop(how: str) -> None:
    """End a save: kill this process, or raise what a full disk or Ctrl-C does."""
    if how == "kill":
        os._exit(1)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if how == "full disk" else KeyboardInterrupt


def save_stopped(saver: Saver, step: int, how: str) -> bool:
    """Save the new model in a process that is stopped before its step of this number; return False if it has fewer."""
    child = os.fork()
    if not child:
        status, steps = 9, iter(range(step, -1, -1))
        sys.addaudithook(lambda event, _: stop(how) if event in STEPS and next(steps, None) == 0 else None)
        try:
            with contextlib.suppress(CheckpointError, KeyboardInterrupt):
                saver.save(1)
            status = 1 if next(steps, None) is None else 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), "another error"
    return status == 1


@pytest.mark.parametrize(
    ("how", "stride"),
    [
        ("kill", 4),
        pytest.param("kill", 1, marks=pytest.mark.thorough),
        pytest.param("full disk", 1, marks=pytest.mark.thorough),
        pytest.param("Ctrl-C", 1, marks=pytest.mark.thorough),
    ],
)
def test_stopped_before_each_step(how: str, stride: int, models: dict[int, GPT2LMHeadModel], tmp_path: Path) -> None:
    """The first kills leave the old model and all others the new. A full disk is told in one sentence.

    With a stride steps are left out. transformers reads what is left as soon as it is another model, and at the end.
    """
    saver, left, is_stopped, step = Saver(tmp_path / "out", models, tmp_path, 30_000), list[int](), True, 0
    while is_stopped:
        saver.save(2)
        is_stopped, step = save_stopped(saver, step, how), step + stride
        layers = layers_of_whole(saver.place, models)
        if layers not in left or not is_stopped:
            assert_whole(saver.place, models)
        left.append(layers)
    assert left[-1] == 1
    assert how == "full disk" or left == sorted(left, reverse=True)  # some steps can do without, as without a lock
    assert min(left.count(1), left.count(2)) > 5 / stride
    assert not list(saver.place.glob(".*"))


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files stands for a full disk")
@pytest.mark.parametrize("size", [0, 100, 5_000, 20_000])
def test_a_file_that_cannot_be_written_to_its_end(
    size: int, models: dict[int, GPT2LMHeadModel], tmp_path: Path
) -> None:
    saver = Saver(tmp_path / "out", models, tmp_path)
    saver.save(2)
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(CheckpointError):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            status = 2
            saver.save(1)
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert assert_whole(saver.place, models) == 2
    assert not list(saver.place.glob(".*"))


PLACES = {
    # name: (savers, whether one model is sharded, a folder inside, the working directory)
    "the working directory": (1, True, True, True),
    "two savers": (2, True, False, False),
    "three savers": (3, False, True, False),
}
KILLS = 120


@pytest.mark.thorough
@pytest.mark.parametrize("case", PLACES)
def test_killed_at_random_moments(
    case: str, models: dict[int, GPT2LMHeadModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reader finds a whole model after each kill, also while other savers go on."""
    savers, is_sharded, has_folder, is_here = PLACES[case]
    place, chance, left = tmp_path / "out", random.Random(case), []
    saver = Saver(place, models, tmp_path, 30_000 if is_sharded else 10**9)
    saver.save(2)
    if has_folder:
        fill(place / "checkpoints", {"state": "mine"})
    if is_here:
        monkeypatch.chdir(place)
        saver.place = Path()
    begin = time.perf_counter()
    saver.save(1)
    saver.save(2)
    both = time.perf_counter() - begin
    while len(left) < KILLS:
        children = [fork_saver(saver) for _ in range(savers)]
        for child in children:
            time.sleep(chance.uniform(0, 3 * both))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            left.append(layers_of_whole(saver.place, models))
        left[-1] = assert_whole(saver.place, models)
    print(f"{case}: of {len(left)} kills, {left.count(2)} left one model and {left.count(1)} the other, each whole")
    assert 0 < left.count(1) < len(left)
    saver.save(2)
    assert not list(place.glob(".*")), "what the killed left is still there"
    assert not has_folder or contents(place / "checkpoints") == {"state": "mine"}


def fork_saver(saver: Saver) -> int:
    """A process that saves one model after the other without end."""
    child = os.fork()
    if not child:
        try:
            while True:
                saver.save(1)
                saver.save(2)
        finally:
            os._exit(1)
    return child


def test_nowhere_to_save(models: dict[int, GPT2LMHeadModel], tmp_path: Path) -> None:
    model = minigpt.from_pretrained(saved(models[2], tmp_path / "in"), device="cpu")
    (tmp_path / "in the way").touch()
    here = contents(Path())
    for place in (tmp_path / "in the way", tmp_path / "in the way" / "out", "", "nul\0", tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError):
            minigpt.save_pretrained(model, place)
    assert contents(Path()) == here
