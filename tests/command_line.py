"""A command within this process: the fixture ``run`` of shared_fixtures.py runs one, and this is how it ended."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """A command that has run."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]


def complaint(ended: Ended) -> str:
    """The one line of an error: nothing else on either stream, and status 2."""
    assert ended.status == 2, ended
    assert ended.out == "", "an error belongs on standard error"
    assert re.fullmatch(r"error: [^\n]{10,}\n", ended.err), ended.err
    assert "Traceback" not in ended.err
    return ended.err


def judge(run: Run, folder: Path, *words: object) -> Ended:
    return run("parity", "--model", folder, "--device", "cpu", "--prompt", "the dog", *words)
