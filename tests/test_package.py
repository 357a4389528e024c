"""What is installed is whole: the presets and the demo travel in the wheel, and work from where it puts them."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import minigpt

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "minigpt" / "demo"
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
}

needs_demo = pytest.mark.skipif(
    not DEMO.is_dir(), reason="the demo model is not in this checkout: scripts/demo/train.py makes it"
)

# Run where nothing of the repository is at hand but what PYTHONPATH names.
WITHIN = """
import json, sys
from pathlib import Path
import torch, minigpt
from minigpt.config import presets_folder

def parameters(name):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in minigpt.GPT2(minigpt.GPT2Config.preset(name)).parameters())

names = sorted(path.stem for path in presets_folder().glob("*.json"))
found = {name: parameters(name) for name in names}
print(json.dumps({"file": minigpt.__file__, "version": minigpt.__version__, "parameters": found,
                  "norms": sorted(minigpt.norms.available())}))
"""


def run_installed(place: Path, *command: str) -> str:
    """What a command prints that finds minigpt in ``place`` and stands somewhere else."""
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_works_from(place: Path) -> None:
    found = json.loads(run_installed(place, "-c", WITHIN))
    assert Path(found["file"]).is_relative_to(place), "another minigpt was imported"
    assert found["version"] == minigpt.__version__
    assert PARAMETERS.items() <= found["parameters"].items()
    assert {"fused", "textbook"} <= set(found["norms"])


def test_a_package_laid_out_as_the_wheel_is(tmp_path: Path) -> None:
    """The package and what pyproject.toml forces into it, copied by hand: needs no build tool."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    place = tmp_path / "site"
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in wheel["force-include"].items():
        shutil.copytree(ROOT / source, place / target)
    assert_works_from(place)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_holds_the_presets_and_nothing_of_the_repository(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for preset in PARAMETERS:
        assert f"minigpt/configs/{preset}.json" in names
    assert all(name.startswith(("minigpt/", "minigpt-")) for name in names)
    assert not [name for name in names if Path(name).name.startswith(("test_", "conftest"))]
    assert len(names) == len(set(names))
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_is_small(wheel: Path) -> None:
    size = wheel.stat().st_size
    print(f"{size} bytes, at most 4.5 MB")
    assert size < 4_500_000


def test_the_wheel_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert_works_from(tmp_path / "site")


@needs_demo
def test_the_wheel_holds_the_demo(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {f"minigpt/demo/{path.name}" for path in DEMO.iterdir() if path.is_file()}
    assert {"minigpt/demo/config.json", "minigpt/demo/model.safetensors", "minigpt/demo/tokenizer.json"} <= wanted
    assert wanted <= set(names)


@needs_demo
def test_the_demo_writes_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    words = ("-m", "minigpt", "generate", "Once upon a time", "--seed", "1", "--max-new-tokens", "20")
    text = run_installed(tmp_path / "site", *words)
    assert text.startswith("Once upon a time")
    assert len(text) > 40


@needs_demo
def test_the_demo_is_of_the_size_it_should_be() -> None:
    size = sum(path.stat().st_size for path in DEMO.iterdir())
    print(f"{size} bytes, at most 4 MB")
    assert size <= 4_000_000


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "minigpt/__init__.py"
    assert project["project"]["scripts"] == {"minigpt": "minigpt.cli:main"}
