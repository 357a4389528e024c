"""What every engine has: an extra that an error names, and an option of the command line."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

import minigpt
from minigpt import engines
from minigpt.choices import ENGINES
from minigpt.errors import to_install

PACKAGES = {"onnx": "onnxruntime", "gguf": "llama_cpp", "openvino": "openvino", "ctranslate2": "ctranslate2"}


@pytest.mark.parametrize("kind", ENGINES)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    package = PACKAGES[kind].replace("llama_cpp", "llama-cpp-python")
    said = rf"^a file of {kind} needs {package}, which is not installed; {re.escape(to_install(kind))}$"
    with pytest.raises(minigpt.ConfigError, match=said):
        getattr(engines, kind)(tmp_path / "file")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert package in [extra.partition(">")[0] for extra in project["optional-dependencies"][kind]]


def test_every_engine_is_a_function_of_the_room() -> None:
    assert sorted(ENGINES) == sorted(name for name in engines.__all__ if name != "Engine")
