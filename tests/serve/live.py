"""A server of its own process, as ``minigpt serve`` starts it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

SLOW = """
import time
from torch import nn
class Slow(nn.LayerNorm):
    def forward(self, x):
        time.sleep({seconds})
        return super().forward(x)
"""


def slow_norm(folder: Path, seconds: float) -> str:
    """The name of a norm, written into ``folder``, that waits so long in each call; the demo has 9 norms."""
    file = folder / "slow.py"
    file.write_text(SLOW.format(seconds=seconds))
    return f"{file}:Slow"


class Live(NamedTuple):
    """A server that listens."""

    url: str
    curl: str
    process: "subprocess.Popen[str]"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].strip("/"))


@contextlib.contextmanager
def live(*options: str, before: str = "", stderr: IO[str] | None = None, **environment: str) -> Iterator[Live]:
    """A server on a free port of the loopback, which is gone afterwards; ``before`` is code that it runs first."""
    program = f"{before}\nfrom minigpt.cli import program\nprogram()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert process.stdout is not None
    try:
        yield Live(process.stdout.readline().strip().rstrip("/"), process.stdout.readline().strip(), process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            process.stdout.close()
