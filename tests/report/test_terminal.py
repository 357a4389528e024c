"""What a terminal shows of a report that is made up; test_words.py has its words and figures."""

import html
from pathlib import Path

import pytest
from reports import MADE, made, printed, report_with, shown

from minigpt.judge.verdict import decide
from minigpt.report.fields import Causes
from minigpt.report.overview import reports_table
from minigpt.report.parity_report import ParityReport


def judgement() -> ParityReport:
    """The same as ``report_with()``, as a judgement returns it."""
    figures = made(MADE)
    return ParityReport.of(
        figures, decide(figures, {}), Causes(precision=figures.precision, diagnosis=figures.diagnosis)
    )


@pytest.mark.parametrize("name", ["a[/b]", "[red]model", ":dog:", "狗"])
def test_names_are_shown_as_they_are(name: str) -> None:
    assert name in shown(report_with(model=name, norm=name, prompts=name))


def test_figures_that_are_not_finite_are_no_crash() -> None:
    logits = MADE["logits"] | {"rms_error": None, "ratio": None, "max_abs_error": None}
    distribution = MADE["distribution"] | {"perplexity_candidate": None, "kl_max": None}
    assert shown(report_with(logits=logits, distribution=distribution)).count("not finite") == 6


def test_print_shows_the_summary_and_repr_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    print(judgement())
    assert capsys.readouterr().out.split() == shown(report_with()).split()
    assert repr(judgement()) == "<ParityReport PASS: textbook at * in demo>"


def test_a_notebook_and_to_html_show_the_page(tmp_path: Path) -> None:
    judgement().to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Parity holds" in page
    framed = judgement()._repr_html_()
    assert framed.startswith("<iframe")
    assert html.unescape(framed.partition('srcdoc="')[2].partition('"')[0]) == page


def test_the_table_of_sites_begins_where_the_error_does() -> None:
    """Own errors are as large at every site; only the error of the outputs tells the place."""
    names = [f"h.{i}.{norm}" for i in range(4) for norm in ("ln_1", "ln_2")] + ["ln_f"]
    ratios = [1.0, 1.02, 0.98, 7.9, 7.1, 7.4, 6.8, 7.7, 7.5]
    sites = [
        {"site": name, "local_error": 4e-8, "propagated_error": ratio * 1e-7, "noise": 1e-7, "swapped": False}
        for name, ratio in zip(names, ratios, strict=True)
    ]
    lines = shown(report_with(norm_sites=sites, blocks=[])).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("norm or block"))
    assert lines[head + 1].split()[0] == "h.1.ln_2"
    sites[6] |= {"local_error": 0.3}
    assert "h.3.ln_1" in shown(report_with(norm_sites=sites, blocks=[])).split("norm or block")[1].splitlines()[1]


def test_a_table_never_mixes_two_texts() -> None:
    of_file = report_with(text=MADE["text"] | {"file": "held.txt"}, distribution=MADE["distribution"] | {"tokens": 500})
    of_prompts = report_with(perplexity=None)
    text = printed(reports_table([made(of_file), made(of_prompts), made(of_file)]))
    tables = text.split("All verdicts")[1:]
    assert [table.count("PASS") for table in tables] == [2, 1]
    assert "500 tokens of held.txt" in tables[0]
    assert "318 tokens of the 4 texts" in tables[1]
    assert "greedy" not in tables[0], "which is of the prompts"
