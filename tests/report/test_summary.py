"""What a person reads in a terminal: the verdict in words, and the report's own figures."""

import html
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports import divergence, made, sample_report
from rich.console import Console

from minigpt.judge.rules import decide
from minigpt.report.fields import Divergence, Greedy, LogitsError
from minigpt.report.numerals import brief, precise, uncertain
from minigpt.report.parity_report import ParityReport
from minigpt.report.parity_summary import parity_summary

MADE = made(sample_report(2))


def report_with(**parts: Any) -> ParityReport:
    """A passing report in which these parts are others."""
    return decide(replace(MADE, **parts), {})


def failing() -> ParityReport:
    logits = LogitsError(0.875, 0.0456, 1.5, noise_floor_max=0.25, noise_floor_rms=0.0152, ratio=3.0,
                         ratio_without_shift=3.0)  # fmt: skip
    return report_with(logits=logits, bisect=None)


def shown(report: ParityReport, width: int = 400) -> str:
    """The summary as it is written to a file."""
    file = io.StringIO()
    Console(file=file, width=width).print(parity_summary(report))
    return file.getvalue()


def test_the_verdict_is_a_word_and_not_a_colour_alone() -> None:
    assert shown(report_with()).startswith("PASS")
    assert "FAIL" not in shown(report_with())
    assert shown(failing()).startswith("FAIL")


def test_what_was_judged() -> None:
    verdict = shown(report_with()).splitlines()[0]
    for part in (MADE.model, "textbook", "*", "float32", "sdpa", "cpu", MADE.prompts):
        assert part in verdict


def test_the_figures_are_the_reports() -> None:
    text = shown(failing())
    for figure in ("0.0456", "3.00\u00d7", "0.0152", "1.50", "0.875", "0.25"):
        assert figure in text, text
    assert brief(MADE.distribution.kl_max) in text
    assert precise(MADE.distribution.perplexity_candidate) in text
    assert f"all {MADE.greedy.tokens_compared} agree" in text
    assert "bit for bit" in text


@pytest.mark.parametrize(("within_noise", "told"), [(True, "within the noise"), (False, "beyond the noise")])
def test_where_greedy_decoding_parts(within_noise: bool, told: str) -> None:
    parting = Divergence(**divergence() | {"within_noise": within_noise})
    text = shown(report_with(greedy=Greedy(82, parting)))
    for part in ("prompt 2", "token 17", told, brief(parting.margin), brief(parting.noise)):
        assert part in text


@pytest.mark.parametrize("name", ["a[/b]", "[red]model", ":dog:", "狗"])
def test_names_are_shown_as_they_are(name: str) -> None:
    assert name in shown(report_with(model=name, norm=name, prompts=name))


def test_figures_that_are_not_finite_are_no_crash() -> None:
    logits = replace(MADE.logits, rms_error=math.nan, ratio=math.nan, max_abs_error=math.inf)
    distribution = replace(MADE.distribution, perplexity_candidate=math.nan, kl_max=math.inf)
    text = shown(report_with(logits=logits, distribution=distribution))
    assert text.startswith("FAIL")
    assert "not finite" in text


def test_print_shows_the_summary_and_repr_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    print(report_with())
    assert capsys.readouterr().out.split() == shown(report_with()).split()
    assert repr(report_with()) == "<ParityReport PASS: textbook at * in demo>"


def test_a_notebook_and_to_html_show_the_page(tmp_path: Path) -> None:
    report_with().to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Parity holds" in page
    framed = report_with()._repr_html_()
    assert framed.startswith("<iframe")
    assert html.unescape(framed.partition('srcdoc="')[2].partition('"')[0]) == page


def test_a_failure_names_the_next_command() -> None:
    assert "Next:" not in shown(report_with())
    assert "minigpt norms --check textbook names a mistake" in shown(failing())
    assert "--bisect names the sites" in shown(failing())


def test_each_figure_names_the_tokens_that_it_is_of() -> None:
    text = shown(report_with())
    assert "318 tokens of the 4 texts" in text
    assert "perplexity of data/held-out.txt" in text
    assert "1,024 tokens" in text


def test_what_a_candidate_does_not_give_is_named() -> None:
    assert "Not judged" not in shown(report_with())
    assert "gradients, attention" in shown(report_with(missing=["gradients", "attention"]))


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (0.12431, 0.0746, "0.12 ± 0.07"), (0.9789, 0.0053, "0.979 ± 0.005"), (34.4586, 1.2, "34 ± 1"),
        (1.1496e-12, 3.67e-13, "(1.1 ± 0.4)e-12"), (2e-5, 1e-3, "(0 ± 1)e-3"), (1.5, math.nan, "1.50"),
        (3.0, 0.0, "3.00"),
    ],
)  # fmt: skip
def test_a_number_has_the_digits_that_its_error_supports(x: float, error: float, text: str) -> None:
    assert uncertain(x, error) == text
