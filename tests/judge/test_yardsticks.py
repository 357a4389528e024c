"""Timing in turns, and the norms' share. How long anything takes is no matter here; what is counted is."""

from pathlib import Path

import torch
from checkpoints import reference, saved

from minigpt.judge.contest import Contest
from minigpt.judge.yardsticks import cost, interleaved_ms

CPU = torch.device("cpu")


def test_contestants_take_turns_after_a_first_round_that_warms_up() -> None:
    calls: list[str] = []
    found = interleaved_ms(CPU, a=lambda: calls.append("a"), b=lambda: calls.append("b"))
    assert calls == ["a", "b"] * 8
    assert found.keys() == {"a", "b"}


@torch.inference_mode()
def test_the_norms_are_timed_at_the_models_own_dtype_and_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    contest = Contest(saved(reference(), tmp_path), "textbook", ["*"], "sdpa", torch.device("cpu"), torch.bfloat16)
    seen = set()
    for site in contest.swapped:
        contest.candidate.get_submodule(site).register_forward_pre_hook(
            lambda _, args: seen.add((args[0].dtype, args[0].shape))
        )
    ids = [1, 2, 3, 4, 5]
    before = contest.candidate(contest.tensor(ids))
    found = cost(contest, ids)
    assert seen == {(torch.bfloat16, (1, 5, 32)), (torch.bfloat16, (1, 1, 32))}
    assert found.prefill_tokens == 5
    assert all(0 < found[f"{phase}_norm_share"] <= 1 for phase in ("prefill", "decode"))
    assert contest.candidate(contest.tensor(ids)).equal(before)
