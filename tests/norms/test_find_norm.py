"""Find the class of a name: registered, in a package, or in a file."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from minigpt import NormError, norms

HEADER = "import torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n\n\n"
MINE = "class Mine(nn.LayerNorm):\n    pass\n"


def file_with(folder: Path, body: str, name: str = "norm_of_mine.py") -> Path:
    """A file with this text after the imports, which are five lines."""
    file = folder / name
    file.write_text(HEADER + body, encoding="utf-8")
    return file


def refused(norm: Any, size: int | tuple[int, ...] = 8, **told: Any) -> str:
    """The sentence with which a norm is refused."""
    with pytest.raises(NormError) as caught:
        norms.build(norm, size, **told)
    message = str(caught.value)
    print(message)
    assert "\n" not in message
    return message


def test_a_file_is_imported_once_and_an_edited_one_anew(tmp_path: Path) -> None:
    body = "print('imported')\nCONSTANT = 1\n\n\nclass Mine(nn.LayerNorm):\n    constant = CONSTANT\n"
    file = file_with(tmp_path, body)
    first, again = norms.build(f"{file}:Mine", 8), norms.build(f"{file}:Mine", 8)
    assert type(first) is type(again)
    assert first.constant == 1
    file_with(tmp_path, body.replace("CONSTANT = 1", "CONSTANT = 2"))
    assert norms.build(f"{file}:Mine", 8).constant == 2
    assert first.constant == 1
    assert not (tmp_path / "__pycache__").exists()


def test_a_relative_path_and_one_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_with(tmp_path, MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("norm_of_mine.py", "./norm_of_mine.py", "~/norm_of_mine.py"):
        assert norms.build(f"{path}:Mine", 8).weight.shape == (8,)


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    file_with(tmp_path, MINE, name="neighbour_of_mine.py")
    file = file_with(tmp_path, "from neighbour_of_mine import Mine\n")
    path = list(sys.path)
    assert norms.build(f"{file}:Mine", 8).weight.shape == (8,)
    assert sys.path == path


def test_a_neighbour_hides_no_module_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorsys.py").write_text("raise AssertionError('the neighbour was imported')\n")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert norms.build(f"{file_with(tmp_path, 'import colorsys; Mine = nn.LayerNorm')}:Mine", 8).weight.shape == (8,)
    assert sys.modules["colorsys"].__file__ != str(tmp_path / "colorsys.py")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused(f"{tmp_path}/none.py:Mine") == f"cannot read {tmp_path}/none.py: No such file or directory"
    assert refused("no/folder/norm.py:Mine") == "cannot read no/folder/norm.py: No such file or directory"
    (tmp_path / "folder.py").mkdir()
    assert refused(f"{tmp_path}/folder.py:Mine").endswith("Is a directory")


@pytest.mark.parametrize(
    ("body", "line", "printed"),
    [
        ("x = 1 / 0\n", 6, "ZeroDivisionError: division by zero"),
        ("\nimport package_that_is_not_there\n", 7, "ModuleNotFoundError: No module named 'package_that_is_not_there'"),
        ("def f(:\n    pass\n", 6, "SyntaxError: invalid syntax"),
        ("raise SystemExit('bye')\n", 6, "SystemExit: bye"),
        ("F.layer_norm(torch.ones(3), (4,))\n", 6, "RuntimeError: Given normalized_shape=[4]"),
    ],
    ids=["division", "import", "syntax", "exit", "library"],
)
def test_a_file_that_does_not_import(body: str, line: int, printed: str, tmp_path: Path) -> None:
    file, modules = file_with(tmp_path, body), set(sys.modules)
    message = refused(f"{file}:Mine")
    assert message.startswith(f"{file} does not import: {printed}")
    assert message.endswith(f"({file}, line {line})")
    assert not [name for name in sys.modules.keys() - modules if name.startswith("norm_of_mine")]
    file_with(tmp_path, MINE)
    norms.build(f"{file}:Mine", 8)  # it is read again after the change


def test_a_name_that_a_file_does_not_have(tmp_path: Path) -> None:
    file = file_with(tmp_path, "One = type('One', (nn.Linear,), {})\n\n\nclass Other(One):\n    pass\n\n\nN = 3\n")
    both = "its torch.nn.Module classes are One, Other"
    for name in ("Mine", "N"):
        assert refused(f"{file}:{name}") == f"{file} has no class {name!r}; {both}"
    assert refused(f"{file}") == f"give a class as {file}:Name; {both}"
    assert refused(f"{file}:Othr").endswith("its torch.nn.Module classes are Other")


def test_a_package_that_is_not_there_or_has_no_such_class() -> None:
    for norm in ("nowhere:Mine", ":Mine", ".nowhere:Mine", "two words:Mine", "torch.nowhere:Mine"):
        assert refused(norm).startswith(f"{norm.removesuffix(':Mine')} does not import: ")
        assert refused(norm).endswith("; a class in your own file is path/to/file.py:Name")
    assert refused("torch.nn:LayrNorm").startswith("torch.nn has no class 'LayrNorm'; its torch.nn.Module classes are ")
    assert "LayerNorm" in refused("torch.nn:LayrNorm").partition(";")[2]
    assert refused("torch.nn:Zzz").endswith(" more")
    assert refused("torch.nn:functional").startswith("torch.nn has no class 'functional'")
    assert refused(nn.LayerNorm(8)).startswith("norm must be a class or a function that makes one, got a module")
    assert refused(dict).endswith("is a class, but not a torch.nn.Module")
    assert refused(lambda *_, **__: "a norm").endswith("makes a str, not a torch.nn.Module")


def test_an_error_in_a_constructor(tmp_path: Path) -> None:
    file = file_with(
        tmp_path,
        "class Fragile(nn.Module):\n"
        "    def __init__(self, size, eps=1e-6):\n"
        "        super().__init__()\n"
        "        torch.ones(3) @ torch.ones(4)\n",
    )
    message = refused(f"{file}:Fragile", eps=1e-5)
    assert message.startswith("Fragile(8, eps=1e-05) raised RuntimeError: ")
    assert message.endswith(f"({file}, line 9)")
