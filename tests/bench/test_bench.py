"""minigpt bench generate: everybody writes what was asked for, and the figures are those of the times measured."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, saved
from helpers import assert_within, rms
from rich.console import Console

import minigpt
from minigpt import ConfigError, GenerationError, MiniGPTError
from minigpt.bench import generate as bench_generation
from minigpt.bench.bench_report import BenchReport, Limit, Measured, bench_summary
from minigpt.bench.contestants import (
    CONTESTANTS,
    READ,
    TIMES,
    CTranslate2,
    Minigpt,
    Products,
    Transformers,
    convert_for_ctranslate2,
    require_all,
    weight_bytes,
)
from minigpt.bench.generate import BenchPlan, bench_generate
from minigpt.bench.llama import LlamaCpp, write_gguf
from minigpt.cli import app
from minigpt.measure.stopwatch import Spread

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [1, 2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference(std=0.3), tmp_path_factory.mktemp("bench"))


def test_a_spread_is_the_median_and_the_fifths() -> None:
    assert Spread.of([5, 1, 2, 4, 3, 6]) == Spread(3.5, 2, 5)
    assert Spread.of([7]) == Spread(7, 7, 7)


@pytest.mark.parametrize("name", ["minigpt", "transformers", "products"])
def test_a_contestant_writes_what_it_is_asked_for(folder: Path, name: str) -> None:
    contestant = CONTESTANTS[name](str(folder), PROMPTS, "float32")
    assert contestant.generate(4) == 3 * 4
    contestant.prefill()


def test_ours_and_transformers_read_the_same_prompts_to_the_same_logits(folder: Path) -> None:
    ours, theirs = Minigpt(str(folder), PROMPTS, "float32"), Transformers(str(folder), PROMPTS, "float32")
    torch.testing.assert_close(ours.prefill(), theirs.prefill(), rtol=1e-4, atol=1e-4)


def test_int8_is_a_kind_of_ours_alone(folder: Path) -> None:
    assert Minigpt(str(folder), PROMPTS, "int8").model.quantize == "int8"
    with pytest.raises(ConfigError, match="compare with transformers:float32"):
        Transformers(str(folder), PROMPTS, "int8")


def test_ctranslate2_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    place = saved(reference(std=0.3), tmp_path)
    convert_for_ctranslate2(place, "int8")
    contestant = CTranslate2(str(place), PROMPTS, "int8")
    assert contestant.generate(6) == 3 * 6
    contestant.prefill()
    with pytest.raises(ConfigError, match="CTranslate2 has no float64"):
        convert_for_ctranslate2(place, "float64")


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_llama_cpp_computes_our_logits(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    torch.manual_seed(0)
    model = minigpt.GPT2(minigpt.GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4)).eval()
    minigpt.save_pretrained(model, tmp_path)
    write_gguf(tmp_path, kind)
    contestant = LlamaCpp(str(tmp_path), PROMPTS, kind, room=32)
    given = contestant.prefill()
    with torch.no_grad():
        wanted = torch.stack([model(torch.tensor([prompt]))[0, -1] for prompt in PROMPTS])
    assert_within(rms(given - wanted), 2e-2 * rms(wanted), rms(wanted), f"llama.cpp at {kind}")
    assert contestant.generate(6) == 3 * 6


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_the_limit_reads_every_matrix_once(folder: Path, kind: str) -> None:
    products = Products(str(folder), PROMPTS, kind)
    model = minigpt.from_pretrained(folder, device="cpu")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "wpe.weight"]
    config = model.config
    shapes = {(p.shape[1], p.shape[0]) if p is model.wte.weight else tuple(p.shape) for p in matrices}
    given = products.step()
    assert len(given) == len(matrices)
    assert {(x.shape[-1], y.shape[-1]) for (_, x), y in zip(products.products, given, strict=True)} == shapes
    assert given[-1].shape == (len(PROMPTS), 1, config.vocab_size)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert weight_bytes(model) == 4 * (sum(p.numel() for p in matrices) + vectors)


def measured(name: str, total: float, **fields: Any) -> Measured:
    runs = [{"prefill_ms": 10.0, "first_token_ms": 20.0, "total_ms": total, "total_cpu_ms": total}] * 3
    ends = {"peak_mb": 300.0, "bare_mb": 100.0, "compilations": 0}
    return dataclasses.replace(Measured.of(name, "float32", runs, ends, batch=2, new=8), **fields)


def test_figures_follow_from_the_times() -> None:
    ours, theirs = measured("minigpt", 160.0), measured("transformers", 240.0)
    assert ours.tokens_per_second == pytest.approx(100)  # 2 rows of 8 tokens in 160 ms
    assert ours.decode_tokens_per_second == pytest.approx(100)  # 2 rows of 7 tokens in 140 ms
    assert ours.memory_mb == 200
    limit = Limit.of(measured("products", 80.0), 40_000_000, "int8", batch=2)
    assert limit.bandwidth_gb_s == pytest.approx(READ * TIMES / 0.010 / 1e9)  # in 10 ms
    assert limit.bytes_per_step == 10_000_000
    assert limit.by_memory == pytest.approx(2 * limit.bandwidth_gb_s * 1e9 / 10_000_000)  # 2 rows every 10 MB
    assert limit.by_products == pytest.approx(200)
    plan = dataclasses.asdict(BenchPlan(batch=2, new_tokens=8))
    environment = {"threads": 2, "processor": "a [processor]", "load_average": 0.5, "decoding": "kernel (avx512)"}
    report = BenchReport(plan=plan, environment=environment, contestants=[ours, theirs], limit=limit)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["times_as_fast_as"]["transformers:float32"]["total_ms"] == pytest.approx(1.5)
    assert found["share_of_limit"] == {
        "by_memory": pytest.approx(100 / limit.by_memory),
        "by_products": pytest.approx(0.5),
    }
    console = Console(width=120, record=True, markup=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench_summary(report))
    text = console.export_text()
    assert "1.50 x" in text
    assert "a [processor]" in text


def test_prompts_are_ragged_in_a_batch_and_the_same_every_time() -> None:
    plan = BenchPlan(batch=16, prompt_tokens=64)
    prompts = plan.prompts(50)
    assert [len(prompts[0]), len(prompts[-1])] == [32, 64]
    assert sorted(map(len, prompts)) == [len(prompt) for prompt in prompts]
    assert prompts == plan.prompts(50)
    assert [len(prompt) for prompt in BenchPlan(prompt_tokens=7).prompts(50)] == [7]


def test_kinds_are_as_asked_or_the_same_as_ours() -> None:
    plan = BenchPlan(kind="int8", against=("transformers", "transformers:bfloat16"))
    assert plan.contestants == [("minigpt", "int8"), ("transformers", "float32"), ("transformers", "bfloat16")]
    assert BenchPlan(kind="int8").kind_of("llama.cpp") == "q8_0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch is 0; it must be 1 or more"),
        ({"new_tokens": 1}, "new_tokens is 1; it must be 2 or more"),
        ({"kind": "int4"}, "the kind of minigpt must be one of float32.* got 'int4'"),
        ({"against": ("transformers:fp32",)}, "the kind of transformers must be one of float32.* got 'fp32'"),
        ({"against": ("llama.cpp:int8",)}, "the kind of llama.cpp must be one of f32, f16, bf16, q8_0, got 'int8'"),
        ({"against": ("vllm",)}, "unknown contestant 'vllm'; known are transformers, ctranslate2, llama.cpp"),
        ({"against": ("transformers", "transformers:float32")}, "transformers at float32 is named twice; name each"),
    ],
)
def test_a_plan_that_cannot_be_kept_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchPlan(**fields)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_generation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ctranslate2 is not installed; pip install 'minigpt\[bench\]'"):
        BenchPlan(against=("ctranslate2",))


def test_who_stops_early_is_not_timed() -> None:
    with pytest.raises(GenerationError, match="wrote 7 tokens where 8 were asked for"):
        require_all(7, 8, "somebody")


def test_more_tokens_than_the_context_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="exceed the model's context of"):
        bench_generate(BenchPlan(model=str(folder), prompt_tokens=4000, against=()))


def test_a_contestant_that_fails_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BenchPlan, "prompts", lambda plan, vocabulary: [[vocabulary + 1]])
    with pytest.raises(MiniGPTError, match="could not be timed"):
        bench_generate(BenchPlan(model=str(folder), prompt_tokens=4, new_tokens=2, repeats=1, against=()))


def test_the_command_measures_ours_and_the_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "generate", "--model", str(folder), "--prompt-tokens", "4", "--new-tokens", "3"]
    app([*command, "--repeats", "2", "--batch", "2", "--against", "", "--json", "-"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    (ours,) = report["contestants"]
    assert ours["name"] == "minigpt"
    assert 0 < ours["prefill_ms"]["p20"] <= ours["prefill_ms"]["median"] <= ours["prefill_ms"]["p80"]
    assert ours["memory_mb"] > 0
    assert report["limit"]["by_products"] > 0
    assert report["environment"]["threads"] >= 1


def test_int8_and_a_dtype_contradict() -> None:
    with pytest.raises(ConfigError, match="--quantize int8 computes in float32"):
        app(["bench", "generate", "--quantize", "int8", "--dtype", "bfloat16"], standalone_mode=False)


def test_what_a_contestant_that_dies_said_last_is_told(tmp_path: Path) -> None:
    spec = {"name": "transformers", "kind": "float32", "folder": str(tmp_path / "nowhere"), "prompts": [[1]]}
    said = r"^transformers could not be timed: its process ended with status 1: \S.*nowhere"
    with pytest.raises(MiniGPTError, match=said), bench_generation._process(spec | {"new": 2, "how": {}}):
        pass
