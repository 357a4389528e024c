"""What the commands print: names from files reach no terminal as its own sequences."""

import contextlib
import os
import pty
import threading

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from minigpt.cli.output import ResultConsole, progress

NAME = "\x1b]0;TITLE\x1b\\demo\x9b\r"


@pytest.mark.parametrize("kind", ["text", "rich text", "table", "group"])
def test_control_characters_of_a_name_are_shown(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(NAME)
    table.add_row(NAME)
    what = {"text": NAME, "rich text": Text(NAME, style="bold"), "table": table, "group": Group(NAME, table)}[kind]
    console = ResultConsole()
    console._force_terminal = True
    console.print(what)
    out = capsys.readouterr().out
    assert "\x1b]" not in out
    assert "\x9b" not in out
    assert "TITLE" in out


def test_a_table_without_control_characters_is_as_rich_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("norm", "what it is")
    table.add_row("a[b]", "one\ntwo")
    ResultConsole().print(table)
    ours = capsys.readouterr().out
    assert "a[b]" in ours
    assert "two" in ours


def test_the_steps_of_a_bar_are_shown_so_too() -> None:
    reading, terminal = pty.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=_read_to_end, args=(reading, shown))
    reader.start()
    with os.fdopen(terminal, "w") as stream, contextlib.redirect_stderr(stream), progress() as say:
        say(NAME, 0.5)
    reader.join()
    os.close(reading)
    assert b"TITLE" in b"".join(shown)
    assert b"\x1b]0" not in b"".join(shown)


def _read_to_end(file: int, parts: list[bytes]) -> None:
    """Add what comes from a terminal to ``parts`` until its other end is closed. One read may give a part of it."""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(file, 2**16):
            parts.append(part)
