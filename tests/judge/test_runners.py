"""The loop that decodes, which all runners share: on a model whose likeliest token is the last one plus 1."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import minigpt
from minigpt.judge.checkpoint_facts import read_facts
from minigpt.judge.reading import Text
from minigpt.judge.runners import Runner, Step

VOCABULARY, CONTEXT = 16, 6


class Counting(Runner):
    """Keeps which texts were begun together, and all pieces that it was given."""

    def start(self, texts: list[list[int]], room: int) -> Step:
        self.begun.append([len(text) for text in texts])

        def step(pieces: list[list[int]]) -> Tensor:
            self.pieces.append(pieces)
            assert len(pieces[0]) <= room <= CONTEXT
            likeliest = torch.tensor([piece[-1] + 1 for piece in pieces])
            return torch.nn.functional.one_hot(likeliest, VOCABULARY).float()

        return step


@pytest.fixture
def runner(folder: Path) -> Counting:
    facts = read_facts(folder)[0]
    counting = Counting(replace(facts, shape=replace(facts.shape, vocab_size=VOCABULARY, n_positions=CONTEXT)))
    counting.begun, counting.pieces = list[list[int]](), list[list[list[int]]]()
    return counting


def test_a_text_is_written_to_its_end_or_the_contexts(runner: Counting) -> None:
    written = runner.write([[3], [1, 2, 3], [0] * CONTEXT, [8]], 4, ends=[6, 11])
    assert [text.written for text, _ in written] == [[4, 5, 6], [4, 5, 6], [], [9, 10, 11]]
    assert [len(logits) for _, logits in written] == [3, 3, 0, 3]
    assert runner.begun == [[3], [1, 1]], "texts of one length together, and none without room"


def test_texts_of_several_lengths_are_read_together_where_they_may_be(runner: Counting) -> None:
    runner.pads = True
    runner.write([[3], [1, 2]], 2, ends=[])
    assert runner.begun == [[1, 2]]
    assert runner.pieces == [[[3], [1, 2]], [[4], [3]]]


def test_what_was_written_is_read_in_place_of_the_likeliest(runner: Counting) -> None:
    (logits,) = runner.decode([Text.whole([1, 9, 5, 7], 1)], [3])
    assert logits.argmax(-1).tolist() == [2, 10, 6]
    assert runner.pieces == [[[1]], [[9]], [[5]]]


def test_padding_of_the_vocabulary_is_never_written(runner: Counting) -> None:
    runner.used = 5
    ((text, _),) = runner.write([[3]], 3, ends=[])
    assert text.written == [4, 0, 1]


def test_a_runner_without_a_cache_writes_nothing(runner: Counting) -> None:
    assert Runner(runner.facts).write([[3]], 3, ends=[]) == []


class Wrapped(nn.Module):
    """A module of somebody who does not use transformers."""

    def __init__(self, model: minigpt.GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def test_a_module_is_judged_by_a_record_where_transformers_is_not_installed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minigpt.Original(folder, prompts=[[1, 2]], max_new_tokens=2, device="cpu").save(tmp_path / "record")
    monkeypatch.setitem(sys.modules, "transformers", None)
    candidate = Wrapped(minigpt.from_pretrained(folder, device="cpu"))
    assert minigpt.Original.load(tmp_path / "record", device="cpu").judge(candidate).passed
