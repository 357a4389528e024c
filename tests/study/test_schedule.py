"""Schedules of swaps."""

import pytest

from minigpt.errors import NormError
from minigpt.study.schedule import parse_schedule

SITES = ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]


def test_stages_give_each_site_its_step():
    schedule = parse_schedule("h.*.ln_2@20+2, h.*.ln_1@28+3, ln_f@40, first@50", SITES)
    assert schedule.steps == {"h.0.ln_2": 20, "h.1.ln_2": 22, "h.0.ln_1": 28, "h.1.ln_1": 31, "ln_f": 40}
    assert schedule.merge == 50


def test_a_third_of_the_depth_is_a_pattern():
    deep = [f"h.{i}.{norm}" for i in range(12) for norm in ("ln_1", "ln_2")] + ["ln_f"]
    schedule = parse_schedule("late@3, early@5+1", deep)
    assert schedule.steps == dict.fromkeys(deep[16:24], 3) | {site: 5 + i for i, site in enumerate(deep[:8])}


def test_no_schedule_swaps_all_at_once():
    assert parse_schedule(None, SITES).steps == dict.fromkeys(SITES, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ln_f", "PATTERN@START"),
        ("h.9.ln_1@2", "no norm site matches 'h.9.ln_1'"),
        ("h.*.ln_1.qk@2", "no norm site matches 'h.\\*.ln_1.qk'"),
        ("*@0, ln_f@2", "ln_f has two steps"),
    ],
)
def test_wrong_schedules(text, message):
    with pytest.raises(NormError, match=message):
        parse_schedule(text, SITES)
