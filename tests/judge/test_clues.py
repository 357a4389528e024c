"""Where no mistake has a name, a sentence says where the error is, if that is clear."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import planted
import pytest
import torch
from judgements import PROMPTS
from torch import Tensor
from transformers import GPT2LMHeadModel

import minigpt
from minigpt.judge.candidate import candidate_of
from minigpt.judge.clues import by_position, by_size
from minigpt.judge.diagnosis import find_clues
from minigpt.judge.evidence import Evidence

RANDOM = "dropout may be on"
KINDS = (
    "longest prompt is right", "what is written behind it", "right before position", "Position 0 is right",
    "error grows", "monotone function", "first output that is off is", "first block that is off", RANDOM,
)  # fmt: skip


# Most of the time goes to the mistakes that have a name. Where none is sought, clues are the same.
SEARCHED = pytest.mark.parametrize("search", [False, pytest.param(True, marks=pytest.mark.thorough)])


@torch.no_grad()
def clues(original: minigpt.Original, candidate: Any, search: bool) -> list[str]:
    """Return the clues to what is wrong with a program; by ``search`` after a diagnosis that names no mistake."""
    report = original.judge(candidate, diagnose=search)
    assert report.outcome == "FAIL"
    if not search:
        found = find_clues(original.truth, candidate_of(original.truth, candidate).runner, report)
    else:
        assert report.diagnosis == []
        found = [note for note in report.notes if any(kind in note for kind in KINDS)]
    print(*found, sep="\n")
    return found


def one(found: list[str], words: str) -> str:
    (clue,) = [clue for clue in found if words in clue]
    return clue


class Other(planted.Program):
    """A program whose attention has another number somewhere: no mistake of the table."""

    def __init__(self, place: Path, is_off: Callable[[Tensor], Tensor]) -> None:
        super().__init__(place)
        self.is_off = is_off

    def __call__(self, ids: Tensor) -> Tensor:
        self.rows = self.is_off(ids[0])
        return super().__call__(ids)

    def position(self, ids: Tensor) -> Tensor:
        return super().position(ids) + 0.1 * self.rows[:, None] * torch.cos(torch.arange(self.w["wpe.weight"].shape[1]))


def of_prompts(change: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the rows that are off, by positions and the length of the prompt."""

    def rows(ids: Tensor) -> Tensor:
        length = next(len(prompt) for prompt in PROMPTS if prompt == ids[: len(prompt)].tolist())
        return change(torch.arange(len(ids)), length).float()

    return rows


ROWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "longest prompt is right": lambda positions, length: torch.full_like(positions, length < 10),
    "what is written behind it": lambda positions, length: positions >= length,
    "right before position 5": lambda positions, length: positions >= 5,
    "Position 0 is right": lambda positions, length: positions >= 1,
}


@SEARCHED
@pytest.mark.parametrize("words", ROWS)
def test_rows_that_are_right_are_a_clue(original: minigpt.Original, words: str, search: bool) -> None:
    program = Other(original.truth.facts.place, of_prompts(ROWS[words]))
    found = clues(original, lambda ids: program(ids), search)
    assert "times the noise" in one(found, words)
    assert len(found) == 1


def test_a_clue_stands_in_the_report_and_on_its_page(original: minigpt.Original) -> None:
    program = Other(original.truth.facts.place, of_prompts(ROWS["what is written behind it"]))
    assert one(clues(original, lambda ids: program(ids), search=True), "what is written behind it")


@SEARCHED
def test_an_error_that_is_everywhere_is_no_clue(original: minigpt.Original, search: bool) -> None:
    program = Other(original.truth.facts.place, of_prompts(lambda positions, length: positions >= 0))
    assert clues(original, lambda ids: program(ids), search) == []


