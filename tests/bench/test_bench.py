"""minigpt bench generate: everybody writes what was asked for, and the figures are those of the times measured."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, saved
from helpers import assert_within, rms

import minigpt
from minigpt import ConfigError, MiniGPTError
from minigpt.bench import generate as bench_generation
from minigpt.bench.contestants import (
    CONTESTANTS,
    CTranslate2,
    Minigpt,
    Products,
    Transformers,
    convert_for_ctranslate2,
    weight_bytes,
)
from minigpt.bench.generate import BenchPlan, Spread
from minigpt.bench.llama import LlamaCpp, write_gguf
from minigpt.bench.worker import contestant
from minigpt.cli import app
from minigpt.cli.files import show

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
    ("options", "message"),
    [
        (
            ["--against", "llama.cpp:int4", "--prompt-tokens", "4", "--new-tokens", "4"],
            "the kinds of llama.cpp are f32, f16, bf16, q8_0, got int4",
        ),
        (["--against", "vllm"], "unknown contestant 'vllm'; known are transformers, ctranslate2, llama.cpp"),
        (["--quantize", "int8", "--dtype", "bfloat16"], "--quantize int8 computes in float32"),
        (["--prompt-tokens", "4000"], "exceed the model's context of"),
        (["--dtype", "fp32", "--prompt-tokens", "4", "--new-tokens", "4"], "products could not be timed: .*fp32"),
    ],
)
def test_a_bench_that_cannot_run_is_refused(folder: Path, options: list[str], message: str) -> None:
    if "llama.cpp:int4" in options:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    with pytest.raises(MiniGPTError, match=message):
        app(["bench", "generate", "--model", str(folder), *options], standalone_mode=False)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_generation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ctranslate2 is not installed; pip install 'minigpt\[bench\]'"):
        BenchPlan(against=("ctranslate2",))


def test_a_contestant_that_fails_or_dies_says_so(folder: Path) -> None:
    how: dict[str, Any] = dict(folder=str(folder), kind="float32")
    with pytest.raises(MiniGPTError, match="minigpt could not be timed: IndexError"):
        contestant("minigpt", 2, prompts=[[10**6]], **how).__enter__()
    with contestant("minigpt", 2, prompts=[[1]], **how) as ask:
        multiprocessing.active_children()[0].kill()
        with pytest.raises(MiniGPTError, match="its process ended with status -9"):
            ask("run")


def test_the_figures_follow_from_the_times(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "generate", "--model", str(folder), "--prompt-tokens", "4", "--new-tokens", "3"]
    app([*command, "--repeats", "1", "--batch", "2", "--draft", "int8", "--json", "-"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    ours, undrafted, theirs = report["contestants"]
    assert [ours["name"], undrafted["name"], theirs["name"]] == ["minigpt", "undrafted", "transformers"]
    assert 0 < ours["prefill_ms"]["p20"] == ours["prefill_ms"]["median"]
    total, first = ours["total_ms"]["median"], ours["first_token_ms"]["median"]
    assert ours["tokens_per_second"] == pytest.approx(1000 * 2 * 3 / total)
    assert ours["decode_tokens_per_second"] == pytest.approx(1000 * 2 * 2 / (total - first))
    assert ours["memory_mb"] > 0
    ratio = report["times_as_fast_as"]["transformers:float32"]["total_ms"]
    assert ratio == pytest.approx(theirs["total_ms"]["median"] / total)
    limit = report["limit"]
    assert limit["bytes_per_step"] == weight_bytes(minigpt.from_pretrained(folder, device="cpu"))
    assert limit["by_memory"] == pytest.approx(2 * limit["bandwidth_gb_s"] * 1e9 / limit["bytes_per_step"])
    share = ours["decode_tokens_per_second"] / limit["by_products"]
    assert report["share_of_limit"]["by_products"] == pytest.approx(share)
    show(bench_generation.bench_summary(report), report, None)
    assert f"{ratio:.2f} x" in capsys.readouterr().out
