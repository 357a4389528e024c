"""The wheel is whole: the presets and the demo travel in it, and work from where it puts them."""

import fnmatch
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import minigpt

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "minigpt" / "demo"

WITHIN = "import minigpt; print(minigpt.__file__, minigpt.__version__, minigpt.GPT2Config.preset('gpt2').n_embd)"


@pytest.fixture(scope="module", params=["with a compiler", "without a compiler"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the sdist."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    assert not list(source.rglob("*.so"))
    without = {"CC": "/nonexistent"} if request.param == "without a compiler" else {}
    subprocess.run([*build, "wheel"], cwd=source, check=True, capture_output=True, env=os.environ | without)
    (file,) = folder.glob("*.whl")
    tag = "any" if without else f"{sys.platform}_{platform.machine()}" if sys.platform == "linux" else "macosx_11_0_*"
    assert fnmatch.fnmatch(file.name, f"minigpt-{minigpt.__version__}-py3-none-{tag}.whl")
    return file


@pytest.mark.thorough
def test_the_wheel_holds_what_is_needed_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"minigpt/configs/{path.name}" for path in (ROOT / "configs").glob("*.json")}
    expected |= {f"minigpt/demo/{path.name}" for path in DEMO.iterdir() if path.is_file()} | {"minigpt/py.typed"}
    assert expected <= set(names)
    assert all(name.startswith(("minigpt/", "minigpt-")) for name in names)
    assert len(names) == len(set(names))
    assert any(name.endswith("licenses/LICENSE") for name in names)
    print(f"{wheel.stat().st_size} bytes, at most 5 MB")
    assert wheel.stat().st_size < 5_000_000


@pytest.mark.thorough
def test_the_wheel_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Where there is no compiler. It decodes with the kernel if one is inside."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MINIGPT_")} | {
        "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "", "CC": "/nonexistent",
    }  # fmt: skip

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    file, version, width = run("-c", WITHIN).split()
    assert Path(file).is_relative_to(site), "another minigpt was imported"
    assert (version, width) == (minigpt.__version__, "768")
    text = run("-m", "minigpt", "generate", "Once upon a time", "--seed", "1", "--max-new-tokens", "20")
    assert text.startswith("Once upon a time")
    assert len(text) > 40
    decoding = json.loads(run("-m", "minigpt", "info", "--json"))["decoding"]
    assert decoding.startswith("PyTorch" if "-any" in wheel.name else "kernel"), decoding
