"""What a person reads in a terminal: the verdict in words, and the report's own figures."""

import html
import io
import math
from pathlib import Path
from typing import Any

import pytest
from reports import Report, divergence, made, sample_report
from rich.console import Console, RenderableType

from minigpt.judge.rules import decide
from minigpt.report.fields import Causes
from minigpt.report.numerals import brief, precise, uncertain
from minigpt.report.parity_report import ParityReport
from minigpt.report.terminal import parity_summary, reports_table

MADE = sample_report(2)


def report_with(**parts: Any) -> Report:
    """A passing report in which these parts are others."""
    return MADE | parts


def failing() -> Report:
    logits = {"max_abs_error": 0.875, "rms_error": 0.0456, "scale": 1.5, "noise_floor_max": 0.25}
    reasons = ["The logits' RMS error is 0.0456."]
    return report_with(
        logits=logits | {"noise_floor_rms": 0.0152, "ratio": 3.0, "ratio_without_shift": 3.0},
        bisect=None,
        verdict="fail",
        reasons=reasons,
    )


def judgement() -> ParityReport:
    """The same as ``report_with()``, as a judgement returns it."""
    figures = made(MADE)
    return ParityReport.of(
        figures, decide(figures, {}), Causes(precision=figures.precision, diagnosis=figures.diagnosis)
    )


def shown(report: Report, width: int = 400) -> str:
    """The summary as it is written to a file."""
    return printed(parity_summary(made(report)), width)


def printed(summary: RenderableType, width: int = 400) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(summary)
    return file.getvalue()


def test_the_verdict_is_a_word_and_not_a_colour_alone() -> None:
    assert shown(report_with()).startswith("PASS")
    assert "FAIL" not in shown(report_with())
    assert shown(failing()).startswith("FAIL")


def test_what_was_judged() -> None:
    verdict = shown(report_with()).splitlines()[0]
    for part in (MADE["model"], "textbook", "*", "float32", "sdpa", "cpu", MADE["prompts"]):
        assert part in verdict


def test_the_figures_are_the_reports() -> None:
    text = shown(failing())
    for figure in ("0.0456", "3.00\u00d7", "0.0152", "1.50", "0.875", "0.25"):
        assert figure in text, text
    assert brief(MADE["distribution"]["kl_max"]) in text
    assert precise(MADE["distribution"]["perplexity_candidate"]) in text
    assert str(MADE["greedy"]["tokens_compared"]) in text
    assert "bit for bit" in text


@pytest.mark.parametrize(("within_noise", "told"), [(True, "within the noise"), (False, "beyond the noise")])
def test_where_greedy_decoding_parts(within_noise: bool, told: str) -> None:
    parting = divergence() | {"within_noise": within_noise}
    text = shown(report_with(greedy={"tokens_compared": 82, "first_divergence": parting}))
    for part in ("82", "17", told, brief(parting["margin"]), brief(parting["noise"])):
        assert part in text


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


def test_a_failure_names_the_next_command() -> None:
    assert "Next:" not in shown(report_with())
    assert "minigpt norms --check textbook names a mistake" in shown(failing())
    assert "--bisect names the sites" in shown(failing())


def test_each_figure_names_the_tokens_that_it_is_of() -> None:
    text = shown(report_with())
    assert "318 tokens of the 4 texts" in text
    assert "Of the whole of data/held-out.txt" in text
    assert f"text of {MADE['text']['tokens']:,} tokens" in text


def test_what_a_candidate_does_not_give_is_named() -> None:
    assert "Not judged" not in shown(report_with())
    text = shown(report_with(missing=["tokens one by one", "gradients"]))
    assert "tokens one by one, since the candidate takes no cache of transformers" in text
    assert "; gradients, since the candidate has none" in text


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


def test_a_budget_that_is_kept_is_not_called_parity() -> None:
    line = {"quantity": "kl", "limit": 0.01, "measured": 0.0012, "kept": True, "text": "the prompts"}
    logits = MADE["logits"] | {"ratio": 98_727.0}
    text = shown(report_with(budget=[line], logits=logits))
    assert text.startswith("PASS  Within the budget")
    assert "Parity holds" not in text
    assert "98,727\u00d7 the noise floor" in text
    assert "Over the budget" in shown(report_with(budget=[line | {"kept": False}], verdict="fail"))


def test_a_norm_that_is_meant_to_differ_is_not_called_half_precision() -> None:
    logits = {**MADE["logits"], "ratio": 21573.0}
    like_bfloat16 = report_with(logits=logits, precision={"like": "bfloat16", "ratio": 1.2})
    assert "it computes in bfloat16" in shown(like_bfloat16)
    assert "it computes in" not in shown(like_bfloat16 | {"exact": False})


def test_a_lower_perplexity_is_said_not_to_be_better() -> None:
    lower = MADE["perplexity"] | {"candidate": 9.0}
    different = {"exact": False, "verdict": "fail", "reasons": ["It differs."]}
    assert "not better here" in shown(report_with(perplexity=lower, **different))
    assert "not better here" not in shown(report_with(**different))


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
