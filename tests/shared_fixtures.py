"""What every test runs under: checked shapes, a fixed seed, two threads, full float32 products, repeatable examples.

Here stand the fixtures that files share as well. minigpt is imported here first, and nowhere before: an import hook can
check only what is imported after it.
"""

import gc
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxtyping
import pytest
import torch
from command_line import Ended, Run
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

    import minigpt

assert "minigpt" not in sys.modules, "minigpt was imported before its shapes could be checked"
if importlib.util.find_spec("beartype"):
    import shapes

    shapes.install()

# Without a GPU, Triton interprets its kernels on the CPU. It is told so before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # a core for each process
torch.set_float32_matmul_precision("highest")  # no TF32 on a GPU: an exact comparison needs full products

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("repeatable")


# Imports make a million objects that stay. Python searches for no garbage meanwhile, and treats them as old afterwards.
# They do not stay frozen: minigpt asks for the number of frozen objects, and Python counts them one by one.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    collected = yield
    gc.freeze()
    gc.unfreeze()
    gc.enable()
    return collected


GPUS = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``gpu`` where there is none."""
    if not GPUS:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is run inside this process does not set up what belongs to a process of its own."""
    monkeypatch.setattr("minigpt.machine.settle_memory", lambda: None)


@pytest.fixture(autouse=True)
def _undiagnosed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FAIL is diagnosed where a test is about that, or asks for it: a diagnosis takes a second."""
    if request.module.__name__ != "test_mistakes":
        monkeypatch.setattr("minigpt.judge.judgement.QUICK", 0)


# What many tests read and none changes: a test that damages a model or a folder copies it first.


@pytest.fixture(scope="session")
def hf_model() -> "GPT2LMHeadModel":
    """transformers' GPT-2 of two layers, whose logits are far from uniform."""
    from checkpoints import reference  # not before its shapes are checked

    return reference(std=0.3)


@pytest.fixture(scope="session")
def folder(hf_model: "GPT2LMHeadModel", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of ``hf_model``, without a tokenizer."""
    from checkpoints import saved

    return saved(hf_model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer with a tokenizer of 300 tokens, and a text for it."""
    import checkpoints

    place = checkpoints.talking(tmp_path_factory.mktemp("talking"), n_positions=128)
    (place / "text").write_text("the dog saw the cat and the cat ran. " * 9, encoding="utf-8")
    return place


@pytest.fixture(scope="session")
def original(folder: Path) -> "minigpt.Original":
    """What transformers says of ``folder`` at the prompts of judgements.py, gradients too."""
    from judgements import PROMPTS

    import minigpt

    return minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=4, gradients=True, device="cpu")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``minigpt`` with these words within this process, at a terminal wide enough for every line."""
    from minigpt.cli import main

    monkeypatch.setenv("COLUMNS", "500")

    def call(*words: object, stdin: bytes | io.BytesIO = b"") -> Ended:
        monkeypatch.setattr(sys, "argv", ["minigpt", *map(str, words)])
        stream = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, empty, in which this process makes its temporary files during a test."""
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    return tmp_path / "temp"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be looked up on the hub fails with the hub's message, and not after a look-up."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def registered(offline: None) -> Iterator[None]:
    """Our class is transformers' for GPT-2 during a test, without the network and without warnings."""
    import transformers

    import minigpt

    transformers.utils.logging.set_verbosity_error()
    minigpt.hf.register()
    yield
    minigpt.hf.unregister()
    transformers.utils.logging.set_verbosity_warning()


@pytest.fixture(scope="session", params=["cpu", *GPUS])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the model is tested on: the CPU always, CUDA where there is one."""
    return torch.device(request.param)


@pytest.fixture(params=["cpu", *GPUS])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton's kernels run in this process: they are interpreted, or compiled, but not both."""
    from minigpt import norms  # not before its shapes are checked
    from minigpt.norms.triton import interpreting

    if reason := norms.available()["triton"].reason:
        pytest.skip(f"the triton norm {reason}")
    if request.param == "cpu" and not interpreting():
        pytest.skip("on a machine with a GPU the kernels are compiled for it, not interpreted on the CPU")
    return torch.device(request.param)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for what a page does."""
    playwright = pytest.importorskip("playwright.sync_api", reason="it drives the browser and comes with minigpt[dev]")
    names = ("chromium", "chromium-browser", "google-chrome")
    if (executable := next(filter(None, map(shutil.which, names)), None)) is None:
        pytest.skip("there is no Chromium on this machine; apt-get install chromium brings one")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No shape checks, as a user runs it: for a test of what the project itself says to an input of the wrong kind."""
    was = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", was)
