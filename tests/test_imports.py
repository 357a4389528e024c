"""No file of the package imports itself, by whatever way: imports in functions and for type checkers count too."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import minigpt

ROOT = Path(minigpt.__file__).parent


def modules() -> dict[str, Path]:
    """Each module of the package by its name."""
    files = {file: file.relative_to(ROOT.parent).with_suffix("") for file in ROOT.rglob("*.py")}
    return {".".join(path.parts).removesuffix(".__init__"): file for file, path in files.items()}


def imported(name: str, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports anywhere."""
    for node in ast.walk(ast.parse(known[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            within = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (place if place in known else node.module for place in within.values())


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last the first; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_circles_are_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "e": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}
    assert set(circle({"a": {"b"}, "d": {"d"}})) == {"d"}
    known = modules()
    assert {"minigpt.cli", "minigpt.recipe", "minigpt.norms.foreign.adapt"} <= known.keys()
    assert "minigpt.norms.build" in set(imported("minigpt.norms", known))
    assert "minigpt.model.gpt2" in set(imported("minigpt.engine.parts", known)) | set(imported("minigpt.model", known))


def test_no_file_imports_itself() -> None:
    known = modules()
    assert circle({name: set(imported(name, known)) for name in known}) == []


def test_no_file_is_long() -> None:
    """350 lines of code: what is longer is two files."""
    for name, file in modules().items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        comments = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        lines = file.read_text(encoding="utf-8").splitlines()
        code = [
            line for i, line in enumerate(lines, 1) if i not in comments and line.strip() and line.strip()[0] != "#"
        ]
        assert len(code) <= 350, f"{name} has {len(code)} lines of code"
