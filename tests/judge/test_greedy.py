"""Greedy continuations: each prompt's own, whatever its batch mates, and the first difference told with its margin."""

from pathlib import Path

import pytest
import torch
from checkpoints import edit_config, reference, saved, tokens
from torch import nn

import minigpt
from minigpt.judge.contest import Contest, Judged
from minigpt.judge.greedy import Continued, compare_greedy, continuations, first_difference

CPU = torch.device("cpu")


class Broken(nn.LayerNorm):
    """Computes NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.nan


def contest(place: Path, norm: object = "textbook") -> Contest:
    return Contest(place, norm, ["*"], "sdpa", CPU, None)


@torch.no_grad()
def test_each_prompt_goes_on_as_it_does_alone(folder: Path) -> None:
    """More prompts than one batch holds, of all lengths up to the full context, where there is no room for 12 more."""
    lengths = [5, 1, 9, 48, 44, 3, 46, 2, 7, 30, 36, 37, 48, 4, 8]
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in lengths]
    found = continuations(contest(folder), prompts, 12)
    assert [text.prompt for text in found] == prompts
    model = minigpt.from_pretrained(folder, device="cpu")
    for text in found:
        ids, new = torch.tensor([text.prompt]), min(12, 48 - len(text.prompt))
        alone = minigpt.generate(model, ids, max_new_tokens=new)[0, len(text.prompt) :].tolist() if new else []
        assert text.candidate == text.reference == alone
        assert text.text == text.prompt + text.reference


@torch.no_grad()
def test_a_text_ends_with_its_end_and_not_with_what_fills_its_row(folder: Path) -> None:
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (4, 7, 9)]
    endless = continuations(contest(folder), prompts, 12)
    end = endless[1].reference[5]
    place = edit_config(saved(reference(std=0.3), folder.parent / "ending"), eos_token_id=end)
    for text, whole in zip(continuations(contest(place), prompts, 12), endless, strict=True):
        assert text.reference == text.candidate
        expected = whole.reference
        assert text.reference == (expected[: expected.index(end) + 1] if end in expected else expected)


@torch.no_grad()
def test_a_norm_that_computes_nan_is_named(folder: Path) -> None:
    with pytest.raises(minigpt.NormError, match="with this norm the model's logits are NaN"):
        continuations(contest(folder, Broken), [[1, 2, 3]], 2)


def test_what_noise_does_not_explain_is_told_first() -> None:
    judged = Judged([], "ids", None)
    close, close_truth = Continued([9], [1, 2, 3], [1, 5, 6]), margins(1.0, 0.1, 1.0, 1.0)
    wide, wide_truth = Continued([8, 9], [4, 4, 4], [4, 4, 7]), margins(1.0, 1.0, 1.0, 0.9, 1.0)
    found = compare_greedy([close, wide], [close_truth, wide_truth], 0.2, judged)
    assert found.tokens_compared == 2 + 3
    parting = found.first_divergence
    assert (parting.prompt, parting.token, parting.candidate_id, parting.reference_id) == (1, 2, 4, 7)
    assert (parting.margin, parting.within_noise) == (pytest.approx(0.9), False)
    only_close = compare_greedy([close], [close_truth], 0.2, judged).first_divergence
    assert (only_close.token, only_close.within_noise) == (1, True)
    assert compare_greedy([Continued([9], [1, 2], [1, 2])], [margins(1, 1, 1)], 0.2, judged).first_divergence is None


def margins(*apart: float) -> torch.Tensor:
    """Logits (T, 3) whose two largest are so far apart."""
    return torch.tensor([[0.0, x, -5.0] for x in apart], dtype=torch.float64)


def test_the_first_difference_lies_where_both_still_go() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2, 3], [1, 2]) is None
