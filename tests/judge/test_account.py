"""A quantized file's error, accounted for: its weights, the program's arithmetic, and what is left."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from bench import others
from checkpoints import talking
from gguf import quants
from planted import Program, half
from torch import Tensor

import minigpt
from minigpt import ConfigError, Original, ParityReport
from minigpt.checkpoint import local_place
from minigpt.checkpoint.gguf import folder_of
from minigpt.engines.ctranslate2_generator import Ctranslate2Generator
from minigpt.engines.engine import Engine
from minigpt.engines.llama_cpp_model import LlamaCppModel
from minigpt.engines.onnx_session import OnnxSession
from minigpt.engines.openvino_request import GROUP_SIZE, PRECISION, OpenVinoRequest
from minigpt.engines.weights import IN_GROUPS, OF_INTEGERS
from minigpt.errors import MiniGPTError
from minigpt.judge.mistakes import programs
from minigpt.judge.mistakes.programs import documented

TEXTS = ["Once upon a time there was a fox who lived in the wood.", "The rain had stopped, and Tom ran to the river."]
READ: dict[str, Any] = {"prompts": TEXTS, "max_new_tokens": 8, "device": "cpu"}
WHOLE = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
Q8_0 = gguf.GGMLQuantizationType.Q8_0


class Quantized(Program):
    """A GPT-2 that multiplies as llama.cpp does with Q8_0: inputs in blocks of 32, a table of GELU."""

    def __init__(self, place: Path, **settings: Any) -> None:
        super().__init__(place, **{"round_act": half, **settings})

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.from_numpy(quants.dequantize(quants.quantize(x.numpy(), Q8_0), Q8_0)) @ weight


class Computed(LlamaCppModel):
    """llama.cpp's place, taken by a program of ours."""

    def __init__(self, file: Path, program: Program) -> None:
        Engine.__init__(self, file, "gguf", "llama.cpp")
        self.computes = program
        self.settings = dict(WHOLE)

    def _whole(self, ids: list[int]) -> np.ndarray:
        return self.computes(torch.tensor([ids]))[0].numpy()

    def _start(self, ids: list[int]) -> Any:
        return None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking(tmp_path_factory.mktemp("account"), std=0.3, n_layer=2, n_embd=64, n_positions=128)


@pytest.fixture(scope="module")
def file(place: Path) -> Path:
    return others.write_gguf(place, "q8_0", minigpt.Tokenizer.from_pretrained(place))


@pytest.fixture(scope="module")
def of_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Original, Path]:
    """An original that was trained, whose norms have small rows, and its file."""
    place = shutil.copytree(local_place("demo"), tmp_path_factory.mktemp("account") / "demo")
    return Original(place, **READ), others.write_gguf(place, "q8_0", minigpt.Tokenizer.from_pretrained(place))


@pytest.fixture(scope="module")
def texts_original(place: Path) -> Original:
    return Original(place, **READ)


@pytest.fixture(scope="module")
def right(texts_original: Original, file: Path) -> ParityReport:
    return texts_original.judge(Computed(file, Quantized(folder_of(file))))


def test_a_right_program_is_right_for_its_file(right: ParityReport) -> None:
    account = right.account
    assert account is not None
    assert right.outcome == "FAIL"  # it is not the original
    assert account.types == ["Q8_0"]
    assert account.own.ratio > 10_000
    assert account.calm_left < 2
    assert account.explains
    assert right.diagnosis is None
    assert abs(account.together - 1) < 0.05
    assert math.isclose(account.total.kl, account.weights.kl + account.own.kl, rel_tol=0.5)


def test_what_the_arithmetic_explains_is_told_step_by_step(right: ParityReport) -> None:
    account = right.account
    assert account is not None
    first, second = account.steps
    assert "blocks of 32" in first.part
    assert "GELU" in second.part
    assert second.ratio < 0.6 * first.ratio < account.own.ratio


