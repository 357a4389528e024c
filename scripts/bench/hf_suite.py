"""transformers' own GPT-2 tests, on transformers' class and on minigpt's.

    python scripts/bench/hf_suite.py CHECKOUT SDIST --json docs/results/hf-suite.json

The folders hold a copy of transformers' ``tests/`` each; files of a later folder win. A source distribution ("pip
download transformers --no-binary :all: --no-deps") has the common tests of the installed version, and a checkout near
that version has the tests of GPT-2. Helper modules that neither has are left empty, and their tests with them. Nothing
is fetched. transformers' class is the control: a test counts if the control passes it.

Exit status 1: the control passes a test that minigpt's class does not, and that EXCEPTIONS does not list.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pytest
import transformers
import typer

import minigpt.hf
from minigpt.bench.generate import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of scripts

from bench.results import JsonFile, keep

NETWORKS = ("transformers", "minigpt")
SUITE = "tests/models/gpt2/test_modeling_gpt2.py"
EMPTY = {  # helpers of other suites, which the common tests import
    "tests/exporters/__init__.py": "",
    "tests/exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "tests/distributed_testing_utils.py": "def __getattr__(name):\n    return lambda *_, **__: lambda test: test\n",
}
EXCEPTIONS: dict[str, str] = {}  # a test that the control passes and ours does not: the reason

Folders = Annotated[list[Path], typer.Argument(help="Folders with transformers' tests/; a later one's files win.")]
Network = Annotated[str, typer.Option(help="Run the suite on this network alone, in this process.", hidden=True)]
Outcomes = Annotated[Path, typer.Option(help="Where that run writes its outcomes.", hidden=True)]


def main(
    folders: Folders, json_file: JsonFile = None, network: Network = "", outcomes: Outcomes = Path("outcomes.json")
) -> None:
    """Print, and with --json write, the outcome of every test on both networks."""
    if network:
        outcomes.write_text(json.dumps(run_suite(folders[0], network)), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as place:
        root = assemble(folders, Path(place))
        suite = {name: in_own_process(root, name) for name in NETWORKS}
    control, ours = suite["transformers"], suite["minigpt"]
    lost = sorted(test for test in control if control[test] == "passed" and ours.get(test) != "passed")
    results: dict[str, Any] = {
        "measured_on": environment(),
        "tests_of": {"transformers": version("transformers")},
        "counts": {name: count(actual) for name, actual in suite.items()},
        "lost": {test: EXCEPTIONS.get(test, "") for test in lost},
        "gained": sorted(test for test in control if control[test] == "failed" and ours.get(test) == "passed"),
        "tests": {test: {name: suite[name].get(test) for name in NETWORKS} for test in sorted(control)},
    }
    keep(results, json_file)
    print(json.dumps({name: results[name] for name in ("counts", "lost", "gained")}, indent=1))
    raise typer.Exit(any(test not in EXCEPTIONS for test in lost))


def assemble(folders: list[Path], root: Path) -> Path:
    """Put the folders' tests together, as transformers' suite expects to find them."""
    for folder in folders:
        for part in ("tests", "utils"):
            if (folder / part).is_dir():
                shutil.copytree(folder / part, root / part, dirs_exist_ok=True)
    if not (root / SUITE).is_file():
        raise typer.BadParameter(f"no folder has {SUITE}; give a checkout of transformers")
    for name, text in EMPTY.items():
        if not (root / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
    (root / "src").mkdir()
    (root / "src/transformers").symlink_to(Path(transformers.__file__).parent)  # pipeline tests read its sources
    (root / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return root


def in_own_process(root: Path, network: str) -> dict[str, str]:
    """Run the suite on a network; return the outcome of each test."""
    file = root / f"{network}.json"
    command = [sys.executable, os.path.abspath(__file__), str(root), "--network", network, "--outcomes", str(file)]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(root / "utils"), *sys.path]),
    }
    subprocess.run(command, check=True, cwd=root, env=os.environ | offline, stdout=sys.stderr)
    return json.loads(file.read_text(encoding="utf-8"))


def run_suite(root: Path, network: str) -> dict[str, str]:
    """Run the suite in this process, with minigpt's classes under transformers' names if ``network`` is "minigpt"."""
    if network == "minigpt":
        for name in ("GPT2Model", "GPT2LMHeadModel"):
            setattr(transformers, name, getattr(minigpt.hf, name))
    recorder = Recorder()
    pytest.main([str(root / SUITE), "--noconftest", "-q", "-p", "no:cacheprovider", "-W", "ignore"], plugins=[recorder])
    return recorder.outcomes


class Recorder:
    """A pytest plugin that keeps the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's phases and subtests. Leave out skipped subtests."""
        if report.skipped and hasattr(report, "context"):
            return
        test = report.nodeid.partition("::")[2]
        if self.outcomes.get(test, "passed") == "passed":
            self.outcomes[test] = report.outcome


def count(outcomes: dict[str, str]) -> dict[str, int]:
    """Return how many tests had each outcome."""
    actual = list(outcomes.values())
    return {kind: actual.count(kind) for kind in ("passed", "failed", "skipped")}


if __name__ == "__main__":
    typer.run(main)
