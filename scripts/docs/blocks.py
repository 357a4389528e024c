"""Run the code blocks of a Markdown page, and compare what they print with what the page shows.

python scripts/docs/blocks.py docs/tutorial.md            # compare
python scripts/docs/blocks.py docs/tutorial.md --write    # put what they print into the page
python scripts/docs/blocks.py docs/tutorial.md --notebook docs/tutorial.ipynb

The Python blocks of a page share one namespace, in order. A block fenced as ``output`` behind a Python block holds
what that block prints. ``sh`` blocks are commands, a line each. The line ``<!-- no-run -->`` before a block marks one
that needs a network, a GPU or somebody who presses a key; no viewer of Markdown shows that line. A Python block that
begins with ``# NAME.py`` is a file that the commands can use.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import typer

FENCE = re.compile(r"^(?P<mark><!-- no-run -->\n)?```(?P<kind>[a-z]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, whether it can run, its text and its place in the page."""

    kind: str
    runs: bool
    body: str
    start: int
    end: int


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [Block(m["kind"], not m["mark"], m["body"], m.start(), m.end()) for m in FENCE.finditer(page)]


def run_python(page: str) -> list[tuple[Block, str]]:
    """Run the Python blocks of a page; return each with what it printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = []
    for block in blocks_of(page):
        if block.kind == "python" and block.runs:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.body, "<page>", "exec"), namespace)
            ran.append((block, printed.getvalue()))
    return ran


def commands_of(page: str) -> list[str]:
    """Return the commands of a page that a test can run."""
    bodies = [block.body for block in blocks_of(page) if block.kind == "sh" and block.runs]
    return [line for body in bodies for line in body.replace("\\\n", " ").splitlines() if line.strip()]


def write_files(page: str, folder: Path) -> None:
    """Write the blocks of Python and TOML that are files into ``folder``."""
    for block in blocks_of(page):
        if block.kind in ("python", "toml") and (name := re.match(r"# (\w+\.(?:py|toml))\n", block.body)):
            (folder / name[1]).write_text(block.body, encoding="utf-8")


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, with this interpreter as python and its minigpt."""
    python = shlex.quote(sys.executable)
    program, _, rest = command.partition(" ")
    program = {"minigpt": f"{python} -m minigpt", "python": python}.get(program, program)
    words = ["bash", "-c", f"{program} {rest}"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def shown_after(page: str, block: Block) -> Block | None:
    """Return the output block right behind a Python block, or None."""
    following = next((other for other in blocks_of(page) if other.start > block.end), None)
    is_next = following is not None and following.kind == "output" and not page[block.end : following.start].strip()
    return following if is_next else None


def with_outputs(page: str) -> str:
    """Return the page with an output block behind every Python block that prints."""
    parts, at = [], 0
    for block, printed in run_python(page):
        shown = shown_after(page, block)
        parts.append(page[at : block.end])
        at = shown.end if shown else block.end
        if printed:
            parts.append(f"\n\n```output\n{printed}```")
    return "".join([*parts, page[at:]])


def as_notebook(page: str) -> dict[str, Any]:
    """Return the page as a Jupyter notebook: text and Python cells, without outputs."""
    cells, at = [], 0
    for block in blocks_of(page):
        if block.kind in ("python", "output"):
            cells.append(("markdown", page[at : block.start].strip()))
            if block.kind == "python":
                cells.append(("code", block.body.rstrip()))
            at = block.end
    cells.append(("markdown", page[at:].strip()))
    made = [
        {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": text}
        | ({"outputs": [], "execution_count": None} if kind == "code" else {})
        for i, (kind, text) in enumerate(cells)
        if text
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main(pages: list[Path], write: bool = False, notebook: Path | None = None) -> None:
    """Run the Python blocks of pages, in a process for each page where several are given."""
    for path in pages:
        page = path.read_text(encoding="utf-8")
        if notebook is not None:
            notebook.write_text(json.dumps(as_notebook(page), indent=1) + "\n", encoding="utf-8")
            continue
        now = with_outputs(page)
        if write:
            path.write_text(now, encoding="utf-8")
        elif now != page:
            sys.exit(f"{path}: its blocks print something else than it shows; run with --write and look at the change")


if __name__ == "__main__":
    typer.run(main)
