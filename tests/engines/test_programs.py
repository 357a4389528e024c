"""llama.cpp, OpenVINO and CTranslate2 on real files: the model, its precision, its cache, and what is refused.

Each needs its extra: ``pip install -e '.[gguf,openvino,ctranslate2]' gguf``.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import others
from engines.caches import check_cache
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import engines
from minigpt.checkpoint import local_place
from minigpt.report.account_fields import Account

pytestmark = pytest.mark.thorough


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason="an extra of its own brings it")


@pytest.fixture(scope="module")
def place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkpoint that converters may write beside."""
    return shutil.copytree(folder, tmp_path_factory.mktemp("converted") / "gpt2")


@pytest.fixture(scope="module")
def gguf_file(place: Path) -> Path:
    needs("llama_cpp"), needs("gguf")
    return others.write_gguf(place, "f32")


@pytest.fixture(scope="module")
def ctranslate2_folder(place: Path) -> Path:
    needs("ctranslate2")
    before = {file: file.read_bytes() for file in place.iterdir() if file.is_file()}
    folder = Path(others.write_ctranslate2(str(place), "float32"))
    assert {file: file.read_bytes() for file in place.iterdir() if file.is_file()} == before
    return folder


@pytest.fixture(scope="module")
def onnx_file(hf_model: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("onnx")
    from engines import onnx_gpt2

    file = tmp_path_factory.mktemp("onnx") / "gpt2.onnx"
    return onnx_gpt2.write(hf_model, file, mask=True, positions=True, past="layers")


@pytest.fixture(scope="module")
def openvino_files(onnx_file: Path) -> dict[str, Path]:
    """A model that is given its past, one that keeps it as states, and one whose weights are halved."""
    openvino = needs("openvino")
    from openvino import _offline_transformations as transformations

    files = {name: onnx_file.with_name(f"{name}.xml") for name in ("given", "states", "halved")}
    model = openvino.convert_model(onnx_file)
    openvino.save_model(model, files["given"], compress_to_fp16=False)
    openvino.save_model(model, files["halved"])
    names = [port.get_any_name() for port in model.inputs]
    pasts = {name: name.replace("past_key_values", "present") for name in names if name.startswith("past")}
    model.reshape({port.get_any_name(): [1, *list(port.get_partial_shape())[1:]] for port in model.inputs})
    transformations.apply_make_stateful_transformation(model, pasts)
    openvino.save_model(model, files["states"], compress_to_fp16=False)
    return files


def judged(original: minigpt.Original, candidate: engines.Engine) -> minigpt.ParityReport:
    report = original.judge(candidate)
    print(f"{report.notes[0]} {report.logits.ratio:.3g} times the noise floor")
    assert len(report.notes) == 1
    return report


def test_llama_cpp(original: minigpt.Original, hf_model: GPT2LMHeadModel, gguf_file: Path) -> None:
    """A file in float32 computes GELU by a table in half precision, and its cache is in half precision by default."""
    halved = judged(original, engines.gguf(gguf_file))
    candidate = engines.gguf(gguf_file, type_k="f32", type_v="f32", n_threads=1)
    whole = judged(original, candidate)
    assert 2 < whole.logits.ratio < halved.logits.ratio
    assert whole.decoding is not None
    assert "type_k f32, type_v f32, flash_attn off, n_threads 1" in whole.notes[0]
    assert "type_k f16" in halved.notes[0]
    assert candidate.context == 48
    check_cache(candidate, hf_model, 0.05)
    pieces = engines.gguf(gguf_file, type_k="f32", type_v="f32", n_batch=4)
    assert judged(original, pieces).logits.ratio == pytest.approx(whole.logits.ratio, rel=0.5)


def test_what_llama_cpp_refuses(gguf_file: Path, original: minigpt.Original, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:-4000])
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    for file, sentence in ((cut, "it ends before its metadata or tensors do"), (text, "magic")):
        with pytest.raises(minigpt.CheckpointError, match=rf"llama\.cpp .*cannot open .*{file.name}: .*{sentence}"):
            engines.gguf(file)
    wrong: dict[str, Any]
    for wrong, sentence in (
        ({"type_k": "f64"}, "type_k must be f32 or f16"),
        ({"cache": "f32"}, "cache is no option of llama.cpp"),
        ({"n_threads": "two"}, "n_threads cannot be 'two': .*int"),
        ({"flash_attn": "maybe"}, "flash_attn must be off or on or auto"),
    ):
        with pytest.raises(minigpt.ConfigError, match=f"^{sentence}"):
            engines.gguf(gguf_file, **wrong)
    short = engines.gguf(gguf_file, n_ctx=8)
    with pytest.raises(minigpt.CheckpointError, match="reads 8 tokens at most, and the texts of"):
        original.judge(short)
    assert engines.gguf(gguf_file, n_ctx=4096).context == 48, "it would abort beyond what was trained"


def test_ctranslate2(original: minigpt.Original, hf_model: GPT2LMHeadModel, ctranslate2_folder: Path) -> None:
    candidate = engines.ctranslate2(ctranslate2_folder, compute_type="float32", intra_threads=1)
    report = judged(original, candidate)
    assert report.passed, report.reasons
    assert report.decoding is not None
    assert "compute_type float32, intra_threads 1" in report.notes[0]
    check_cache(candidate, hf_model, 1e-4)
    eighths = judged(original, engines.ctranslate2(ctranslate2_folder, compute_type="int8"))
    assert eighths.logits.ratio > 1000


