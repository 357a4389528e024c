"""minigpt bench generate: everybody writes what was asked for, and the figures are those of the times measured."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers import small_model

import minigpt
from minigpt import ConfigError, MiniGPTError
from minigpt.bench import contestant
from minigpt.bench.contestant import Contestant, in_turns
from minigpt.bench.generate import BenchPlan, bench_generate, bench_summary, spread
from minigpt.bench.programs import Memory, Minigpt, Transformers, weight_bytes
from minigpt.cli.commands import app_of
from minigpt.cli.output import show
from minigpt.report.numerals import times

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [1, 2, 3]]


def test_programs_take_turns_and_a_spread_is_the_median_and_the_fifths() -> None:
    order = iter(range(6))
    assert in_turns({"a": lambda: next(order), "b": lambda: next(order)}, range(3)) == {"a": [0, 2, 4], "b": [1, 3, 5]}
    assert spread([5, 1, 2, 4, 3, 6]) == {"median": 3.5, "p20": 2, "p80": 5}


@pytest.mark.parametrize("program", [Minigpt, Transformers, Memory])
def test_a_program_writes_what_is_due(folder: Path, program: Any) -> None:
    loaded = program(str(folder), PROMPTS, "float32")
    assert loaded.generate(4) == 3 * 4
    loaded.prefill()


@pytest.mark.parametrize(("kind", "each"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_the_limit_reads_every_matrix_once(folder: Path, kind: str, each: int) -> None:
    model = minigpt.from_pretrained(folder, device="cpu")
    numbers = {2: 0, 1: 0}
    for name, parameter in model.named_parameters():
        numbers[parameter.ndim] += parameter.numel() * (name != "wpe.weight")
    exact = each * numbers[2] + max(each, 2) * numbers[1]
    measured = Memory(str(folder), PROMPTS, kind).step_bytes
    assert measured == exact if kind != "int8" else exact < measured < 2 * exact, "int8 has scales, and zeros behind"


def test_prompts_are_ragged_in_a_batch_and_the_same_every_time() -> None:
    plan = BenchPlan(batch=16, prompt_tokens=64)
    prompts = plan.prompts(50)
    assert [len(prompts[0]), len(prompts[-1])] == [32, 64]
    assert sorted(map(len, prompts)) == [len(prompt) for prompt in prompts]
    assert prompts == plan.prompts(50)
    assert [len(prompt) for prompt in BenchPlan(prompt_tokens=7).prompts(50)] == [7]
    alike = BenchPlan(batch=3, same_length=True, prompt_tokens=7)
    assert [len(prompt) for prompt in alike.prompts(50)] == [7, 7, 7]


def test_no_call_reads_a_prompt_that_another_call_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[list[int]]] = []

    class Listener:
        def __init__(self) -> None:
            self.prompts = [list(range(20)), list(range(100, 130))]

        def prefill(self) -> None:
            read.append(self.prompts)

        def generate(self, new: int) -> int:
            self.prefill()
            return 2 * new

    monkeypatch.setattr(contestant, "_program", Listener())
    for _ in range(2):
        contestant._timed_round(2, 3)
    assert len(read) == 6
    for texts in zip(*read, strict=True):
        assert len({tuple(text) for text in texts}) == 6, "each is new"
        assert len({tuple(sorted(text)) for text in texts}) == 1, "of the same tokens"


def test_kinds_are_as_written_or_the_same_as_ours() -> None:
    plan = BenchPlan(kind="int8", against=("transformers", "transformers:bfloat16"))
    named = [("minigpt", "int8"), ("transformers", "float32"), ("transformers", "bfloat16"), ("memory", "int8")]
    assert list(plan.programs) == named
    assert list(BenchPlan(against=()).programs) == [(name, "float32") for name in ("minigpt", "undrafted", "memory")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "vllm"], "vllm"),
        (["--quantize", "int8", "--dtype", "bfloat16"], "--quantize int8 computes in float32"),
        (["--prompt-tokens", "4000"], "exceed the model's context of"),
    ],
)
def test_a_bench_that_cannot_run_is_refused(folder: Path, options: list[str], message: str) -> None:
    with pytest.raises(MiniGPTError, match=message):
        app_of(["bench"])(["bench", "generate", "--model", str(folder), *options], standalone_mode=False)


def test_other_programs_cannot_run_other_norms(tmp_path: Path) -> None:
    model = small_model()
    minigpt.swap_norms(model, "rms")
    minigpt.save_pretrained(model, tmp_path)
    with pytest.raises(ConfigError, match="model has other norms than LayerNorm, rms, which no other program has"):
        bench_generate(BenchPlan(model=str(tmp_path), prompt_tokens=4, new_tokens=4))


@pytest.mark.thorough
def test_a_program_that_fails_or_dies_says_so(folder: Path) -> None:
    options: dict[str, Any] = dict(folder=str(folder), prompts=[[1]])
    home = "minigpt.bench.programs:Minigpt"
    with pytest.raises(MiniGPTError, match=r"Minigpt could not be timed: dtype must be .*got 'fp32'"):
        Contestant(home, 2, kind="fp32", **options)
    with pytest.raises(MiniGPTError, match="Minigpt could not be timed: TypeError"):
        Contestant(home, 2, kind="float32", cache="large", **options)
    with closing(Contestant(home, 2, kind="float32", **options)) as contestant:
        assert contestant.run()["total_ms"] > 0
        next(iter(contestant._pool._processes.values())).kill()
        with pytest.raises(MiniGPTError, match="Minigpt could not be timed: BrokenProcessPool"):
            contestant.run()


@pytest.mark.thorough
def test_the_figures_follow_from_the_times(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "generate", "--model", str(folder), "--prompt-tokens", "4", "--new-tokens", "3"]
    app_of(command)([*command, "--repeats", "1", "--draft", "int8", "--json", "-"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    ours, undrafted, others = report["contestants"]
    assert report["environment"]["processor"]
    assert [ours["name"], undrafted["name"], others["name"]] == ["minigpt", "undrafted", "transformers"]
    assert 0 < ours["prefill_ms"]["p20"] == ours["prefill_ms"]["median"]
    total, first = ours["total_ms"]["median"], ours["first_token_ms"]["median"]
    assert ours["tokens_per_second"] == pytest.approx(1000 * 3 / total)
    assert ours["decode_tokens_per_second"] == pytest.approx(1000 * 2 / (total - first))
    assert ours["memory_mb"] > 0
    ratio = report["times_as_fast_as"]["transformers:float32"]["total_ms"]
    assert ratio == pytest.approx(others["total_ms"]["median"] / total)
    limit = report["limit"]
    assert limit["bytes_per_step"] == weight_bytes(minigpt.from_pretrained(folder, device="cpu"))
    assert limit["by_memory"] == pytest.approx(limit["bandwidth_gb_s"] * 1e9 / limit["bytes_per_step"])
    share = undrafted["decode_tokens_per_second"] / limit["by_memory"]
    assert report["share_of_limit"]["by_memory"] == pytest.approx(share)
    show(bench_summary(report), report, None)
    assert times(ratio) in capsys.readouterr().out
