"""The changes of "To add ..." in docs/architecture.md, each a patch in tests/newcomer of at most two files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

import minigpt

PACKAGE, PATCHES = Path(minigpt.__file__).parent, Path(__file__).with_name("newcomer")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package to change."""
    return shutil.copytree(PACKAGE, tmp_path / "minigpt", ignore=shutil.ignore_patterns("__pycache__"))


def change(package: Path, name: str) -> None:
    """Apply a patch to the copy. Its context may have moved, and one line of it is enough."""
    patch = PATCHES / f"{name}.patch"
    assert 1 <= patch.read_text(encoding="utf-8").count("diff --git") <= 2, "it changes more than two files"
    words = ["git", "apply", "-C1", "--whitespace=nowarn", str(patch)]
    done = subprocess.run(words, cwd=package.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(patch.stem for patch in PATCHES.glob("*.patch")))
def test_a_change_fits_the_package_as_it_is(package: Path, name: str) -> None:
    change(package, name)


def python(package: Path, *words: object) -> str:
    """What a process of the changed package prints."""
    environment = os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment, cwd=package.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_to_add_a_norm(package: Path) -> None:
    change(package, "norm")
    program = (
        "import torch, minigpt\n"
        "print(minigpt.norms.build('centred', 3)(torch.tensor([1.0, 2.0, 6.0])).tolist())\n"
        "print(type(minigpt.from_pretrained('demo', norm='centred', device='cpu').ln_f).__name__)\n"
        "print(minigpt.norms.available()['centred'].summary)\n"
    )
    assert python(package, "-c", program).splitlines() == [
        "[-2.0, -1.0, 3.0]",
        "Centred",
        "Subtracts the mean of the row, and does not divide.",
    ]


@pytest.mark.thorough
def test_to_add_a_setting(package: Path) -> None:
    change(package, "setting")
    program = (
        "import torch, minigpt\n"
        "from minigpt.generation import warp\n"
        "print(warp(torch.tensor([[2.0, 1.9, -3.0]]), top_a=0.2).isfinite().tolist())\n"
        "try: warp(torch.zeros(1, 3), top_a=2)\n"
        "except minigpt.GenerationError as error: print(error.argument)\n"
    )
    assert python(package, "-c", program) == "[[True, True, False]]\ntop_a\n"
    words = ("generate", "Once", "--top-a", "0.01", "--max-new-tokens", "2", "--json")
    assert json.loads(python(package, "-m", "minigpt", *words))["settings"]["top_a"] == 0.01
    assert "Rare ones go." in python(package, "-m", "minigpt", "generate", "--help")


@pytest.mark.thorough
def test_to_add_a_figure(package: Path, tmp_path: Path) -> None:
    change(package, "figure")
    files = ("--html", tmp_path / "page", "--json", tmp_path / "json")
    out = python(package, "-m", "minigpt", "parity", "--prompt", "Once upon", *files)
    assert json.loads((tmp_path / "json").read_text())["distribution"]["kl_least"] >= 0
    assert all("KL divergence, least" in text for text in (out, (tmp_path / "page").read_text()))


@pytest.mark.thorough
def test_to_add_an_option_of_opening_a_model(package: Path) -> None:
    change(package, "option")
    program = (
        "import minigpt\n"
        "print(minigpt.from_pretrained('demo', fold=True).ln_f.weight.std().item() < 1e-6)\n"
        "print(minigpt.Recipe(fold=True).command(), minigpt.parity('demo', fold=True, prompts=['Once']).passed)\n"
    )
    assert python(package, "-c", program) == "True\n['--fold'] True\n"
    for command in ("generate", "parity", "convert", "perplexity", "sites", "serve", "finetune"):
        assert "Fold norms into the next layer." in python(package, "-m", "minigpt", command, "--help")


@pytest.mark.thorough
def test_to_add_a_checkpoint_family(package: Path, tmp_path: Path) -> None:
    change(package, "family")
    model = minigpt.from_pretrained("demo", device="cpu")
    minigpt.save_pretrained(model, tmp_path / "mine")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    linears = [name for name in tensors if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and "weight" in name]
    tensors |= {name: tensors[name].T.contiguous() for name in linears} | {"embed.weight": tensors.pop("wte.weight")}
    save_file(tensors, tmp_path / "mine" / "model.safetensors")
    program = (
        "import sys, minigpt\n"
        "one, other = (minigpt.from_pretrained(source, device='cpu').state_dict() for source in sys.argv[1:])\n"
        "print(one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one))\n"
    )
    assert python(package, "-c", program, "demo", tmp_path / "mine") == "True\n"


@pytest.mark.thorough
def test_to_add_a_command(package: Path) -> None:
    (package / "cli/hello.py").write_text(
        'def hello(*, name: str = "world") -> None:\n    """Greet.\n\n    Args:\n        name: Who is greeted.\n\n'
        '    Examples:\n        minigpt hello --name you\n    """\n    print(f"hello {name}")\n'
    )
    commands = package / "cli/commands.py"
    commands.write_text(commands.read_text().replace("COMMANDS = (", 'COMMANDS = (\n    "hello",'))
    assert python(package, "-m", "minigpt", "hello", "--name", "you") == "hello you\n"
    shown = python(package, "-m", "minigpt", "hello", "--help")
    assert all(words in shown for words in ("Who is greeted.", "minigpt hello --name you"))
    assert "Greet." in python(package, "-m", "minigpt", "--help")
