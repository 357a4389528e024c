"""JSON from strangers: an object, of a bounded size, each name once; or one sentence."""

from pathlib import Path

import pytest

from minigpt import CheckpointError, ConfigError
from minigpt.json_file import parse_object, read_object


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, {"b": null}], "狗": "é"}', encoding="utf-8")
    assert read_object(tmp_path / "a.json", ConfigError) == {"a": [1, {"b": None}], "狗": "é"}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON: it is nested too deeply"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "not valid JSON: the name 'c' stands in it twice"),
        (b"[1]", "holds a JSON list, not the object that it must be"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=["empty", "bytes", "deep", "twice", "list", "endless number"],
)
def test_anything_else_is_one_sentence(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=complaint) as raised:
        read_object(tmp_path / "a.json", CheckpointError)
    assert str(tmp_path / "a.json") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": 1}')
    assert read_object(tmp_path / "a.json", ConfigError, 8) == {"a": 1}
    with pytest.raises(ConfigError, match="is 8 bytes long; more than 7 are not read"):
        read_object(tmp_path / "a.json", ConfigError, 7)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        read_object(tmp_path / "none.json", ConfigError)


def test_what_is_quoted_cannot_break_the_line() -> None:
    with pytest.raises(ValueError, match=r"the name 'a\\nb'"):
        parse_object(b'{"a\\nb": 1, "a\\nb": 2}')
    assert str(ConfigError("one\ntwo\u2028three")) == "one two three"
