"""Checkpoints from a hub: which files are asked for, and of which commit.

A stand-in for huggingface_hub's ``snapshot_download`` copies from folders what that would fetch.
"""

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, saved, tiny_bpe, tokens

import minigpt
from minigpt import CheckpointError, Tokenizer
from minigpt.checkpoint import local_place
from minigpt.checkpoint.contents import COMMITS
from minigpt.cli.commands import app_of

REPOSITORY = "someone/tiny-gpt2"


class Hub:
    """Repositories by name and revision, and what was copied of them."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.commits: dict[tuple[str, str | None], Path] = {}
        self.downloads: list[tuple[str, str]] = []  # commit and file
        self.after = lambda: None  # called after each look-up

    def publish(self, folder: Path, repository: str = REPOSITORY, revision: str | None = None) -> str:
        commit = f"commit-of-{repository.replace('/', '-')}-{folder.name}"
        self.commits[repository, revision] = self.commits[repository, commit] = folder
        return commit

    def snapshot(
        self, repository: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        if (repository, revision) not in self.commits:
            raise OSError("404 Client Error")
        source = self.commits[repository, revision]
        place = self.cache / f"commit-of-{repository.replace('/', '-')}-{source.name}"
        if local_files_only and not place.exists():
            raise OSError("it is not in the cache")
        place.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            is_named = any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns)
            if is_named and not local_files_only and not (place / path.name).exists():
                self.downloads.append((place.name, path.name))
                shutil.copy(path, place)
        self.after()
        return str(place)

    def downloaded(self) -> set[str]:
        names = {name for _, name in self.downloads}
        self.downloads.clear()
        return names


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A repository as published ones are: the model, its tokenizer, and much that a GPT-2 needs none of."""
    folder = saved(reference(), tmp_path / "published")
    Tokenizer(tiny_bpe()).save(folder)
    for name in ("pytorch_model.bin", "tf_model.h5", "README.md", "training.safetensors", "consolidated.00.pth"):
        (folder / name).write_bytes(b"not wanted")
    hub = Hub(tmp_path / "cache")
    hub.publish(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    COMMITS.clear()
    return hub


def load(repository: str = REPOSITORY, **how: Any) -> minigpt.GPT2:
    return minigpt.from_pretrained(repository, arithmetic="reference", device="cpu", **how)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out = model(tokens(2, 9))
    return out if isinstance(out, torch.Tensor) else out.logits


def test_only_the_wanted_files_are_fetched(hub: Hub) -> None:
    Tokenizer.from_pretrained(REPOSITORY)
    assert hub.downloaded() == {"tokenizer.json", "tokenizer_config.json"}
    assert torch.equal(logits(load()), logits(reference()))
    assert {"config.json", "generation_config.json", "model.safetensors"} <= hub.downloaded()
    assert not {path.suffix for path in hub.cache.rglob("*")} & {".bin", ".h5", ".pth", ".md"}
    assert torch.equal(logits(load(local_files_only=True)), logits(reference()))
    assert not hub.downloads


@pytest.mark.thorough
@pytest.mark.parametrize("command", [("generate", "the dog", "--model"), ("convert",), ("parity", "--model")])
def test_a_command_takes_everything_from_one_commit(hub: Hub, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Also where the branch moves to one with another tokenizer after the first files are fetched."""
    for name, size in (("first", 300), ("other", 290)):
        Tokenizer(tiny_bpe(size)).save(saved(reference(vocab_size=320), tmp_path / name))
    commit = hub.publish(tmp_path / "first", "someone/moving")
    hub.after = lambda: hub.publish(tmp_path / "other", "someone/moving")
    more = {"generate": ["--max-new-tokens", "2"], "convert": [str(tmp_path / "out")], "parity": ["--prompt", "the"]}
    assert not app_of(command)([*command, "someone/moving", *more[command[0]]], standalone_mode=False)
    assert {of for of, _ in hub.downloads} == {commit}


def test_a_revision_is_its_own_checkpoint(hub: Hub, tmp_path: Path) -> None:
    other = reference(seed=1)
    commit = hub.publish(saved(other, tmp_path / "other"), revision="v2")
    assert torch.equal(logits(load(revision="v2")), logits(other))
    assert torch.equal(logits(load(revision=commit)), logits(other))
    assert torch.equal(logits(load()), logits(reference()))
    minigpt.load_norms(model := load(), REPOSITORY, revision="v2")
    assert torch.equal(model.ln_f.weight, other.transformer.ln_f.weight)


def test_another_revision_is_judged_as_another_model(hub: Hub, tmp_path: Path) -> None:
    hub.publish(saved(reference(seed=1), tmp_path / "other"), revision="v2")
    original = minigpt.Original(REPOSITORY, device="cpu", prompts=[[1, 2, 3]], max_new_tokens=1)
    same = original.judge(minigpt.Recipe(REPOSITORY))
    other = original.judge(minigpt.Recipe(REPOSITORY, revision="v2"))
    assert (same.outcome, other.outcome) == ("PASS", "DIFFERENT")


@pytest.mark.parametrize(("repository", "revision"), [("someone/else", None), (REPOSITORY, "v9")])
def test_what_is_not_there_is_named(hub: Hub, repository: str, revision: str | None) -> None:
    with pytest.raises(CheckpointError) as refused:
        load(repository, revision=revision)
    assert all(word in str(refused.value) for word in (repository, revision or "", "404"))
    assert not hub.downloads


@pytest.mark.parametrize("names", [
    {"pytorch_model.bin"},
    {"pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"},
])  # fmt: skip
def test_pytorchs_own_files_are_fetched_where_there_is_nothing_else(hub: Hub, tmp_path: Path, names: set[str]) -> None:
    old = saved(reference(), tmp_path / "old")
    (old / "model.safetensors").unlink()
    for name in (*names, "pytorch_model.fp16.bin", "training_args.bin", "rust_model.ot"):
        (old / name).touch()
    hub.publish(old, "someone/old")
    place = local_place("someone/old")
    assert hub.downloaded() == {path.name for path in place.iterdir()} == {
        "config.json", "generation_config.json", *names,
    }  # fmt: skip
    with pytest.raises(CheckpointError):
        Tokenizer.from_pretrained("someone/old")
