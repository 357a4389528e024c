"""ONNX files in onnxruntime: every set of inputs that people's exporters give, and what cannot be judged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import reference, saved, tiny_bpe
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import engines

onnx = pytest.importorskip("onnx", reason="it writes the files and comes with minigpt[dev]")
pytest.importorskip("onnxruntime", reason="it computes and comes with minigpt[dev]")

from engines import onnx_gpt2  # noqa: E402
from engines.caches import check_cache  # noqa: E402

FORMS: dict[str, dict[str, Any]] = {
    "torch, ids": {"ids": "ids"},
    "torch, ids of 32 bits": {"ids": "input.1", "int32": True},
    "torch, ids and mask": {"mask": True},
    "torch, 40 tokens": {"tokens": 40},
    "optimum": {"mask": True, "positions": True},
    "optimum with past": {"mask": True, "positions": True, "past": "layers"},
    "past without mask": {"past": "layers"},
    "transformers.js": {"mask": True, "positions": True, "past": "layers", "merged": True},
    "transformers": {"positions": True, "past": "cache"},
    "transformers, one token": {"positions": True, "past": "cache", "tokens": 1},
    "optimum, last position": {"mask": True, "positions": True, "past": "layers", "last": True},
    "onnxruntime-genai": {"mask": True, "past": "layers", "named_heads": True},
    "onnxruntime's tools": {"positions": True, "mask": True, "past": "stacked", "int32": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_model(
    form: str, original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    candidate = engines.onnx(onnx_gpt2.write(hf_model, tmp_path / "gpt2.onnx", **FORMS[form]))
    report = original.judge(candidate)
    print(f"{form}: {report.logits.ratio:.2f} times the noise floor, at most 2")
    assert report.passed, report.reasons
    has_past = "past" in FORMS[form]
    assert ("tokens one by one" in report.missing) != has_past
    assert (report.decoding is not None) == has_past
    assert "onnxruntime" in report.notes[0]


@pytest.mark.parametrize("form", ["transformers.js", "transformers", "transformers, one token"])
def test_tokens_one_by_one_are_those_of_transformers(form: str, hf_model: GPT2LMHeadModel, tmp_path: Path) -> None:
    check_cache(engines.onnx(onnx_gpt2.write(hf_model, tmp_path / "gpt2.onnx", **FORMS[form])), hf_model, 1e-4)


def test_a_call_takes_rows_of_ids_in_any_array(hf_model: GPT2LMHeadModel, tmp_path: Path) -> None:
    candidate = engines.onnx(onnx_gpt2.write(hf_model, tmp_path / "gpt2.onnx"))
    rows = [[1, 2, 3], [7, 8, 9]]
    with torch.no_grad():
        expected = hf_model(torch.tensor(rows)).logits
    for ids in (rows, np.array(rows), torch.tensor(rows, dtype=torch.int32)):
        torch.testing.assert_close(candidate(ids), expected, atol=1e-4, rtol=1e-4)
    for wrong in ([1, 2], [[]], [[0.5]], [["a"]], [[-1, 2]]):
        with pytest.raises(minigpt.GenerationError, match=r"^input_ids must be"):
            candidate(wrong)


def test_a_wrong_model_fails_and_a_wrong_cache_fails_alone(
    original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    other = onnx_gpt2.write(reference(seed=1, std=0.3), tmp_path / "other.onnx")
    assert original.judge(engines.onnx(other)).outcome == "FAIL"
    writer = onnx_gpt2.Writer(hf_model, past="layers")
    swapped = {"present.0.key": "present.1.key", "present.1.key": "present.0.key"}
    for node in writer.g.nodes:
        node.output[0] = swapped.get(node.output[0], node.output[0])
    report = original.judge(engines.onnx(writer.save(tmp_path / "swapped.onnx")))
    assert report.logits.ratio < 2
    assert report.outcome == "FAIL"
    assert report.decoding is not None
    assert report.decoding.ratio > 1000


def test_weights_in_a_file_beside_it(original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path) -> None:
    """As torch's exporter writes them. A file elsewhere is not read, and a missing one is named."""
    beside = {"save_as_external_data": True, "location": "gpt2.onnx.data", "size_threshold": 512}
    file = onnx_gpt2.write(hf_model, tmp_path / "gpt2.onnx", beside)
    assert original.judge(engines.onnx(file)).passed
    outside = tmp_path / "inside"
    outside.mkdir()
    model = onnx.load(file, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../gpt2.onnx.data"
    (outside / "gpt2.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(minigpt.CheckpointError, match=r"cannot open .*inside/gpt2.onnx: .*[Ee]xternal data"):
        engines.onnx(outside / "gpt2.onnx")
    (tmp_path / "gpt2.onnx.data").unlink()
    with pytest.raises(minigpt.CheckpointError, match=r"cannot open .*gpt2.onnx: .*gpt2.onnx.data"):
        engines.onnx(file)


def test_a_custom_operator_runs_no_code(hf_model: GPT2LMHeadModel, tmp_path: Path) -> None:
    writer = onnx_gpt2.Writer(hf_model)
    writer.g.nodes[-1].domain = "com.example"
    with pytest.raises(minigpt.CheckpointError, match=r"cannot open .*com\.example"):
        engines.onnx(writer.save(tmp_path / "gpt2.onnx"))


def _with_input(name: str, kind: int, shape: list[Any]) -> Any:
    def change(writer: onnx_gpt2.Writer) -> None:
        writer.inputs.append(onnx.helper.make_tensor_value_info(name, kind, shape))

    return change


FLOAT = onnx.TensorProto.FLOAT
REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {  # how it is written, what is changed, what is said
    "last position": ({"last": True}, None, "gives the logits of the last position only, and parity needs"),
    "unknown input": ({}, _with_input("image", FLOAT, [1, 3]), "has the input 'image' of dtype float32 and shape"),
    "embeddings": ({}, _with_input("inputs_embeds", FLOAT, [1, 3, 32]), "has the input 'inputs_embeds'"),
    "two ids": ({}, _with_input("tokens", 7, [1, "seq"]), "must take ids of shape"),
    "wide mask": ({}, _with_input("attention_mask", FLOAT, [1, 1, 3, 3]), "can fill it only in the shape"),
    "short context": ({"tokens": 8}, None, "reads 8 tokens at most, and the texts of .* have up to 14"),
    "odd past": ({}, _with_input("past_keys", FLOAT, [1, "a", "b", 3]), "cannot leave empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_judged_is_one_sentence(
    case: str, original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    how, change, sentence = REFUSED[case]
    writer = onnx_gpt2.Writer(hf_model, **how)
    if change is not None:
        change(writer)
    file = writer.save(tmp_path / "gpt2.onnx")
    with pytest.raises(minigpt.CheckpointError, match=sentence) as raised:
        original.judge(engines.onnx(file))
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (None, r"^cannot read .*genai_config\.json: No such file"),
        ("[]", r"genai_config\.json is not a JSON object"),
        ('{"model": []}', r"model\.decoder\.head_size, got None$"),
        ('{"model": {"decoder": {"head_size": -1}}}', r"genai_config\.json must have .*, got -1$"),
    ],
)
def test_a_size_of_a_head_that_is_not_said(
    said: str | None, sentence: str, original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    file = onnx_gpt2.write(hf_model, tmp_path / "gpt2.onnx", **FORMS["onnxruntime-genai"])
    config = tmp_path / "genai_config.json"
    config.unlink()
    if said is not None:
        config.write_text(said)
    with pytest.raises(minigpt.CheckpointError, match=sentence):
        original.judge(engines.onnx(file))


def test_another_vocabulary_and_another_context(original: minigpt.Original, tmp_path: Path) -> None:
    file = onnx_gpt2.write(reference(vocab_size=70), tmp_path / "words.onnx")
    with pytest.raises(minigpt.CheckpointError, match=r"words.onnx has a vocabulary of 70 tokens and .* one of 61"):
        original.judge(engines.onnx(file))
    file = onnx_gpt2.write(reference(n_positions=8), tmp_path / "short.onnx")
    with pytest.raises(minigpt.CheckpointError, match=r"cannot read a text of 14 tokens with .*short.onnx"):
        original.judge(engines.onnx(file))


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "folder", "missing"])
def test_damaged_files(damage: str, hf_model: GPT2LMHeadModel, tmp_path: Path) -> None:
    file = onnx_gpt2.write(hf_model, tmp_path / "gpt2.onnx")
    content = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes({"cut": content[: len(content) // 2], "text": b"{}", "empty": b""}[damage])
    with pytest.raises(minigpt.CheckpointError, match=r"gpt2\.onnx"):
        engines.onnx(file)


def test_options_are_onnxruntimes_own(original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path) -> None:
    file = onnx_gpt2.write(hf_model, tmp_path / "gpt2.onnx")
    options = {"graph_optimization_level": "ORT_DISABLE_ALL", "intra_op_num_threads": 1}
    (note,) = original.judge(engines.onnx(file, **options)).notes
    assert "graph_optimization_level ORT_DISABLE_ALL" in note
    assert "intra_op_num_threads 1" in note
    wrong: dict[str, Any]
    for wrong, sentence in (
        ({"threads": 1}, "threads cannot be 1: .*no attribute 'threads'"),
        (
            {"graph_optimization_level": "high"},
            "graph_optimization_level must be ORT_.* or ORT_ENABLE_ALL.*, got 'high'",
        ),
        ({"intra_op_num_threads": "many"}, "intra_op_num_threads cannot be 'many': .*Int"),
        ({"providers": "MagicProvider"}, "providers has MagicProvider, which this onnxruntime lacks; it has .*CPU"),
        ({"register_custom_ops_library": "x.so"}, "register_custom_ops_library cannot be .*read-only"),
    ):
        with pytest.raises(minigpt.ConfigError, match=f"^{sentence}"):
            engines.onnx(file, **wrong)


def test_a_text_file_is_read_in_windows_too(tmp_path: Path) -> None:
    model = reference(vocab_size=300)
    place = saved(model, tmp_path / "place")
    tiny_bpe().save(str(place / "tokenizer.json"))
    text = tmp_path / "held.txt"
    text.write_text("the dog saw the other dog there, and the other dog saw it too. " * 6)
    file = onnx_gpt2.write(model, tmp_path / "gpt2.onnx")
    report = minigpt.parity(engines.onnx(file), against=place, text=text, max_new_tokens=2, device="cpu")
    assert report.passed, report.reasons
    assert report.perplexity is not None
    assert report.perplexity.candidate == pytest.approx(report.perplexity.reference, rel=1e-5)
    assert len(report.perplexity.rows) > 1
