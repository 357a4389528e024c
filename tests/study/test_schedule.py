"""Schedules of swaps."""

import pytest

from minigpt.errors import NormError
from minigpt.study import parse_schedule

SITES = ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]


def test_stages_give_each_site_its_step():
    schedule = parse_schedule("h.*.ln_2@20+2, h.*.ln_1@28+3, ln_f@40, eot@45, first@50", SITES)
    assert schedule.steps == {"h.0.ln_2": 20, "h.1.ln_2": 22, "h.0.ln_1": 28, "h.1.ln_1": 31, "ln_f": 40}
    assert schedule.merges == {"eot": 45, "first": 50}


def test_queries_and_keys_have_another_turn_than_values():
    schedule = parse_schedule("h.*.ln_1.qk@3+1, h.*.ln_1.v@8+2", SITES)
    assert schedule.steps == {"h.0.ln_1.qk": 3, "h.1.ln_1.qk": 4, "h.0.ln_1.v": 8, "h.1.ln_1.v": 10}


def test_a_third_of_the_depth_is_a_pattern():
    deep = [f"h.{i}.{norm}" for i in range(12) for norm in ("ln_1", "ln_2")] + ["ln_f"]
    assert parse_schedule("late@3, early.qk@5+1, early.v@9", deep).steps == (
        dict.fromkeys(deep[16:24], 3)
        | {f"h.{i}.ln_1.qk": 5 + i for i in range(4)} | {f"h.{i}.ln_1.v": 9 for i in range(4)}
    )  # fmt: skip


def test_no_schedule_swaps_all_at_once():
    assert parse_schedule(None, SITES).steps == dict.fromkeys(SITES, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ln_f", "PATTERN@START"),
        ("h.9.ln_1@2", "no norm site matches 'h.9.ln_1'"),
        ("h.*.ln_2.qk@2", "no norm site matches 'h.\\*.ln_2'"),
        ("*@0, ln_f@2", "ln_f has two turns"),
        ("h.0.ln_1@0, h.*.ln_1.v@2", "h.0.ln_1 has two turns"),
        ("h.*.ln_1.v@2, h.*.ln_1@0", "h.0.ln_1 has two turns"),
        ("h.*.ln_1.v@2", "both one"),
    ],
)
def test_wrong_schedules(text, message):
    with pytest.raises(NormError, match=message):
        parse_schedule(text, SITES)
