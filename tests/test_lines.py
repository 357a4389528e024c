"""Files of a run: rows that survive kills, and files that are written whole or not at all."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigpt import MiniGPTError
from minigpt.files import Lines, hash_file, hash_json, locked, write_atomically

fork = multiprocessing.get_context("fork")
ROWS = [{"site": "h.0.ln_1", "kl": 0.5}, {"text": "a\u2028b\u0085c\r\n", "n": 10**30}]


def write(file: Path, *rows: dict[str, Any], run: str | None = "abc") -> None:
    with Lines(file, run) as lines:
        for row in rows:
            lines.append(row)


def read(file: Path, run: str | None = "abc") -> list[dict[str, Any]]:
    with Lines(file, run) as lines:
        return lines.rows


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text().filter(lambda name: name != "run"), json_values, max_size=3), max_size=4))
def test_any_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    file = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    for run in ("abc", None):
        file.unlink(missing_ok=True)
        write(file, *rows, run=run)
        assert read(file, run) == rows


def test_a_file_cut_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write(file, *ROWS)
    whole = file.read_bytes()
    for end in range(len(whole) + 1):
        file.write_bytes(whole[:end])
        count = whole[:end].count(b"\n")
        with Lines(file, "abc") as lines:
            assert lines.rows == ROWS[:count]
            assert lines.torn == (None if whole[:end].endswith(b"\n") or not end else count + 1)
            lines.append({"more": 1})
        assert read(file) == [*ROWS[:count], {"more": 1}]


def test_numbers_that_json_has_no_word_for_are_null(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", {"loss": float("nan"), "all": [float("inf")], "name": "\ud800"})
    assert read(tmp_path / "rows.jsonl") == [{"loss": None, "all": [None], "name": "\ud800"}]


@pytest.mark.parametrize(
    ("content", "run", "number"),
    [
        ('{"run": "abc"}\n{"run": "other"}\n', "abc", 2), ('{"a": 1}\n', "abc", 1),
        ("# notes", "abc", 1), ("# notes", None, 1), ('{"run": "abc"}\n\n{"run": "abc"}\n', "abc", 2),
        ('{"run": "abc", "a": }\n{"run": "abc"}\n', "abc", 1), ('{"a": ' + "[" * 100_000 + "\n", None, 1),
    ],
)  # fmt: skip
def test_what_is_not_of_the_run_is_refused_by_its_line_and_stays(
    content: str, run: str | None, number: int, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(MiniGPTError, match=f"^line {number} of "):
        Lines(file, run)
    assert file.read_text() == content


def test_a_second_process_waits_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with Lines(file, "abc"), pytest.raises(MiniGPTError, match="another process"):
        Lines(file, "abc")
    assert read(file) == []


def _hold(folder: Path, is_held: Any) -> None:
    with locked(folder):
        is_held.set()
        time.sleep(60)


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path: Path) -> None:
    """The lock is that of the folder itself, which nothing is written to."""
    is_held = fork.Event()
    holder = fork.Process(target=_hold, args=(tmp_path, is_held))
    holder.start()
    assert is_held.wait(60)
    with pytest.raises(BlockingIOError), locked(tmp_path):
        pass
    os.kill(holder.pid or 0, signal.SIGKILL)
    with locked(tmp_path, wait=True):
        assert os.listdir(tmp_path) == []
    holder.join()
    with pytest.raises(FileNotFoundError), locked(tmp_path / "missing"):
        pass


@pytest.mark.parametrize("path", ["no/such/folder", ".", "nul\0", "/dev/full"])
def test_a_file_that_cannot_be_written(path: str, tmp_path: Path) -> None:
    with pytest.raises(MiniGPTError, match="cannot write"):
        write(tmp_path / path, {"a": 1})


def test_a_pipe_has_no_earlier_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(tmp_path / "pipe", {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"run": "abc", "a": 1}
    os.close(reader)


# One file, whole or not at all.


def test_a_link_stays_a_link_and_a_mode_a_mode(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    write_atomically("/dev/null", b"anything")
    assert Path("/dev/null").is_char_device()


def _write_for_ever(file: Path, letter: str) -> None:
    while True:
        write_atomically(file, letter * 300_000)


@pytest.mark.thorough
def test_two_writers_that_are_killed_leave_a_whole_file(tmp_path: Path) -> None:
    file, chance = tmp_path / "page.html", random.Random(0)
    write_atomically(file, "a" * 300_000)
    for _ in range(15):
        writers = [fork.Process(target=_write_for_ever, args=(file, letter)) for letter in "ab"]
        for writer in writers:
            writer.start()
        time.sleep(chance.uniform(0, 0.03))
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
        content = file.read_text()
        assert len(content) == 300_000
        assert len(set(content)) == 1
    write_atomically(file, "c")
    assert os.listdir(tmp_path) == ["page.html"], "what was left is cleaned"


def test_hashes_follow_the_content(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    one = hash_file(file)
    assert one == hash_file(str(file))
    file.write_text("other")
    assert hash_file(file) != one
    assert hash_json({"a": 1, "b": Path("x")}) == hash_json({"b": Path("x"), "a": 1}) != hash_json({"a": 2})


@pytest.mark.parametrize("half", [b"", b'{"run": "abc", "x'])
def test_zeros_at_the_end_are_a_line_that_was_cut_short(half: bytes, tmp_path: Path) -> None:
    """As a power cut leaves them."""
    file = tmp_path / "cells.jsonl"
    with Lines(file, "abc") as lines:
        lines.append({"x": 1})
    whole = file.read_bytes()
    file.write_bytes(whole + half + b"\0" * 400)
    with Lines(file, "abc") as lines:
        assert (lines.rows, lines.torn) == ([{"x": 1}], 2)
    assert file.read_bytes() == whole
