"""The status of a command: 1 is that of a verdict alone, whatever happens to the process or to its streams."""

import errno
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from checkpoints import talking
from command_line import Run, complaint

from minigpt.cli.commands import COMMANDS

# A call of each command, and its status where nothing happens
CALLS = {
    "generate": ("generate x --max-new-tokens 2 --greedy", 0),
    "parity": ("parity --prompt x --norm rms", 1),
    "norms": ("norms --check rms --as layer_norm", 1),
    "bench": ("bench generate --model demo --against= --repeats 1 --prompt-tokens 4 --new-tokens 2", 0),
    "convert": ("convert demo OUT", 0),
    "info": ("info demo", 0),
    "perplexity": ("perplexity demo TEXT", 0),
    "sites": ("sites demo --text TEXT", 0),
    "serve": ("serve --port 0", 0),
    "finetune": ("finetune --text TEXT --steps 1 --batch-size 1 --block-size 8 --out OUT", 0),
    "study": ("study STUDY --out OUT", 0),
}
QUICK = {("norms list", "full"), ("parity --help", "pipe")}
SHORT = {"norms list": ("norms", 0), "parity --help": ("parity --help", 0), "parity --compare": ("parity --compare", 2)}
STREAMS = {"closed": "{} >&-", "full": "{} > /dev/full", "pipe": "{} | true; exit ${{PIPESTATUS[0]}}"}


Fails = Callable[[str, BaseException], None]


class OwnError(BaseException):
    """As a panic of a library in Rust."""


def written(call: str, folder: Path) -> list[str]:
    (folder / "text.txt").write_text("Once upon a time there was a dog. " * 50)
    (folder / "study.toml").write_text('models = ["demo"]\nnorms = ["textbook"]\nprompts = ["Once"]\n')
    places = {
        "BROKEN": folder / "broken",
        "OUT": folder / "out",
        "TEXT": folder / "text.txt",
        "STUDY": folder / "study.toml",
    }
    return [str(places.get(word, word)) for word in call.split()]


