"""What a person reads in a terminal: the verdict in words, and the report's own figures."""

import dataclasses
import html
import io
import math
from pathlib import Path

import pytest
from checkpoints import reference, saved
from rich.console import Console

import minigpt
from minigpt.judge.parity_report import Divergence, Logits
from minigpt.measure.numerals import brief, precise
from minigpt.report.parity_summary import parity_summary


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> minigpt.ParityReport:
    place = saved(reference(std=0.3, n_layer=1), tmp_path_factory.mktemp("tiny"))
    return minigpt.parity(place, norm="textbook", device="cpu", prompts=[[5, 17, 42]], max_new_tokens=4)


def shown(report: minigpt.ParityReport, width: int = 400) -> str:
    """The summary as it is written to a file."""
    file = io.StringIO()
    Console(file=file, width=width).print(parity_summary(report))
    return file.getvalue()


def failing(report: minigpt.ParityReport) -> minigpt.ParityReport:
    return dataclasses.replace(
        report,
        logits=Logits(max_abs_error=0.875, rms_error=0.0456, scale=1.5, noise_floor_max=0.25, noise_floor_rms=0.0152),
    )


def test_the_verdict_is_a_word_and_not_a_colour_alone(passing: minigpt.ParityReport) -> None:
    assert shown(passing).startswith("PASS")
    assert "FAIL" not in shown(passing)
    assert shown(failing(passing)).startswith("FAIL")
    assert "PASS" not in shown(failing(passing))


def test_what_was_judged(passing: minigpt.ParityReport) -> None:
    verdict = shown(passing).splitlines()[0]
    for part in (passing.model, "textbook", "*", "float32", "sdpa", "cpu", passing.prompts):
        assert part in verdict


def test_the_figures_are_the_reports(passing: minigpt.ParityReport) -> None:
    text = shown(failing(passing))
    for figure in ("0.0456", "3.00 times", "0.0152", "1.50", "0.875", "0.25"):
        assert figure in text, text
    assert brief(passing.distribution.kl_max) in text
    assert precise(passing.distribution.perplexity_candidate) in text
    assert f"all {passing.greedy.tokens_compared} agree" in text
    assert "bit for bit" in text


@pytest.mark.parametrize(
    ("margin", "noise", "told"), [(0.5, 0.75, "within the noise"), (0.5, 0.25, "beyond the noise")]
)
def test_where_greedy_decoding_parts(passing: minigpt.ParityReport, margin: float, noise: float, told: str) -> None:
    parting = Divergence(prompt=3, token=17, candidate_id=1, reference_id=2, margin=margin, noise=noise)
    text = shown(dataclasses.replace(passing, greedy=dataclasses.replace(passing.greedy, first_divergence=parting)))
    for part in ("prompt 3", "token 17", told, brief(margin), brief(noise)):
        assert part in text


@pytest.mark.parametrize("name", ["a[/b]", "[red]model", ":dog:", "狗"])
def test_names_are_shown_as_they_are(passing: minigpt.ParityReport, name: str) -> None:
    assert name in shown(dataclasses.replace(passing, model=name, norm=name, prompts=name))


def test_figures_that_are_not_finite_are_no_crash(passing: minigpt.ParityReport) -> None:
    logits = dataclasses.replace(failing(passing).logits, rms_error=math.nan, max_abs_error=math.inf)
    distribution = dataclasses.replace(passing.distribution, perplexity_candidate=math.nan, kl_max=math.inf)
    text = shown(dataclasses.replace(passing, logits=logits, distribution=distribution))
    assert text.startswith("FAIL")
    assert "not finite" in text


def test_prompts_that_predict_nothing(passing: minigpt.ParityReport) -> None:
    nothing = dataclasses.replace(passing.distribution, perplexity_reference=math.nan, perplexity_candidate=math.nan)
    assert "nothing to predict: no prompt has two tokens" in shown(dataclasses.replace(passing, distribution=nothing))
    broken = dataclasses.replace(passing.logits, scale=math.nan)
    assert "nothing to predict" not in shown(dataclasses.replace(passing, distribution=nothing, logits=broken))


def test_print_shows_the_summary_and_repr_one_line(
    passing: minigpt.ParityReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    print(passing)
    assert capsys.readouterr().out.split() == shown(passing).split()
    assert repr(passing).startswith("<ParityReport PASS: textbook at * in ")


def test_a_notebook_and_to_html_show_the_page(passing: minigpt.ParityReport, tmp_path: Path) -> None:
    passing.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Parity holds" in page
    framed = passing._repr_html_()
    assert framed.startswith("<iframe")
    assert html.unescape(framed.partition('srcdoc="')[2].partition('"')[0]) == page


def test_a_failure_names_the_next_command(passing: minigpt.ParityReport) -> None:
    assert "Next:" not in shown(passing)
    assert "minigpt norms --check textbook names a mistake" in shown(failing(passing))
    assert "--bisect names the sites" in shown(failing(passing))


def test_the_perplexity_says_that_the_texts_are_built_in(passing: minigpt.ParityReport) -> None:
    assert "built-in" not in shown(passing)
    report = dataclasses.replace(passing, prompts="4 built-in texts")
    assert ", of the 4 built-in texts; --text FILE measures others" in shown(report)
