"""Time minigpt against others on one checkpoint and the same prompts, in turns, each in a separate process."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from minigpt.bench.bench_report import BenchReport, Limit, Measured
from minigpt.bench.contestants import convert_for_ctranslate2, weight_bytes
from minigpt.bench.llama import GGML_TYPES, write_gguf
from minigpt.checkpoint import from_pretrained, save_pretrained
from minigpt.config import GPT2Config
from minigpt.engine import GPT2
from minigpt.errors import ConfigError, MiniGPTError
from minigpt.measure.environment import environment
from minigpt.measure.steps import Progress, Steps
from minigpt.placement import DTYPES

OTHERS = {"transformers": "transformers", "ctranslate2": "ctranslate2", "llama.cpp": "llama_cpp"}  # name: module


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is timed.

    Attributes:
        model: a checkpoint, as ``from_pretrained`` takes it; None for random weights of the shape of ``preset``.
        preset: as ``GPT2Config.preset`` takes it.
        kind: "float32", "bfloat16", "float16", "float64" or "int8", what ours computes in.
        against: other contestants, each NAME or NAME:KIND, for example "transformers:float32", "ctranslate2:int8" or
            "llama.cpp:q8_0". llama.cpp's kinds are f32, f16, bf16 and q8_0.
        batch: rows; more than one are ragged, from half of ``prompt_tokens`` to all of them.
        compiled: whether our steps are compiled.
        draft: as in ``generate``; ours without drafts is then a contestant too, named "undrafted".

    Raises:
        ConfigError: if a number, a kind or a contestant is out of range or named twice, or a package is missing.
    """

    model: str | None = None
    preset: str = "gpt2"
    kind: str = "float32"
    against: tuple[str, ...] = ("transformers",)
    batch: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 64
    repeats: int = 7
    compiled: bool = False
    draft: str | None = None

    def __post_init__(self) -> None:
        for name, least in {"batch": 1, "prompt_tokens": 1, "new_tokens": 2, "repeats": 1}.items():
            if (given := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {given}; it must be {least} or more")
        for name, kind in self.contestants:
            known = tuple(GGML_TYPES.values()) if name == "llama.cpp" else (*DTYPES, "int8")
            if kind not in known:
                raise ConfigError(f"the kind of {name} must be one of {', '.join(known)}, got {kind!r}")
        for name in (entry.partition(":")[0] for entry in self.against):
            _require_installed(name)
        if twice := [one for one in self.contestants if self.contestants.count(one) > 1]:
            raise ConfigError(f"{' at '.join(twice[0])} is named twice; name each contestant once")

    @property
    def contestants(self) -> list[tuple[str, str]]:
        """(name, kind) of all, ours first."""
        theirs = [entry.partition(":") for entry in self.against]
        ours = [("minigpt", self.kind)] + [("undrafted", self.kind)] * bool(self.draft)
        return ours + [(name, kind or self.kind_of(name)) for name, _, kind in theirs]

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random ids, the same for all contestants."""
        shortest = self.prompt_tokens if self.batch == 1 else max(1, self.prompt_tokens // 2)
        lengths = torch.linspace(shortest, self.prompt_tokens, self.batch).round().int().tolist()
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]

    def kind_of(self, name: str) -> str:
        """Return the kind of a contestant that names none: ours, in its own words."""
        if name == "llama.cpp":
            return GGML_TYPES.get(self.kind, self.kind)
        return "float32" if name == "transformers" and self.kind == "int8" else self.kind


def bench_generate(plan: BenchPlan, progress: Progress | None = None) -> BenchReport:
    """Time every contestant and the limit ``plan.repeats`` times, in turns.

    Raises:
        CheckpointError, ConfigError: if the model cannot be loaded, or its context is too short.
        MiniGPTError: if a contestant's process failed.
    """
    plans = [("products", plan.kind), *plan.contestants]
    begin = Steps(progress, total=1 + len(plans) * (1 + plan.repeats))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as processes:
        folder = Path(temporary)
        begin("preparing the checkpoint")
        model = _prepared(plan, folder)
        prompts = plan.prompts(model.config.vocab_size)
        common = dict(folder=str(folder), prompts=prompts, new=plan.new_tokens)
        how = {
            "minigpt": {"compiled": plan.compiled, "draft": plan.draft},
            "llama.cpp": {"room": plan.prompt_tokens + plan.new_tokens},
        }
        running = []
        for name, kind in plans:
            begin(f"loading {name} at {kind}")
            if name == "ctranslate2":
                convert_for_ctranslate2(folder, kind)
            if name == "llama.cpp":
                write_gguf(folder, kind)
            spec = dict(common, name=name, kind=kind, how=how.get(name, {}))
            running.append(processes.enter_context(_process(spec)))
        for round_ in range(plan.repeats):
            for process in running:
                begin(f"round {round_ + 1} of {plan.repeats}: {process.name} at {process.kind}")
                process.run()
        products, *contestants = [
            Measured.of(process.name, process.kind, process.runs, process.end(), plan.batch, plan.new_tokens)
            for process in running
        ]
    return BenchReport(
        plan=dataclasses.asdict(plan),
        environment=environment(running[0].ready["threads"], "llama-cpp-python")
        | {"decoding": running[1].ready["decoding"]},
        contestants=contestants,
        limit=Limit.of(products, weight_bytes(model), plan.kind, plan.batch),
    )


def _prepared(plan: BenchPlan, folder: Path) -> GPT2:
    """Return the model, and write it to ``folder`` as a float32 checkpoint that all contestants can load."""
    if plan.model is None:
        torch.manual_seed(0)
        model = GPT2(GPT2Config.preset(plan.preset))
    else:
        model = from_pretrained(plan.model, device="cpu", dtype="float32")
    room = model.config.n_positions
    if plan.prompt_tokens + plan.new_tokens > room:
        raise ConfigError(
            f"{plan.prompt_tokens} prompt tokens and {plan.new_tokens} new ones exceed the model's context of {room}"
        )
    save_pretrained(model, folder)
    return model


class _Process:
    """A contestant in another process, and what it has measured."""

    def __init__(self, spec: dict[str, Any], pipes: subprocess.Popen[str], told: IO[str]) -> None:
        self.name, self.kind, self.pipes, self.told = spec["name"], spec["kind"], pipes, told
        self.ready = self._answer()
        self.runs: list[dict[str, float]] = []

    def run(self) -> None:
        assert self.pipes.stdin is not None
        self.pipes.stdin.write("\n")
        self.pipes.stdin.flush()
        self.runs.append(self._answer())

    def end(self) -> dict[str, float]:
        """End the process; return its first and last answers."""
        assert self.pipes.stdin is not None
        self.pipes.stdin.close()
        return self.ready | self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.pipes.stdout is not None
        line = self.pipes.stdout.readline()
        answer = json.loads(line) if line else {"error": self._end()}
        if "error" in answer:
            raise MiniGPTError(f"{self.name} could not be timed: {answer['error']}")
        return answer

    def _end(self) -> str:
        """Return how the process ended, and the last line that it printed."""
        status = self.pipes.wait()
        self.told.seek(0)
        said = [line.strip() for line in self.told if line.strip()]
        return f"its process ended with status {status}" + f": {said[-1][:300]}" * bool(said)


@contextmanager
def _process(spec: dict[str, Any]) -> Iterator[_Process]:
    command = [sys.executable, "-m", "minigpt.bench.worker", json.dumps(spec)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as told:
        pipes = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True)
        try:
            yield _Process(spec, pipes, told)
        finally:
            pipes.kill()
            pipes.wait()


def _require_installed(name: str) -> None:
    if name not in OTHERS:
        raise ConfigError(f"unknown contestant {name!r}; known are {', '.join(OTHERS)}")
    if importlib.util.find_spec(OTHERS[name]) is None:
        extra = "llama" if name == "llama.cpp" else "bench"
        raise ConfigError(f"{name} is not installed; pip install 'minigpt[{extra}]', or leave it out of --against")
