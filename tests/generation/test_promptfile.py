"""A file of prompts to a file of texts: what is broken is named, what is there is kept, nothing is written twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_bpe
from helpers import small_model

from minigpt import GenerationError, Tokenizer
from minigpt.generation import complete, parse_settings
from minigpt.generation.promptfile import TextFile, read_prompts

MODEL = small_model(dtype=torch.float64, n_positions=64, vocab_size=300, eos_token_id=[7, 20, 33, 150, 151, 152])
TOKENIZER = Tokenizer(tiny_bpe(300))
HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 5, "temperature": 1.5}
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "the dog"}, {"prompt": "狗", "id": "x"}, {"prompt": ""}, {"prompt": "a\u2028b"}, {"prompt": "the"},
    {"prompt": "x" * 20, "id": [1]},
]  # fmt: skip


def prompt_file(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    parts = (line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in lines)
    path.write_bytes(b"".join(part + b"\n" for part in parts))
    return path


def texts_of(prompts: Path, out: Path, opened_by: str = "", **how: Any) -> TextFile:
    return TextFile(MODEL, TOKENIZER, prompts, out, opened_by, parse_settings(**HOW | how), batch_size=3)


def rows_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]


def test_prompts_and_their_lines(tmp_path: Path) -> None:
    file = prompt_file(tmp_path, {"prompt": "a", "id": [1]}, b"", {"prompt": "\u2028b"})
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    first, second = read_prompts(file)
    assert tuple(first) == (1, [1], "a")
    assert tuple(second) == (3, None, "\u2028b")


BROKEN: dict[str, Any] = {
    "no JSON": b'{"prompt": ', "no object": ["a"], "no prompt": {"text": "a"}, "nested": b"[" * 100_000,
    "an unknown name": {"prompt": "a", "max_new_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(GenerationError, match=r"prompts\.jsonl, line 2: "):
        read_prompts(prompt_file(tmp_path, {"prompt": "a"}, line, {"prompt": "b"}))


@pytest.mark.parametrize(("value", "shown"), [(5, "5"), (None, "None"), (["a"], r"\['a'\]")])
def test_a_prompt_that_is_no_text_is_shown(tmp_path: Path, value: Any, shown: str) -> None:
    with pytest.raises(GenerationError, match=rf'line 1: "prompt" must be a text, got {shown}$'):
        read_prompts(prompt_file(tmp_path, {"prompt": value}))


def test_plain_lines_are_prompts_too(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("the dog\r\n\n {a} 狗\n[1]".encode())
    prompts = read_prompts(tmp_path / "p.txt")
    assert [(line.line, line.prompt) for line in prompts] == [(1, "the dog"), (3, " {a} 狗"), (4, "[1]")]
    (tmp_path / "p.txt").write_text('{"prompt": "a", "id": 7}\n')
    assert [(line.id, line.prompt) for line in read_prompts(tmp_path / "p.txt")] == [(7, "a")]
    (tmp_path / "p.txt").write_bytes(b"the dog\n\xff")
    with pytest.raises(GenerationError, match=r"p\.txt, line 2 "):
        read_prompts(tmp_path / "p.txt")


@pytest.mark.parametrize("path", ["empty.txt", "none.jsonl", "nul\0"])
def test_no_prompts(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(GenerationError, match=path.partition("\0")[0]):
        read_prompts(f"{tmp_path}/{path}")


@pytest.mark.parametrize("copies", [1, 3])
def test_texts_stand_in_the_order_of_the_prompts_and_are_those_of_complete(tmp_path: Path, copies: int) -> None:
    prompts, out = prompt_file(tmp_path, *PROMPTS), tmp_path / "out.jsonl"
    how = {**HOW, "num_return_sequences": copies}
    with texts_of(prompts, out, num_return_sequences=copies) as file:
        finished = [(text.prompt, text.number) for text in file.write()]
    assert finished == [(i, j) for i in range(len(PROMPTS)) for j in range(copies)]
    lines = read_prompts(prompts)
    expected = {
        (text.prompt, text.number): text for text in complete(MODEL, TOKENIZER, [p.prompt for p in lines], **how)
    }
    rows = rows_in(out)
    for (i, j), row in zip(finished, rows, strict=True):
        assert (row["line"], row["number"], row.get("id"), row["prompt"]) == (
            i + 1, j, PROMPTS[i].get("id"), PROMPTS[i]["prompt"],
        )  # fmt: skip
        assert (row["text"], row["end"], row["tokens"]) == (
            expected[i, j].text, expected[i, j].end, len(expected[i, j].ids),
        )  # fmt: skip
    assert '"prompt": "狗"' in out.read_text(encoding="utf-8")


def test_a_run_goes_on_wherever_it_was_cut(tmp_path: Path) -> None:
    prompts, out = prompt_file(tmp_path, *PROMPTS), tmp_path / "out.jsonl"
    with texts_of(prompts, out) as file:
        assert len(list(file.write())) == file.total == len(PROMPTS)
    whole = out.read_bytes()
    for end in (0, 1, 40, len(whole) // 2, len(whole) - 30, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:end])
        kept = whole[:end].count(b"\n")
        with texts_of(prompts, out) as file:
            assert len(file.lines.rows) == kept
            assert [text.prompt for text in file.write()] == list(range(kept, len(PROMPTS)))
        assert out.read_bytes() == whole


OTHERS: dict[str, dict[str, Any]] = {
    "settings": {"seed": 6}, "model": {"opened_by": "another"}, "prompts": {"prompts": PROMPTS[:-1]},
    "line": {"prompts": [{**PROMPTS[0], "id": 1}, *PROMPTS[1:]]}, "id": {"prompts": [*PROMPTS[:-1], PROMPTS[-2]]},
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_leaves_the_file_as_it_is(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out.jsonl"
    with texts_of(prompt_file(tmp_path, *PROMPTS), out) as file:
        next(file.write())
    before, how = out.read_bytes(), dict(OTHERS[what])
    with pytest.raises(GenerationError, match=r"out\.jsonl"):
        texts_of(prompt_file(tmp_path, *how.pop("prompts", PROMPTS)), out, **how)
    assert out.read_bytes() == before


def test_nothing_is_written_if_a_prompt_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match=r"prompts\.jsonl, line 2: .*70"):
        texts_of(prompt_file(tmp_path, {"prompt": "a"}, {"prompt": "x" * 70}), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