EPS = "eps 1e-06 in place of 1e-05 in every norm"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {  # settings, and what is named
    "a norm's eps": ({"eps": 1e-6}, EPS),
    "another GELU": ({"round_act": None}, ""),
    "keys and values in bfloat16": ({"round_kv": lambda x: x.bfloat16()}, "keys and values rounded to bfloat16"),
    "a begin token": ({"begin": 0}, "an end-of-text token before the text"),
    "positions from 1": ({"positions": 1}, "positions from 1"),
    "two of them": ({"positions": 1, "eps": 1e-6}, "positions from 1"),
    "no token to begin": ({"drop": 1}, "a text without its first token"),
}


def assert_named(original: Original, file: Path, name: str) -> None:
    settings, named = FAULTS[name]
    program = Quantized(folder_of(file), **settings)
    report = original.judge(Computed(file, program), diagnose=True)
    assert report.account is not None
    assert not report.account.explains, report.account
    assert named in " and ".join(row.mistake for row in report.diagnosis or [])


def test_a_fault_of_the_program_is_named_and_not_called_rounding(texts_original: Original, file: Path) -> None:
    assert_named(texts_original, file, "positions from 1")


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_program_is_named(name: str, of_demo: tuple[Original, Path]) -> None:
    assert_named(*of_demo, name)


def test_a_file_is_judged_by_itself(file: Path) -> None:
    itself = Original(file, **READ)
    report = itself.judge(Computed(file, Quantized(folder_of(file))), as_file=True)
    assert report.passed
    assert report.account is not None
    program = Quantized(folder_of(file), positions=1)
    wrong = itself.judge(Computed(file, program), diagnose=False, as_file=True)
    assert wrong.outcome == "FAIL"
    assert "is not right for this file" in wrong.reasons[0]


def words_of(kind: type[Engine], types: dict[str, str], **settings: Any) -> list[str]:
    """Return what a program documents that it rounds."""
    engine: Any = object.__new__(kind)
    engine.settings, engine.is_fused = settings, True
    return [mistake.words for mistake in documented(engine, types)]


def test_each_program_rounds_inputs_by_its_documentation() -> None:
    """Which tensors' inputs are rounded follows from how the file stores them, and from the program's settings."""
    types = {"a": "Q4_K", "b": "Q5_0", "c": "F16", "d": "F32"}
    first, _ = words_of(LlamaCppModel, types, **WHOLE)
    assert first == "inputs of products rounded to 8 bits in blocks of 256 and 8 bits in blocks of 32 and float16"
    integers, groups = {"a": f"uint8, one scale{OF_INTEGERS}"}, {"a": f"int4, a scale for 64{IN_GROUPS}64"}
    assert words_of(OnnxSession, integers)[0].endswith("with a zero point, by tensor")
    assert words_of(OnnxSession, groups)[0].endswith("8 bits in groups of 64")
    assert words_of(OnnxSession, {"a": "int4, a scale for 64", "b": "uint8, one scale"}) == []
    assert words_of(OpenVinoRequest, {"a": "u8"}, **{GROUP_SIZE: "32"})[0].endswith("8 bits in groups of 32")
    assert words_of(OpenVinoRequest, {"a": "u8"}, **{GROUP_SIZE: "0"}) == []
    assert words_of(OpenVinoRequest, {"a": "f32"}, **{PRECISION: "bf16"}) == [
        "results of operators rounded to bfloat16"
    ]
    assert words_of(OpenVinoRequest, {"a": "u8"}, **{GROUP_SIZE: "32", PRECISION: "bf16"}) == []


def test_sums_are_clipped_where_a_processor_has_no_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    int8 = {"a": "int8, a scale for each row"}
    of_onnx, unsigned = ({"a": f"{kind}, one scale{OF_INTEGERS}"} for kind in ("int8", "uint8"))
    for has_vnni, by_mkl, level, is_clipped in (
        (True, "0", "ALL", False), (False, "0", "ALL", True), (False, "1", "ALL", False), (True, "0", "AVX2", True),
    ):  # fmt: skip
        monkeypatch.setattr(programs, "HAS_VNNI", has_vnni)
        monkeypatch.setenv("CT2_USE_MKL", by_mkl)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level)
        (words,) = words_of(Ctranslate2Generator, int8, compute_type="int8_float32")
        assert ("clipped" in words) == is_clipped
        assert ("clipped" in words_of(OnnxSession, of_onnx)[0]) == (not has_vnni)
        assert "clipped" not in words_of(OnnxSession, unsigned)[0]


