"""No file of the package imports itself, by whatever way: imports in functions and for type checkers count too."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
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
    for node in ast.walk(parsed(known[name])):
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
    assert "minigpt.norms.registry" in set(imported("minigpt.norms", known))
    assert "minigpt.model.gpt2" in set(imported("minigpt.engine.parts", known)) | set(imported("minigpt.model", known))


def test_no_file_imports_itself() -> None:
    known = modules()
    assert circle({name: set(imported(name, known)) for name in known}) == []


def test_no_file_is_long() -> None:
    """350 lines of code: what is longer is two files."""
    for name, file in modules().items():
        tree = parsed(file)
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


# One name is one thing. Commands are named as the functions that they call, and these are what a library looks for:
MAY_BE_TWICE = {"app", "build", "finetune", "generate", "parity", "perplexity", "register", "run", "TYPE_CHECKING"}
# A class of transformers' under the name of ours, as its ``repr`` shows it:
MAY_BE_TWICE |= {"FastConv1D"}
# Those that are still to be renamed. The set only shrinks.
ARE_TWICE: set[str] = set()

# Nodes of the syntax tree a statement: the most that a room may have. They only sink, or its short statements went.
MOST_NODES = {
    "(root)": 8.0, "bench": 8.3, "checkpoint": 8.3, "cli": 8.5, "conformance": 9.3, "engine": 8.2,
    "engines": 8.0, "generation": 8.5, "hf": 7.8, "judge": 9.4, "model": 8.8, "norms": 8.9, "report": 8.0,
    "serve": 7.6, "study": 8.2, "swap": 8.2,
}  # fmt: skip


def room_of(file: Path) -> str:
    """The folder of the package that a file is in; "(root)" for a file of none."""
    folders = file.relative_to(ROOT).parts[:-1]
    return folders[0] if folders else "(root)"


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def defined(tree: ast.Module, *, private: bool = False) -> set[str]:
    """The public functions, classes and constants of a module; all of them if ``private``."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in targets_of(node):
            names |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in names if private or not name.startswith("_")}


def targets_of(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return []


def homes(files: Iterable[Path]) -> dict[str, dict[str, Path]]:
    """The rooms that define each public name, with a file of each. A file of no room is a room of its own."""
    found: dict[str, dict[str, Path]] = defaultdict(dict)
    for file in files:
        room = file.name if room_of(file) == "(root)" else room_of(file)
        for name in defined(parsed(file)):
            found[name][room] = file.relative_to(ROOT)
    return found


def statements(tree: ast.Module) -> list[ast.stmt]:
    """All statements of a module but imports and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped: set[ast.AST] = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            skipped.add(node.body[0])
        if isinstance(node, ast.stmt) and node not in skipped and not isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
    return found


def weight(node: ast.AST) -> int:
    """The number of nodes of a statement without the statements in it."""
    apart = (ast.stmt, ast.excepthandler, ast.match_case, ast.expr_context)
    return 1 + sum(weight(child) for child in ast.iter_child_nodes(node) if not isinstance(child, apart))


def test_nodes_are_counted_by_statement() -> None:
    tree = ast.parse('"""Docs."""\nimport os\nif a:\n    b = [c for c in d]\n')
    branch, assignment = statements(tree)
    assert weight(branch) == len([ast.If, ast.Name])
    assert weight(assignment) == len(
        [ast.Assign, ast.Name, ast.ListComp, ast.Name, ast.comprehension, ast.Name, ast.Name]
    )
    assert defined(ast.parse("A, _b = 1, 2\nc: int = 3\ndef f(): d = 4\nclass G: e = 5")) == {"A", "c", "f", "G"}


def test_one_name_is_one_thing() -> None:
    found = homes(modules().values())
    twice = {name: sorted(map(str, rooms.values())) for name, rooms in found.items() if len(rooms) > 1}
    new = {name: files for name, files in twice.items() if name not in MAY_BE_TWICE | ARE_TWICE}
    print(
        f"{len(twice)} names in two rooms, {len(MAY_BE_TWICE)} of them may be; renamed: {sorted(ARE_TWICE - {*twice})}"
    )
    assert not new, "rename the lesser of each"


# Names of top level that two files or more define, private ones too. The set only shrinks.
IN_TWO_FILES = {
    "Call", "MOST_LOGITS", "MOST_WORK", "OWN", "Step", "_losses", "_read", "tensors_of",
}  # fmt: skip


def test_few_names_are_defined_in_two_files() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for name, file in modules().items():
        for defined_name in defined(parsed(file), private=True):
            files[defined_name].append(name)
    twice = {name for name, places in files.items() if len(places) > 1}
    may_be = MAY_BE_TWICE | ARE_TWICE | IN_TWO_FILES | {"__all__"}
    assert {name: files[name] for name in twice - may_be} == {}, "rename the lesser of each"
    assert IN_TWO_FILES - twice == set(), "these are renamed: take them out"


# Names that say nothing: what was found, and by whom was it asked? A name says what the thing is.
EMPTY_NAMES = {"found", "given", "said", "own", "wanted", "theirs", "asked"}


def test_few_variables_have_empty_names() -> None:
    files = set()
    for name, file in modules().items():
        if any(isinstance(node, ast.Name) and node.id in EMPTY_NAMES for node in ast.walk(parsed(file))):
            files.add(name)
    print(len(files), sorted(files))
    assert len(files) <= 12


def test_no_room_grows_denser() -> None:
    rooms: dict[str, list[ast.stmt]] = defaultdict(list)
    for file in modules().values():
        rooms[room_of(file)] += statements(parsed(file))
    density = {room: sum(map(weight, nodes)) / len(nodes) for room, nodes in rooms.items()}
    for room, nodes in sorted(density.items()):
        print(f"{room}: {nodes:.2f} nodes a statement, at most {MOST_NODES[room]}")
    assert density.keys() == MOST_NODES.keys()
    assert {room: nodes for room, nodes in density.items() if nodes > MOST_NODES[room]} == {}
