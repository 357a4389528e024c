"""What people hand over as text: byte order marks, other encodings, JSON lines of any name, links that lead nowhere."""

import codecs
import json
import logging
from pathlib import Path

import pytest
from checkpoints import talking

import minigpt
from minigpt import CheckpointError, MiniGPTError
from minigpt.checkpoint import contents
from minigpt.files import is_json_lines, read_text
from minigpt.generation.promptfile import read_prompts
from minigpt.scoring import texts_in

TEXTS = ["the dog", "the other dog"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.ndjson", "a.json", "a.txt", "a"])
def test_json_lines_are_known_by_their_name_or_their_first_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(f"\n{LINES}")
    assert list(texts_in(file)) == TEXTS


@pytest.mark.parametrize("text", ["{dog}", '{"dog": 1}\n', '["text"]', '"text"', "", "the dog\n" + LINES])
def test_another_text_is_a_text(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text)
    assert list(texts_in(file)) == [text]
    assert is_json_lines(Path("a.Json"), text)


def test_an_array_in_a_json_file_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps([{"text": text} for text in TEXTS]))
    with pytest.raises(MiniGPTError, match=r"train\.json, line 1 must be a JSON object"):
        list(texts_in(file))


def test_prompts_of_a_name_in_capitals_are_json(tmp_path: Path) -> None:
    file = tmp_path / "PROMPTS.JSONL"
    file.write_text('\n{"prompt": "a"}\n')
    assert [line.prompt for line in read_prompts(file)] == ["a"]


@pytest.mark.parametrize("name", ["UTF-16", "UTF-32", "UTF-16-LE", "UTF-16-BE", "UTF-32-LE"])
def test_another_encoding_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    marks = {"UTF-16-LE": codecs.BOM_UTF16_LE, "UTF-16-BE": codecs.BOM_UTF16_BE, "UTF-32-LE": codecs.BOM_UTF32_LE}
    file.write_bytes(marks.get(name, b"") + "naïve".encode(name))
    for read in (read_text, read_prompts):
        with pytest.raises(MiniGPTError, match=f"iconv -f {name[:6]} -t UTF-8"):
            read(file)
    file.write_bytes("naïve".encode("latin-1"))
    with pytest.raises(MiniGPTError, match="iconv -f LATIN1 -t UTF-8"):
        read_text(file)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "merges.txt"]
)
def test_a_link_that_leads_nowhere_is_named(name: str, tmp_path: Path) -> None:
    folder = talking(tmp_path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/none")
    with pytest.raises(CheckpointError, match=rf"links that lead nowhere: {name}"):
        minigpt.from_pretrained(folder)


def test_a_link_beside_a_file_of_weights_is_no_fault(tmp_path: Path) -> None:
    folder = talking(tmp_path)
    (folder / "pytorch_model.bin").symlink_to("none")
    minigpt.from_pretrained(folder)
    minigpt.from_pretrained(folder / "model.safetensors")


def test_the_packaged_demo_is_named_where_a_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, logger="minigpt"):
        minigpt.from_pretrained("demo")
        assert not caplog.records
        (tmp_path / "demo").mkdir()
        talking(tmp_path / "demo")
        assert minigpt.from_pretrained("demo").config.n_layer == 4
        assert "is ./demo" in caplog.text
    assert minigpt.from_pretrained("./demo").config.n_layer == 1
    assert contents.local_place("demo") == contents.DEMO