@SEARCHED
def test_an_error_that_grows_along_the_text_is_a_clue(search: bool, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    model = architectures.random_model("llama", rope_parameters=rope, max_position_embeddings=128)
    model.save_pretrained(tmp_path)
    wrong = architectures.random_model(
        "llama", rope_parameters=rope | {"rope_theta": 10_100.0}, max_position_embeddings=128
    )
    prompts = torch.randint(3, 96, (2, 100), generator=torch.Generator().manual_seed(0)).tolist()
    original = minigpt.Original(tmp_path, prompts=prompts, max_new_tokens=2, device="cpu")
    found = clues(original, lambda ids: wrong(ids).logits, search)
    assert one(found, "Position 0 is right")
    assert one(found, "error grows")


@SEARCHED
@pytest.mark.parametrize("change", [lambda x: 37 * torch.tanh(x / 37), lambda x: x + 0.02 * x**3])
def test_a_monotone_function_of_the_logits_is_a_clue(
    original: minigpt.Original, change: Callable[[Tensor], Tensor], search: bool
) -> None:
    program = planted.Program(original.truth.facts.place)
    found = clues(original, lambda ids: change(program(ids)), search)
    assert "cap, a scale or a temperature" in one(found, "monotone")


def test_only_a_monotone_function_is_one() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = 3 * torch.randn(40, 96, dtype=torch.float64, generator=generator)
    noise = 1e-4 * torch.randn(truth.shape, dtype=torch.float64, generator=generator)
    ids = torch.zeros(1, 40, dtype=torch.long)
    for logits, count in ((truth + noise, 1), (-truth, 0), (truth.abs(), 0), (truth + 100 * noise, 0)):
        assert len([*by_size([Evidence(ids, logits, truth)], 1e-4)]) == count


def test_growth_is_one_of_ranks() -> None:
    truth = torch.zeros(40, 8, dtype=torch.float64)
    ids = torch.zeros(1, 40, dtype=torch.long)
    rows = torch.arange(40)[:, None]
    for error, words in ((1 + rows, "from 7.00 to 36.0 times"), (40 - rows, ""), (20 + 10 * torch.cos(rows), "")):
        found = [*by_position([Evidence(ids, truth + error, truth)], 1.0)]
        assert [clue for clue in found if "grows" in clue and words in clue] == found[: bool(words)]


def test_another_answer_to_the_same_question_is_dropout(original: minigpt.Original) -> None:
    program = planted.Program(original.truth.facts.place)

    def with_dropout(ids: Tensor) -> Tensor:
        return torch.nn.functional.dropout(program(ids), 0.1)

    found = clues(original, with_dropout, search=True)
    assert RANDOM in one(found, "Asked again")
    assert len(found) == 1


@SEARCHED
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("h.1.attn.c_attn", "is an attention's: h.1.ln_1 is right, and h.1.ln_2 behind it is off"),
        ("h.1.mlp.c_fc", "is an MLP's: h.1.ln_2 is right, and h.1 behind it is off"),
        ("h.1.ln_2", "is a norm's: h.1.ln_2 is off by "),
    ],
)
def test_the_kind_of_the_first_output_that_is_off_is_said(
    original: minigpt.Original, path: str, words: str, search: bool
) -> None:
    model: Any = GPT2LMHeadModel.from_pretrained(original.truth.facts.place).eval()
    with torch.no_grad():
        weight = model.transformer.get_submodule(path).weight
        weight += 0.1 * torch.cos(torch.arange(weight.numel())).view_as(weight)
    assert words in one(clues(original, model, search), "first output that is off is")


@SEARCHED
@pytest.mark.parametrize(("name", "serial"), [("llama", True), ("olmo2", False), ("openai-gpt", False)])
def test_a_part_is_named_where_blocks_are_norm_attention_norm_mlp(
    name: str, serial: bool, search: bool, tmp_path: Path
) -> None:
    architectures.random_model(name).save_pretrained(tmp_path)
    original = minigpt.Original(tmp_path, prompts=PROMPTS, max_new_tokens=2, device="cpu")
    model: Any = architectures.random_model(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ("layers.1" in path and "o_proj" in path) or "h.1.attn.c_proj.w" in path:
                parameter += 0.1 * torch.cos(torch.arange(parameter.numel())).view_as(parameter)
    found = [clue for clue in clues(original, model, search) if "an attention's" in clue or "an MLP's" in clue]
    assert len(found) == serial


@SEARCHED
def test_the_first_block_of_its_type_is_a_clue(search: bool, tmp_path: Path) -> None:
    types = {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
    right = architectures.random_model("gemma3", sliding_window=6, **types)
    right.save_pretrained(tmp_path)
    original = minigpt.Original(tmp_path, prompts=PROMPTS, max_new_tokens=2, device="cpu")
    wrong = architectures.random_model("gemma3", sliding_window=4, **types)
    found = clues(original, wrong, search)
    assert "model.layers.2, is the first of type sliding_attention" in one(found, "first block that is off")
