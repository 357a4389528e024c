"""A file of prompts to a file of texts: what is broken is named, what is there is kept, nothing is written twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import small_model

from minigpt import GenerationError
from minigpt.generation import Completion
from minigpt.generation.promptfile import PromptLine, ResultFile, fingerprint, read_prompts

RUN = "0123456789abcdef"


def prompt_file(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def some(folder: Path) -> list[PromptLine]:
    return read_prompts(prompt_file(folder, {"prompt": "a", "id": "x"}, {"prompt": "狗"}, {"prompt": ""}))


def text(prompt: int, number: int = 0) -> Completion:
    return Completion(prompt, number, [1, 2], "é\n狗", "eos", None)


def test_prompts_and_where_they_stand(tmp_path: Path) -> None:
    file = prompt_file(
        tmp_path, {"prompt": "a", "seed": 3, "max_new_tokens": 2, "id": [1]}, b"\n", {"prompt": "\u2028b"}
    )
    first, second = read_prompts(file)
    assert (first.line, first.id, first.prompt.text, first.prompt.seed, first.prompt.max_new_tokens) == (
        1,
        [1],
        "a",
        3,
        2,
    )
    assert (second.line, second.id, second.prompt.text, second.prompt.seed) == (3, None, "\u2028b", None)


def test_a_mark_of_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (line,) = read_prompts(prompt_file(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n'))
    assert line.prompt.text == "a"


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": (b'{"prompt": \n', "not a JSON object"),
    "no object": (["a"], "not a JSON object"),
    "no prompt": ({"text": "a"}, '"prompt" must be a text'),
    "an unknown name": ({"prompt": "a", "max_tokens": 3}, "unknown max_tokens; known are prompt, id, max_new_tokens"),
}


@pytest.mark.parametrize(("line", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, line: Any, reason: str) -> None:
    with pytest.raises(GenerationError, match=rf"prompts\.jsonl, line 2: .*{reason}"):
        read_prompts(prompt_file(tmp_path, {"prompt": "a"}, line, {"prompt": "b"}))


def test_plain_lines_are_prompts_too(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("the dog\r\n\n {a} 狗\n[1]".encode())
    read = read_prompts(tmp_path / "p.txt")
    assert [(line.line, line.id, line.prompt.text) for line in read] == [
        (1, None, "the dog"), (3, None, " {a} 狗"), (4, None, "[1]"),
    ]  # fmt: skip
    (tmp_path / "p.txt").write_text('{"prompt": "a", "id": 7}\n')
    assert [(line.id, line.prompt.text) for line in read_prompts(tmp_path / "p.txt")] == [(7, "a")]
    (tmp_path / "p.txt").write_bytes(b"the dog\n\xff")
    with pytest.raises(GenerationError, match=r"p\.txt, line 2 is not UTF-8"):
        read_prompts(tmp_path / "p.txt")


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="has no prompt"):
        read_prompts(prompt_file(tmp_path, b"\n \n"))
    with pytest.raises(GenerationError, match=r"cannot read .*none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl")


def test_a_fingerprint_tells_runs_apart(tmp_path: Path) -> None:
    lines, model = some(tmp_path), small_model()
    same = fingerprint(model, lines, {"seed": 1})
    assert fingerprint(small_model(), some(tmp_path), {"seed": 1}) == same
    other = small_model()
    other.h[1].mlp.c_fc.weight.data.mul_(1.001)
    others = (
        fingerprint(other, lines, {"seed": 1}), fingerprint(model, lines, {"seed": 2}),
        fingerprint(model, lines[:2], {"seed": 1}), fingerprint(model.double(), lines, {"seed": 1}),
        fingerprint(small_model(layer_norm_epsilon=1e-6), lines, {"seed": 1}),
    )  # fmt: skip
    assert len({same, *others}) == 6


@pytest.mark.parametrize("more", [{"id": 1}, {"max_new_tokens": 1}, {"seed": 1}], ids=str)
def test_whatever_a_line_says_makes_it_another_run(tmp_path: Path, more: dict[str, int]) -> None:
    model, said = small_model(), [{"prompt": "a"}, {"prompt": "a", **more}]
    assert len({fingerprint(model, read_prompts(prompt_file(tmp_path, line)), {}) for line in said}) == 2


def test_results_are_lines_that_say_what_they_are(tmp_path: Path) -> None:
    lines, out = some(tmp_path), tmp_path / "out.jsonl"
    with ResultFile(out, RUN) as results:
        results.add(lines[1], text(1))
        assert len(out.read_bytes().splitlines()) == 1, "a result is there as soon as it is added"
        results.add(lines[0], text(0, 2))
    assert '"prompt": "狗"' in out.read_text(encoding="utf-8"), "people read it, too"
    first, second = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert first == {"run": RUN, "line": 2, "number": 0, "prompt": "狗", "text": "é\n狗", "end": "eos", "tokens": 2}
    assert (second["id"], second["line"], second["number"]) == ("x", 1, 2)


def test_a_run_goes_on_wherever_it_was_cut(tmp_path: Path) -> None:
    """At every byte of the last line: the whole lines are kept, and the rest is removed, and said to be."""
    lines, out = some(tmp_path), tmp_path / "out.jsonl"
    with ResultFile(out, RUN) as results:
        results.add(lines[0], text(0))
        before = len(out.read_bytes())
        results.add(lines[1], text(1))
    whole = out.read_bytes()
    for end in range(before, len(whole) + 1):
        out.write_bytes(whole[:end])
        with ResultFile(out, RUN) as results:
            assert results.done == ({(1, 0), (2, 0)} if end == len(whole) else {(1, 0)})
            assert (results.note is not None) == (before < end < len(whole))
            if (2, 0) not in results.done:
                results.add(lines[1], text(1))
        assert out.read_bytes() == whole


FOREIGN = {
    "somebody's text": b"my diary\n",
    "somebody's text without a last line's end": b"my diary",
    "somebody's JSON": b'{"a": 1}\n',
    "another run": b'{"run": "another", "line": 1, "number": 0}\n',
    "another run, cut": b'{"run": "another", "li',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_anything_else_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    with pytest.raises(GenerationError, match=r"out\.jsonl.*another --out"):
        ResultFile(out, RUN)
    assert out.read_bytes() == content


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out.jsonl", RUN), pytest.raises(GenerationError, match="another run is writing"):
        ResultFile(tmp_path / "out.jsonl", RUN)
    ResultFile(tmp_path / "out.jsonl", RUN).__exit__()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(tmp_path: Path) -> None:
    with (
        ResultFile("/dev/full", RUN) as results,
        pytest.raises(GenerationError, match=r"No space left .* goes on"),
    ):
        results.add(some(tmp_path)[0], text(0))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "no" / "out.jsonl"):
        with pytest.raises(GenerationError, match="cannot write"):
            ResultFile(place, RUN)
