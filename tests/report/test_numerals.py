"""Numbers as text, and the share of a long run that is done."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import talking

import minigpt
from minigpt.progress import Steps, time_left
from minigpt.report.numerals import brief, percent, uncertain


def test_shares_grow_and_stay_below_the_whole() -> None:
    message: list[tuple[str, float]] = []
    begin = Steps(lambda *step: message.append(step), total=2)
    for step in "abcd":  # more than were expected
        begin(step)
    assert message == [("a", 0.0), ("b", 0.5), ("c", 2 / 3), ("d", 3 / 4)]


def test_the_share_of_a_judgement_grows_with_each_step(tmp_path: Path) -> None:
    place = talking(tmp_path)
    (tmp_path / "text").write_text("the dog saw the house. " * 9, encoding="utf-8")
    message: list[tuple[str, float]] = []
    minigpt.parity(
        place, norm="textbook", prompts=["the dog", "a cat", "x"], max_new_tokens=1, device="cpu",
        sensitivity=True, bisect=True, text=tmp_path / "text", progress=lambda *step: message.append(step),
    )  # fmt: skip
    shares = [share for step, share in message if ": text" not in step]
    assert shares[:5] == pytest.approx([0.6 * i / 5 for i in range(5)])
    assert shares == sorted(set(shares))
    assert 0.6 == shares[5] < shares[-1] < 1


@pytest.mark.parametrize(
    ("x", "text"),
    [(0.0, "0"), (1.0, "1.00"), (0.03456, "0.0346"), (1.2345e-7, "1.23e-7"), (999.6, "1,000"), (12345.6, "12,346"),
     (-0.5, "-0.500"), (1e-3, "0.00100"), (9.999e-4, "1.00e-3"), (1.5e6, "1.50e6"), (1e300, "1.00e300"),
     (float("inf"), "not finite")],
)  # fmt: skip
def test_brief(x: float, text: str) -> None:
    assert brief(x) == text


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (0.12431, 0.0746, "0.12 ± 0.07"), (0.9789, 0.0053, "0.979 ± 0.005"), (34.4586, 1.2, "34 ± 1"),
        (1.1496e-12, 3.67e-13, "(1.1 ± 0.4)e-12"), (2e-5, 1e-3, "(0 ± 1)e-3"),
        (-2e-8, 4e-7, "(0 ± 4)e-7"), (-0.01, 1.0, "0 ± 1"), (1.5, math.nan, "1.50"),
        (3.0, 0.0, "3.00"),
    ],
)  # fmt: skip
def test_a_number_has_the_digits_that_its_error_supports(x: float, error: float, text: str) -> None:
    assert uncertain(x, error) == text


@pytest.mark.parametrize("x", [1 - 10.0**-k for k in range(1, 16)] + [1.0, 0.0, 1e-9, 1 + 1e-12])
def test_only_all_is_a_hundred_percent(x: float) -> None:
    assert (percent(x) == "100%") is (x == 1)


def test_a_step_that_takes_long_says_which_text_is_read_and_how_long_the_rest_takes() -> None:
    said: list[tuple[str, float]] = []
    begin = Steps(lambda *step: said.append(step), total=2)
    begin("reading")
    assert [*begin.each("ab", 8)] == ["a", "b"]
    assert len(said) == 1, "nobody asks in the first seconds"
    begin.step_started -= 60
    assert [*begin.each("cd", 8, first=3)] == ["c", "d"]
    assert said[1:] == [
        ("reading: text 3 of 8, about 2 min left", 3 / 16),
        ("reading: text 4 of 8, about 60 s left", 4 / 16),
    ]
    assert (time_left(60, 0), time_left(60, 1)) == ("", ", about 0 s left")


def test_a_notebook_shows_progress_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Line:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data["text/plain"])

    notebook = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=None), display=SimpleNamespace(display=lambda *_, **__: Line())
    )
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    begin = Steps(None, total=2)
    begin("reading")
    begin("comparing")
    after = Steps(None)
    assert shown == ["0%: reading", "50%: comparing", ""], "the line of older work, which is still held"
    after("judging")
    del after
    assert shown[3:] == ["0%: judging", ""]
    notebook.get_ipython = lambda: None
    assert Steps(None).progress is None
