"""The steps of "To add ...": one new file, and at most one line elsewhere, as the docstrings of the rooms say."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors.torch import save_file

import minigpt
from minigpt.checkpoint import formats
from minigpt.norms import registry

PACKAGE = Path(minigpt.__file__).parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package to write new files into."""
    return shutil.copytree(PACKAGE, tmp_path / "minigpt", ignore=shutil.ignore_patterns("__pycache__"))


def python(folder: Path, *words: str) -> str:
    """What a process of the copied package prints."""
    environment = os.environ | {"PYTHONPATH": str(folder.parent), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(docstring: str | None, start: str) -> str:
    """The indented example of a docstring, from the line that starts so."""
    assert docstring is not None
    lines = docstring.partition("    " + start)[2].splitlines()
    block = [start + lines[0], *(line[4:] for line in lines[1 : lines.index("") if "" in lines else None])]
    return "\n".join(block)


@pytest.mark.thorough
def test_to_add_a_setting(package: Path) -> None:
    """A key of the table, and a processor of its name: Python and the shell have it."""
    settings, processors = package / "generation/settings.py", package / "generation/processors.py"
    key = '    top_a: Annotated[float | None, Setting("Rare ones go.", between(0, 1), shapes_draw=True)]\n    top_k:'
    settings.write_text(settings.read_text().replace("    top_k:", key, 1))
    make = (
        "def top_a(a):\n"
        "    return lambda logits, _: logits.masked_fill(logits.softmax(-1) < a, -torch.inf)\n\n\nPROCESSORS: "
    )
    code = processors.read_text().replace("PROCESSORS: ", make, 1).replace("top_k, top_p", "top_a, top_k, top_p")
    processors.write_text(code)
    program = (
        "import torch, minigpt\n"
        "from minigpt.generation import warp\n"
        "print(warp(torch.tensor([[2.0, 1.9, -3.0]]), top_a=0.2).isfinite().tolist())\n"
        "try: warp(torch.zeros(1, 3), top_a=2)\n"
        "except minigpt.GenerationError as error: print(error.argument)\n"
    )
    assert python(package, "-c", program) == "[[True, True, False]]\ntop_a\n"
    words = ("generate", "Once", "--top-a", "0.01", "--max-new-tokens", "2", "--json")
    assert '"top_a": 0.01' in python(package, "-m", "minigpt", *words)
    assert "Rare ones go." in python(package, "-m", "minigpt", "generate", "--help")


def edit(file: Path, *changes: tuple[str, str]) -> None:
    """Put text in front of the first place of another text."""
    code = file.read_text()
    for before, new in changes:
        assert before in code
        code = code.replace(before, new + before, 1)
    file.write_text(code)


@pytest.mark.thorough
def test_to_add_an_option_of_opening_a_model(package: Path) -> None:
    """One file: Python and every command that opens a model have it."""
    edit(
        package / "recipe.py",
        ("    local_files_only: bool\n", "    fold: bool\n"),
        ("    local_files_only: bool = option(", '    fold: bool = option(False, "Fold norms.", kind=bool)\n'),
        ("        if self.center:\n", "        if self.fold:\n            fold_norms(model)\n"),
        ("center_writers, fit_on_text", "fold_norms, "),
    )
    program = (
        "import minigpt\n"
        "print(minigpt.from_pretrained('demo', fold=True).ln_f.weight.std().item() < 1e-6)\n"
        "print(minigpt.Recipe(fold=True).command(), minigpt.parity('demo', fold=True, prompts=['Once']).passed)\n"
    )
    assert python(package, "-c", program) == "True\n['--fold'] True\n"
    for command in ("generate", "parity", "convert", "perplexity", "sites", "serve", "finetune"):
        assert "Fold norms." in python(package, "-m", "minigpt", command, "--help")


@pytest.mark.thorough
def test_to_add_a_figure(package: Path, tmp_path: Path) -> None:
    """Where it is measured, and a line: the JSON, the terminal and the page have it."""
    edit(package / "judge/measures.py", ("            kl_median=", "            kl_least=float(kl.min()),\n"))
    line = '    kl_least: Annotated[float, Shown("KL divergence, least")]\n'
    edit(package / "report/fields.py", ("    kl_median: Annotated", line))
    words = ("-m", "minigpt", "parity", "--prompt", "Once upon", "--html", str(tmp_path / "page"), "--json")
    out = python(package, *words, str(tmp_path / "json"))
    assert '"kl_least"' in (tmp_path / "json").read_text()
    assert all("KL divergence, least" in text for text in (out, (tmp_path / "page").read_text()))


@pytest.mark.thorough
def test_to_add_a_norm(package: Path) -> None:
    """The example of the registry's docstring, in a new file. No other file changes."""
    (package / "norms/centred.py").write_text(
        "from minigpt.norms.registry import register\n"
        "from minigpt.norms.textbook import LayerNorm\n\n" + example(registry.__doc__, "@register(")
    )
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
    assert "centred" in python(package, "-m", "minigpt", "norms")


@pytest.mark.thorough
def test_to_add_a_checkpoint_family(package: Path, tmp_path: Path) -> None:
    """The example of its docstring, in the file of the families."""
    code = textwrap.dedent(str(formats.__doc__).partition("::\n")[2])
    families = package / "checkpoint/formats.py"
    families.write_text(families.read_text().replace("FORMATS = [", f"{code}\nFORMATS = [MINE, "))

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
    assert python(package, "-c", program, "demo", str(tmp_path / "mine")) == "True\n"
    assert "mine, model.safetensors" in python(package, "-m", "minigpt", "info", str(tmp_path / "mine"))


@pytest.mark.thorough
def test_to_add_a_command(package: Path) -> None:
    (package / "cli/hello.py").write_text(
        'def hello(*, name: str = "world") -> None:\n    """Greet.\n\n    Args:\n        name: Who is greeted.\n\n'
        '    Examples:\n        minigpt hello --name you\n    """\n    print(f"hello {name}")\n'
    )
    commands = package / "cli/__init__.py"
    commands.write_text(commands.read_text().replace("COMMANDS = (", 'COMMANDS = (\n    "hello",'))
    assert python(package, "-m", "minigpt", "hello", "--name", "you") == "hello you\n"
    said = python(package, "-m", "minigpt", "hello", "--help")
    assert all(words in said for words in ("Who is greeted.", "minigpt hello --name you"))
    assert "Greet." in python(package, "-m", "minigpt", "--help")