def test_a_cache_of_llama_cpp_is_rounded_by_its_types() -> None:
    def cache(**settings: str) -> list[str]:
        return words_of(LlamaCppModel, {}, **WHOLE | settings)[1:]

    assert cache() == []
    assert cache(type_k="bf16") == ["keys and values in bf16 and f32"]
    assert cache(flash_attn="on") == ["keys and values in f16 by flash attention"]
    assert cache(flash_attn="auto", type_k="q5_1", type_v="q8_0") == [
        "keys and values in q5_1 and q8_0 by flash attention"
    ]


def test_each_tensor_has_a_cost_of_its_own(texts_original: Original, file: Path) -> None:
    program = Computed(file, Quantized(folder_of(file)))
    report = texts_original.judge(program, sensitivity=True, diagnose=False)
    assert report.account is not None
    tensors = report.account.tensors
    assert tensors is not None
    assert len(tensors) == 9  # four matrices of each of two blocks, and the embedding, which is the head
    costs = [tensor.alone for tensor in tensors]
    assert costs == sorted(costs, reverse=True)
    assert all(0 < cost < 2 * report.account.weights.kl for cost in costs)
    assert sum(costs) == pytest.approx(report.account.weights.kl, rel=0.7)
    assert tensors[0].without < report.account.weights.kl * 1.5


@pytest.mark.thorough
def test_a_record_alone_tells_of_the_file_too(texts_original: Original, file: Path, tmp_path: Path) -> None:
    texts_original.save(tmp_path / "record.safetensors")
    record = Original.load(tmp_path / "record.safetensors")
    record.truth = dataclasses.replace(
        record.truth, facts=dataclasses.replace(record.truth.facts, place=tmp_path / "no")
    )
    report = record.judge(Computed(file, Quantized(folder_of(file))))
    assert report.account is not None
    assert report.account.explains


def test_what_cannot_be_told_is_a_note_or_an_error(texts_original: Original, file: Path) -> None:
    large = Original.__new__(Original)
    large.truth = dataclasses.replace(
        texts_original.truth, facts=dataclasses.replace(texts_original.truth.facts, offload=True)
    )
    program = Computed(file, Quantized(folder_of(file)))
    report = large.judge(program, diagnose=False)
    assert report.account is None
    assert any("block by block" in note for note in report.notes)
    with pytest.raises(MiniGPTError, match="block by block"):
        large.judge(program, as_file=True)
    with pytest.raises(ConfigError, match="as_file is for another program's file"):
        texts_original.judge("demo", as_file=True)


def test_a_file_of_another_model_is_not_judged_as_a_file(original: Original, tmp_path: Path) -> None:
    right = minigpt.from_pretrained(original.truth.facts.place, device="cpu").config
    config = dataclasses.replace(right, n_layer=5)
    minigpt.save_pretrained(minigpt.GPT2(config).eval(), tmp_path / "five")
    file = others.write_gguf(tmp_path / "five", "q8_0")
    program = Computed(file, Quantized(folder_of(file)))
    with pytest.raises(
        ConfigError, match=rf"must have the same shape to be compared, but n_layer is 5 and {right.n_layer}"
    ):
        original.judge(program, as_file=True)
    report = original.judge(program, diagnose=False)
    assert report.account is None
    assert any(f"n_layer is 5 and {right.n_layer}" in note for note in report.notes)


class Cached(Computed):
    """A program whose cache has keys in the place of values."""

    def _start(self, ids: list[int]) -> Any:
        program, read = Quantized(folder_of(self.file), order=(0, 2, 1)), list[int]()

        def step(piece: list[int]) -> np.ndarray:
            read.extend(piece)
            return program(torch.tensor([read]))[0, -len(piece) :].numpy()

        return step


def test_a_fault_of_the_cache_is_no_rounding_either(texts_original: Original, file: Path) -> None:
    report = texts_original.judge(Cached(file, Quantized(folder_of(file))), as_file=True)
    assert report.outcome == "FAIL"
    assert report.reasons[0].startswith("Decoded a token at a time, the error is")
    assert report.account is not None
    assert report.account.explains
