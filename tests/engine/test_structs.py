"""The structs that Python passes to the kernel, and those that ``model.h`` declares."""

import ctypes
import re
from pathlib import Path

import pytest

from minigpt.engine import structs

HEADER = Path(structs.__file__).with_name("model.h").read_text()
MIRRORS = {
    "matrix": structs.CMatrix,
    "norm": structs.CNorm,
    "vector": structs.CVector,
    "layer": structs.CLayer,
    "model": structs.CModel,
    "rows": structs.CRows,
}
TYPES = {"int64_t": ctypes.c_int64, "float": ctypes.c_float} | {f"struct {name}": c for name, c in MIRRORS.items()}
NAMES = {"in": "inputs", "out": "outputs"}  # the first is a keyword of Python


def declared(name: str) -> list[tuple[str, type]]:
    """Return the fields of a struct of the header."""
    match = re.search(rf"^struct {name} {{(.*?)^}};", HEADER, re.DOTALL | re.MULTILINE)
    assert match is not None
    fields: list[tuple[str, type]] = []
    for statement in re.sub(r"/\*.*?\*/", "", match[1], flags=re.DOTALL).split(";")[:-1]:
        kind, names = re.findall(r"(?:const )?((?:struct )?\w+) (.*)", statement)[0]
        for field in re.findall(r"\**\w+", names):
            name = field.lstrip("*")
            is_pointer = name != field
            fields.append((NAMES.get(name, name), ctypes.c_void_p if is_pointer else TYPES[kind]))
    return fields


@pytest.mark.parametrize("name", MIRRORS)
def test_python_mirrors_the_header(name: str) -> None:
    assert MIRRORS[name]._fields_ == declared(name)
