"""minigpt parity --engine: a file in another program, beside a model and beside a record."""

import json
from pathlib import Path

import pytest
from checkpoints import reference, saved
from command_line import Run, complaint

import minigpt

pytest.importorskip("onnx", reason="it writes the files and comes with minigpt[dev]")
pytest.importorskip("onnxruntime", reason="it computes and comes with minigpt[dev]")

from engines import onnx_gpt2


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("engines")
    model = reference(std=0.3, n_layer=1)
    folder = saved(model, place / "model")
    minigpt.Original(folder, prompts=[[3, 5, 8]], max_new_tokens=2, device="cpu").save(place / "record")
    right = onnx_gpt2.write(model, place / "right.onnx", past="layers")
    wrong = onnx_gpt2.write(reference(seed=1, std=0.3, n_layer=1), place / "wrong.onnx")
    words = {"FOLDER": folder, "RECORD": place / "record", "RIGHT": right, "WRONG": wrong}
    return {word: str(path) for word, path in words.items()}


def words_of(command: str, places: dict[str, str]) -> list[str]:
    for word, path in places.items():
        command = command.replace(word, path)
    return command.split()


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("--original RECORD --engine onnx=RIGHT --engine-option intra_op_num_threads=1", 0),
        ("--original RECORD --engine onnx=WRONG", 1),
        ("--original RECORD --engine onnx=WRONG --budget kl=100", 0),
        ("--model FOLDER --device cpu --engine onnx=RIGHT", 0),
    ],
)
def test_the_status_is_that_of_the_verdict(run: Run, places: dict[str, str], command: str, status: int) -> None:
    ended = run("parity", *words_of(command, places), "--json")
    assert ended.status == status, ended.err
    report = json.loads(ended.out)
    assert report["model"] in (places["RIGHT"], places["WRONG"])
    assert report["against"] == places["FOLDER"]
    assert report["notes"][0].startswith("onnxruntime ")
    assert ("intra_op_num_threads 1" in report["notes"][0]) == ("--engine-option" in command)
    assert ("tokens one by one" in report["missing"]) == ("WRONG" in command)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("--engine onnx", "--engine must be one of onnx=PATH, gguf=PATH, openvino=PATH, ctranslate2=PATH, got 'onnx'"),
        ("--as-file", "--as-file needs --engine, whose file or option it is about"),
        ("--engine mlx=RIGHT", "--engine must be one of onnx=PATH"),
        ("--engine onnx=no/file", "cannot read no/file: there is no such file"),
        ("--engine onnx=RECORD", "cannot open"),
        ("--engine onnx=RIGHT --engine-option threads", "--engine-option must be NAME=VALUE"),
        ("--engine onnx=RIGHT --engine-option a=1 --engine-option a=1", "--engine-option must be NAME=VALUE, each"),
        ("--engine onnx=RIGHT --engine-option threads=1", "--engine-option threads cannot be 1: "),
        (
            "--engine onnx=RIGHT --engine-option graph_optimization_level=3.5",
            "--engine-option graph_optimization_level",
        ),
        ("--engine-option a=1", "--engine-option needs --engine"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(run: Run, places: dict[str, str], command: str, sentence: str) -> None:
    message = complaint(run("parity", "--original", places["RECORD"], *words_of(command, places)))
    assert sentence in message


def test_only_a_gguf_file_is_a_model(run: Run, places: dict[str, str]) -> None:
    message = complaint(run("parity", "--as-file", *words_of("--engine onnx=RIGHT", places)))
    assert "--as-file needs --model, the checkpoint of which " in message


def test_a_record_is_kept_beside_the_verdict(run: Run, places: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "record"
    words = words_of("--model FOLDER --device cpu --engine onnx=RIGHT", places)
    assert run("parity", *words, "--record", str(kept)).status == 0
    assert run("parity", "--original", str(kept), *words_of("--engine onnx=RIGHT", places)).status == 0