def test_every_command_is_tried() -> None:
    assert CALLS.keys() == {*COMMANDS}


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Lets a command raise an error in its middle."""

    def fails(name: str, error: BaseException) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        for path in ("minigpt.machine.settle_memory", f"minigpt.cli.{name}.progress"):
            monkeypatch.setattr(path, fail, raising=False)

    return fails


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("x"), KeyError(1), RuntimeError("x"), OSError("no number"), SystemExit(1), OwnError("x")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_in_the_middle_is_70(run: Run, name: str, error: BaseException, fails: Fails, tmp_path: Path) -> None:
    fails(name, error)
    ended = run(*written(CALLS[name][0], tmp_path))
    assert (ended.status, ended.out) == (70, "")
    assert ended.err.startswith("Traceback")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EACCES])
def test_an_error_of_the_system_is_no_verdict(run: Run, number: int, fails: Fails) -> None:
    fails("info", OSError(number, os.strerror(number), "file"))
    if number == errno.EPIPE:
        assert run("info", "demo")[::2] == (141, "")
    else:
        assert complaint(run("info", "demo")) == f"error: file: {os.strerror(number)}\n"


def cases() -> list[object]:
    every = []
    for name in CALLS | SHORT:
        for stream in STREAMS:
            marks = () if (name, stream) in QUICK else pytest.mark.thorough
            if (name, stream) != ("serve", "closed"):  # it serves
                every.append(pytest.param(name, stream, marks=marks, id=f"{name}, {stream}"))
    return every


@pytest.mark.parametrize(("name", "stream"), cases())
def test_no_stream_gives_the_status_of_a_verdict(name: str, stream: str, tmp_path: Path) -> None:
    call, status = (CALLS | SHORT)[name]
    program = shlex.join([sys.executable, "-m", "minigpt", *written(call, tmp_path)])
    ended = subprocess.run(["bash", "-c", STREAMS[stream].format(program)], capture_output=True, text=True)
    due = {"closed": status, "full": 2, "pipe": 2 if status == 2 else 141}
    assert ended.returncode == due[stream], ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("stream", ["2> /dev/full", "2>&-"])
def test_an_error_that_cannot_be_written_keeps_its_status(stream: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m minigpt info no/such {stream}"
    assert subprocess.run(["bash", "-c", line]).returncode == 2


@pytest.mark.parametrize("stream", ["2> /dev/full", "2>&-"])
def test_a_fault_that_cannot_be_written_keeps_its_status(stream: str) -> None:
    code = "import minigpt.cli.commands as c; c.run = lambda words: 1 / 0; import minigpt.cli; minigpt.cli.program()"
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {stream}"
    assert subprocess.run(["bash", "-c", line]).returncode == 70


def test_a_closed_standard_input_is_an_empty_text() -> None:
    line = f"{shlex.quote(sys.executable)} -m minigpt generate - --max-new-tokens 2 --seed 1 <&-"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)
    assert re.search(r"\w", ended.stdout)


@pytest.mark.thorough
def test_a_norm_that_changes_the_dtype_is_no_layernorm(run: Run, tmp_path: Path) -> None:
    """It runs, so it is judged: that is a verdict."""
    (tmp_path / "own.py").write_text(
        "import torch\nclass Norm(torch.nn.LayerNorm):\n"
        "    def forward(self, x):\n        return super().forward(x).double()\n"
    )
    ended = run("norms", "--check", tmp_path / "own.py:Norm")
    assert (ended.status, ended.out[:4]) == (1, "FAIL")
    assert "changes the dtype: torch.float32 went in, torch.float64 came out" in " ".join(ended.out.split())


@pytest.mark.parametrize(
    "words", [("parity", "--prompt", "x", "--norm"), ("norms", "--check")], ids=lambda words: words[0]
)
def test_whatever_a_norm_raises_is_a_sentence(run: Run, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Own(BaseException): pass\ndef norm(x, weight, bias, eps): raise Own('a panic')\nnorm.arrays = 'numpy'\n"
    )
    assert "norm raised Own: a panic" in complaint(run(*words, tmp_path / "own.py:norm"))


EARLY = {
    "parity --model BROKEN --norm rms --budget kll=1": "cannot read 'kll=1' in the budget",
    "parity --model BROKEN --norm rms --fit nofile": "cannot read nofile",
    "parity --original nofile --norm rms --budget kll=1": "cannot read 'kll=1' in the budget",
    "generate x --model BROKEN --norm frozen --fit nofile": "cannot read nofile",
    "generate --model BROKEN --prompts nofile --out OUT": "cannot read nofile",
    "convert BROKEN OUT --norm frozen --fit nofile": "cannot read nofile",
    "perplexity BROKEN nofile": "cannot read nofile",
    "perplexity BROKEN TEXT --norm frozen --fit nofile": "cannot read nofile",
    "sites BROKEN --text nofile": "cannot read nofile",
    "serve --model BROKEN --norm frozen --fit nofile --port 0": "cannot read nofile",
    "finetune --model BROKEN --text TEXT --steps 1 --norm frozen --fit nofile --out OUT": "cannot read nofile",
    "finetune --model BROKEN --text TEXT --steps 1 --lora 2 --out OUT": "training needs peft, which is not installed",
    "finetune --model BROKEN --text owner/name --steps 1 --out OUT": "training needs datasets, which is not installed",
}


@pytest.mark.parametrize("call", EARLY)
def test_what_can_be_checked_is_checked_before_the_model_is_read(
    run: Run,
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of the model cannot be read, and nothing says so."""
    broken = talking(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    assert transformers.Trainer  # whose module imports peft by itself
    for name in ("peft", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert EARLY[call] in complaint(run(*written(call, tmp_path)))
