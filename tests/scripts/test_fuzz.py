"""A slice of the fuzzing of the readers; and the fuzzing itself, which must see what it is there to see."""

import faulthandler
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import minigpt

FIRST = 1_000_000  # beyond those of the long run, whose results are in docs/results
OF_EACH = 10


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    script = import_module("fuzz.checkpoints")
    sys.addaudithook(script._watch)  # which looks at nothing but what is opened while a checkpoint is read
    return script


@pytest.fixture(scope="module")
def folder(fuzz: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fuzz")
    fuzz.write_seeds(place / "seeds")
    return place


def test_a_slice(fuzz: ModuleType, folder: Path) -> None:
    found = fuzz.in_a_process(range(FIRST, FIRST + OF_EACH * len(fuzz.TARGETS)), folder)
    assert found["escaped"] == []
    assert sum(found["counts"].values()) == OF_EACH * len(fuzz.TARGETS)
    assert {name.partition(":")[0] for name in found["counts"]} == fuzz.TARGETS.keys()
    outcomes = {name.rpartition(" ")[2] for name in found["counts"]}
    assert outcomes == {"loaded", "refused"}


@pytest.mark.parametrize("seed", ["single", "sharded", "bin", "legacy", "nested", "openai", "tokenizer"])
def test_the_seeds_are_whole(fuzz: ModuleType, folder: Path, seed: str) -> None:
    assert fuzz._read(seed, folder / "seeds" / seed) == ("loaded", None)


def escape(*_: object, **__: object) -> Any:
    raise KeyError("got through")


def crash(*_: object, **__: object) -> Any:
    faulthandler.disable()  # pytest's own, which would report what is meant to be
    os.abort()


def hang(*_: object, **__: object) -> Any:
    time.sleep(60)


def grow(*_: object, **__: object) -> Any:
    return bytearray(2**32)


def wander(*_: object, **__: object) -> Any:
    Path("/etc/hostname").open().close()
    raise minigpt.CheckpointError("it looked elsewhere")


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (escape, "KeyError: 'got through'"),
        (crash, "the process died of it"),
        (hang, "it took more than 0.2 s"),
        (grow, "MemoryError"),
        (wander, "it opened /etc/hostname"),
    ],
)
def test_a_fault_is_seen(
    fuzz: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, what: str
) -> None:
    monkeypatch.setattr(minigpt, "from_pretrained", fault, raising=False)
    monkeypatch.setattr(fuzz, "SECONDS", 0.2 if fault is hang else 30)
    number = sorted(fuzz.TARGETS).index("header")
    found = fuzz.in_a_process(range(number, number + 1), folder)
    assert [what in escaped["what"] for escaped in found["escaped"]] == [True], found
