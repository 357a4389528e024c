"""A JSON file is an object, or one sentence."""

from pathlib import Path

import pytest

from minigpt import CheckpointError, ConfigError
from minigpt.json_file import read_object


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, {"b": null}], "狗": "é"}', encoding="utf-8")
    assert read_object(tmp_path / "a.json", ConfigError) == {"a": [1, {"b": None}], "狗": "é"}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is not a JSON object"),
        (b"\xff\xfe", "is not a JSON object"),
        (b"[1]", "is not a JSON object: it is a list"),
    ],
    ids=["empty", "bytes", "list"],
)
def test_anything_else_is_one_sentence(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=complaint) as raised:
        read_object(tmp_path / "a.json", CheckpointError)
    assert str(tmp_path / "a.json") in str(raised.value)
    assert "\n" not in str(raised.value)