def test_what_ctranslate2_refuses(ctranslate2_folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(ctranslate2_folder, tmp_path / "broken")
    (broken / "model.bin").write_bytes(b"no model")
    with pytest.raises(minigpt.CheckpointError, match=r"cannot open .*broken"):
        engines.ctranslate2(broken)
    wordless = shutil.copytree(ctranslate2_folder, tmp_path / "wordless")
    for file in wordless.glob("vocabulary.*"):
        file.write_text('{"a": 1}')
    with pytest.raises(minigpt.CheckpointError, match="wordless"):
        engines.ctranslate2(wordless)
    with pytest.raises(minigpt.CheckpointError, match="must be a folder"):
        engines.ctranslate2(ctranslate2_folder / "model.bin")
    for wrong, sentence in ({"compute_type": "int4"}, "int4"), ({"beam_size": 4}, "incompatible .* compute_type"):
        with pytest.raises(minigpt.CheckpointError, match=f"ctranslate2 .* cannot open .*{sentence}"):
            engines.ctranslate2(ctranslate2_folder, **wrong)


@pytest.mark.parametrize("form", ["given", "states"])
def test_openvino(
    form: str, original: minigpt.Original, hf_model: GPT2LMHeadModel, openvino_files: dict[str, Path]
) -> None:
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    candidate = engines.openvino(openvino_files[form], **exact)
    report = judged(original, candidate)
    assert report.passed, report.reasons
    assert report.decoding is not None
    assert "INFERENCE_PRECISION_HINT f32" in report.notes[0]
    check_cache(candidate, hf_model, 1e-4)


def test_openvino_halves_weights_when_it_saves(original: minigpt.Original, openvino_files: dict[str, Path]) -> None:
    report = judged(original, engines.openvino(openvino_files["halved"], INFERENCE_PRECISION_HINT="f32"))
    assert not report.passed
    assert report.logits.ratio > 100


def test_openvino_reads_onnx(original: minigpt.Original, onnx_file: Path) -> None:
    needs("openvino")
    assert judged(original, engines.openvino(onnx_file, INFERENCE_PRECISION_HINT="f32")).passed


def test_what_openvino_refuses(openvino_files: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "gpt2.xml"
    shutil.copy(openvino_files["given"], file)
    with pytest.raises(minigpt.CheckpointError, match=r"cannot open .*gpt2\.xml"):
        engines.openvino(file)  # without its .bin
    file.write_text("<net>")
    with pytest.raises(minigpt.CheckpointError, match=r"cannot open .*gpt2\.xml"):
        engines.openvino(file)
    pickled = tmp_path / "gpt2.pt"
    torch.save({}, pickled)
    with pytest.raises(minigpt.CheckpointError, match=r"must be an \.xml or an \.onnx file"):
        engines.openvino(pickled)
    wrong: dict[str, str]
    for wrong, sentence in (
        ({"PRECISION": "f32"}, "PRECISION"),
        ({"INFERENCE_PRECISION_HINT": "f3"}, "INFERENCE_PRECISION_HINT"),
        ({"device": "NPX"}, "NPX"),
    ):
        with pytest.raises(minigpt.CheckpointError, match=f"openvino .* cannot open .*{sentence}"):
            engines.openvino(openvino_files["given"], **wrong)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q6_K", "Q5_1", "Q4_K_M", "Q4_0", "IQ4_NL"])
def test_llama_cpp_is_right_for_its_files_of_any_type(kind: str, tmp_path: Path) -> None:
    needs("llama_cpp")
    from elsewhere.programs.llama_cpp import WHOLE, quantized

    demo = shutil.copytree(local_place("demo"), tmp_path / "demo")
    file = quantized(others.write_gguf(demo, "f32"), kind)
    report = minigpt.Original(demo, device="cpu").judge(engines.gguf(file, **WHOLE), as_file=True)
    assert report.passed
    account = report.account
    assert account is not None
    assert account.own.ratio > 500
    assert not account.strange
    assert account.left < account.own.ratio


CACHES = {name: {"type_k": name, "type_v": name, "flash_attn": True} for name in ("f32", "bf16", "q8_0", "q5_1")}


@pytest.mark.parametrize("cache", CACHES)
def test_what_a_cache_of_llama_cpp_rounds_explains_its_error(cache: str, tmp_path: Path) -> None:
    needs("llama_cpp")
    demo = shutil.copytree(local_place("demo"), tmp_path / "demo")
    account = accounted(demo, engines.gguf(others.write_gguf(demo, "f32"), **CACHES[cache]))
    assert account.explains
    assert account.left < account.own.ratio / 2


@pytest.mark.parametrize("mode", ["nf4", "bf16"])
def test_what_openvino_rounds_explains_its_error(mode: str, tmp_path: Path) -> None:
    """NF4 is dequantized in float32, though the file says float16. In bfloat16 every operator rounds its result."""
    openvino = needs("openvino")
    needs("onnxscript")
    from elsewhere.programs.exported import export

    demo = shutil.copytree(local_place("demo"), tmp_path / "demo")
    file = export(tmp_path)
    how = {"INFERENCE_PRECISION_HINT": "f32" if mode == "nf4" else mode}
    if mode == "nf4":
        nncf = needs("nncf")
        compressed = nncf.compress_weights(
            openvino.convert_model(file), mode=nncf.CompressWeightsMode.NF4, group_size=32
        )
        file = tmp_path / "gpt2.xml"
        openvino.save_model(compressed, file, compress_to_fp16=False)
    candidate = engines.openvino(file, **how)
    if candidate.settings["INFERENCE_PRECISION_HINT"] != how["INFERENCE_PRECISION_HINT"]:
        pytest.skip("this processor has no bfloat16")
    account = accounted(demo, candidate)
    assert account.explains
    assert account.left < account.own.ratio / 2


def accounted(place: Path, candidate: engines.Engine) -> Account:
    """Return where the error of a program comes from."""
    account = minigpt.Original(place, device="cpu", max_new_tokens=4).judge(candidate, diagnose=False).account
    assert account is not None
    return account
