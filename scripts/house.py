"""Hold the package's size, and what a reader of one command walks through, to docs/results/house.json.

python scripts/house.py                 # print the figures; status 1 if one is above the file's
python scripts/house.py --write [WHY]   # write the figures of now; WHY stands beside each that is raised

Nodes: of the syntax tree of minigpt/, without docstrings, imports and Load and Store. Functions: with methods.
A walk: the functions of minigpt/ that run in one command, their files, and how often the way to a function that has
not run yet changes file. The body of a class counts as a function, where the class is first imported. Comprehensions,
lambdas and the code of modules do not count. A walk is measured on the CPU, with the kernel.
"""

import ast
import contextlib
import json
import os
import runpy
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minigpt"
FILE = ROOT / "docs/results/house.json"
COMMANDS = (
    ("generate", "Once", "--seed", "1", "--max-new-tokens", "8"),
    ("parity", "--norm", "rms"),
    ("norms", "--check", "rms"),
)
UNSEEN = (ast.Import, ast.ImportFrom, ast.alias, ast.Load, ast.Store)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def size(source: str) -> Counter[str]:
    """Return the nodes and the functions of a file."""
    counts: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        counts["nodes"] += not isinstance(node, UNSEEN)
        counts["functions"] += isinstance(node, FUNCTIONS)
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            counts["nodes"] -= 2  # an expression, and the constant in it
    return counts


def sizes() -> dict[str, Counter[str]]:
    """Return the nodes and the functions of each room; a file of the first level is a room "."."""
    rooms: dict[str, Counter[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        room = str(Path(*file.relative_to(PACKAGE).parts[:1])) if file.parent != PACKAGE else "."
        rooms.setdefault(room, Counter()).update(size(file.read_text(encoding="utf-8")))
    return rooms


class Walk:
    """The functions of the package that run, in the order of their first call."""

    def __init__(self) -> None:
        self.seen: set[CodeType] = set()
        self.file, self.changes = "", 0

    def look(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; sys.setprofile calls this at each."""
        code = frame.f_code
        file = code.co_filename
        if event != "call" or code.co_name.startswith("<") or not file.startswith(f"{PACKAGE}{os.sep}"):
            return
        if code not in self.seen:
            self.changes += self.file not in ("", file)
            self.seen.add(code)
        self.file = file

    def print(self) -> None:
        """Print functions, files and changes of file, as the last line of standard output."""
        sys.setprofile(None)
        files = {code.co_filename for code in self.seen}
        print(json.dumps([len(self.seen), len(files), self.changes]), flush=True)


def take(words: list[str]) -> None:
    """Run a command in this process, and print its walk after the command's output."""
    walk, leave = Walk(), os._exit

    def print_and_leave(status: int = 0) -> None:  # the command may end its process early
        walk.print()
        leave(status)

    os._exit = print_and_leave  # type: ignore
    sys.argv = ["minigpt", *words]
    threading.setprofile(walk.look)
    sys.setprofile(walk.look)
    with contextlib.suppress(SystemExit):  # a verdict is no failure of the walk
        runpy.run_module("minigpt", run_name="__main__")
    print_and_leave()


def walked(command: tuple[str, ...]) -> dict[str, int]:
    """Return the walk of a command, which runs in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, "--take", *command],
        cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    functions, files, changes = json.loads(run.stdout.splitlines()[-1])
    name = command[0]
    return {f"{name}: functions": functions, f"{name}: files": files, f"{name}: changes of file": changes}


def measure() -> dict[str, int]:
    """Return the figures that the file holds, and print those of the rooms."""
    figures: Counter[str] = Counter()
    for room, counts in sizes().items():
        print(f"{room:28}{counts['nodes']:10,} nodes{counts['functions']:8,} functions")
        figures.update(counts)
    for command in COMMANDS:
        figures.update(walked(command))
    return dict(figures)


def above(figures: dict[str, int], held: dict[str, int]) -> list[str]:
    """Return the names of the figures that are above the file's."""
    return [name for name, figure in figures.items() if figure > held[name]]


def raises(figures: dict[str, int], held: dict[str, int], why: str) -> list[dict[str, Any]]:
    """Return an entry of the file for each figure that is above the file's."""
    return [{"figure": name, "from": held[name], "to": figures[name], "why": why} for name in above(figures, held)]


def main(words: list[str]) -> None:
    if words[:1] == ["--take"]:
        take(words[1:])
    before = json.loads(FILE.read_text(encoding="utf-8"))
    held = before["figures"]
    figures = measure()
    for name, figure in figures.items():
        print(f"{name:28}{figure:10,} of at most {held[name]:,}")
    why = " ".join(words[1:])
    raised = raises(figures, held, why)
    if raised and not why:
        names = ", ".join(entry["figure"] for entry in raised)
        sys.exit(f"above {FILE.relative_to(ROOT)}: {names}; delete something, or --write WHY")
    if words[:1] == ["--write"]:
        after = {"figures": figures, "raised": before["raised"] + raised}
        FILE.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
