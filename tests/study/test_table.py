"""The table of a study: paired differences and their errors, digits that fit, and what was done."""

import itertools
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt.report.numerals import brief
from minigpt.report.part import Number
from minigpt.study.page import figures, page
from minigpt.study.table import TRAINED, csv_table, summarize, terminal_part

DOCS = Path(__file__).parents[2] / "docs" / "study.md"
ROW: dict[str, Any] = {
    "model": "demo", "norm": "rms", "sites": "*", "seed": 0, "verdict": "fail", "outcome": "DIFFERENT", "reason": None,
    "ratio": 2.5, "kl_mean": 0.1, "kl_median": 0.05, "top1_agreement": 0.9, "loss_change": 0.5,
    "perplexity_before": 2.0, "perplexity_after": 3.0, "perplexity_recovered": None, "seconds": 1.0,
    "command": "minigpt parity", "report": "reports/a.html", "losses": [], "eval_losses": [[0, 2.0], [10, 1.0]],
    "swaps": {"ln_f": 5}, "kl_recovered": None, "kl_median_recovered": None, "top1_recovered": None,
    "settings": ["model", "norm", "steps"], "steps": 10, "fingerprint": "f0", "tokens": 1234,
    "tokens_seen": 320,
    "protocol": {"texts": {"text": "held.txt, SHA-256 0123", "training text": "train.txt"},
                 "versions": {"torch": "2.13"},},
}  # fmt: skip


def study_of_seeds(over_seeds: float, over_rows: float) -> tuple[list[dict[str, Any]], dict[int, torch.Tensor]]:
    """A study of two norms and three seeds on a text of 400 rows, which differ far more than one row in two models.

    Returns its rows, and by seed how much worse each row of the text is with rms, as a sum over 50 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    hard = 100 + 30 * torch.randn(400, generator=generator, dtype=torch.double)
    worse = {
        seed: 0.5 + over_seeds * seed + over_rows * torch.randn(400, generator=generator, dtype=torch.double)
        for seed in range(3)
    }
    rows = [
        ROW | {"norm": norm, "control": norm == "fused", "seed": seed,
               "text_rows": [[50, one] for one in (hard + (norm == "rms") * worse[seed]).tolist()]}
        for norm in ("fused", "rms") for seed in range(3)
    ]  # fmt: skip
    return rows, worse


@pytest.mark.parametrize(("over_seeds", "over_rows"), [(1.0, 0.1), (1e-4, 3.0)])
def test_a_column_has_the_larger_error_and_its_head_names_it(over_seeds: float, over_rows: float) -> None:
    """A difference from the control is paired, seed with seed and row with row."""
    rows, worse = study_of_seeds(over_seeds, over_rows)
    table = summarize(rows)
    control, rms = (cell.figures["over_baseline"] for cell in table.cells)
    assert control == Number(0, brief, 0)
    assert rms is not None
    means = [float(part.mean()) / 50 for part in worse.values()]
    assert rms.value == pytest.approx(statistics.fmean(means))
    of_seeds = statistics.stdev(means) / 3**0.5
    of_rows = statistics.fmean(float(part.std()) / 50 / 400**0.5 for part in worse.values())
    assert rms.error == pytest.approx(max(of_seeds, of_rows), rel=1e-6)
    over = "3 seeds" if of_seeds > of_rows else "400 rows"
    assert table.head("over_baseline") == f"over the control, nats (± {over})"
    assert table.head("loss") == "held-out loss, nats (± 400 rows)"
    assert table.head("kl_median") == "KL, median, nats"


def test_rows_of_text_of_different_lengths_count_by_their_tokens() -> None:
    """The standard error is that of the mean of a token, by the jackknife over rows."""
    lengths = torch.randint(20, 200, (60,), generator=torch.Generator().manual_seed(1)).double()
    sums = lengths * (3 + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(2)))
    figure = summarize([ROW | {"text_rows": torch.stack([lengths, sums], 1).tolist()}]).cells[0].figures["loss"]
    assert figure is not None
    left_out = (sums.sum() - sums) / (lengths.sum() - lengths)
    assert figure.value == pytest.approx(float(sums.sum() / lengths.sum()))
    assert figure.error == pytest.approx(
        float(((left_out - left_out.mean()).square().sum() * 59 / 60).sqrt()), rel=0.05
    )


def test_a_row_that_failed_is_in_every_form(tmp_path: Path) -> None:
    failed = dict.fromkeys(ROW) | {name: ROW[name] for name in ("model", "sites", "seed", "seconds", "command")} | {
        "norm": "<b>", "verdict": "fail", "outcome": "FAILED", "reason": "no & room_left", "losses": [],
        "eval_losses": [], "swaps": {}, "settings": ["model", "norm"], "protocol": {},
    }  # fmt: skip
    text = page([ROW, failed], "a study", tmp_path, tmp_path / "study.html", "minigpt study s.toml")
    for part in ("&lt;b&gt;", "DIFFERENT", "FAILED", "no &amp; room_left", "held.txt, SHA-256 0123",
                 "320; the text has 1,234", "minigpt study s.toml", "torch 2.13", TRAINED["loss"].title):  # fmt: skip
        assert part in text
    assert "<title>a study: demo</title>" in text
    assert ROW["report"] not in text, "a page without reports beside it leads to none"
    assert csv_table([ROW, failed]).splitlines()[1].startswith("demo,rms,*,0,,10,fail,DIFFERENT,,2.5")


def test_the_docs_make_a_latex_table_of_the_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas", reason="writes LaTeX: pip install pandas")
    (tmp_path / "results").mkdir()
    rows, _ = study_of_seeds(1.0, 0.1)
    (tmp_path / "results" / "study.csv").write_text(csv_table(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = DOCS.read_text(encoding="utf-8").partition("```python\nimport pandas\n")[2].partition("```")[0]
    exec("import pandas\n" + code, {})
    lines = capsys.readouterr().out.splitlines()
    assert r"norm & seed & loss & loss\_se & over\_baseline & over\_baseline\_se \\" in lines
    for row in rows:
        assert sum(line.startswith(f"{row['norm']} & {row['seed']} & ") for line in lines) == 1


def test_a_pattern_of_sites_stays_whole_and_breaks_at_commas(tmp_path: Path) -> None:
    rows = [ROW | {"sites": sites} for sites in ("*", "h.[0-2].ln_1,h.[0-2].ln_2", "h.*." + "x" * 40)]
    text = page(rows, "a study", tmp_path, tmp_path / "study.html")
    assert '<span class="whole">h.[0-2].ln_1,</span> <span class="whole">h.[0-2].ln_2</span>' in text
    assert f" h.*.{'x' * 40}</small>" in text, "a very long one may break"


def points_in(svg: str) -> list[float]:
    """The horizontal places of round markers, in points."""
    round_markers = re.findall(r'<path id="(\w+)" d="M [^"L]*C[^"L]*z?"', svg)
    used = re.findall(r'<use xlink:href="#(\w+)" x="([\d.]+)"', svg)
    return [float(x) for name, x in used if name in round_markers]


@pytest.mark.parametrize("worst", [5.0, 0.003])
def test_one_bad_cell_does_not_hide_the_others(worst: float) -> None:
    """The cells lie apart from each other and from the control, in the order of their differences from it."""
    pytest.importorskip("matplotlib", reason="draws the figures: pip install -e '.[plots]'")
    losses = {"textbook": -0.0002, "fused": 0.0, "std_eps": 0.001, "rms": worst}
    rows = [
        ROW | {"norm": norm, "control": norm == "fused", "text_rows": [[50, 100 + 50 * loss]] * 2}
        for norm, loss in losses.items()
    ]
    by_cell = dict(zip(losses, points_in(figures(rows)["over-baseline"]), strict=True))
    places = [*by_cell.values()]
    print(by_cell)
    assert places == sorted(places)
    assert min(right - left for left, right in itertools.pairwise(places)) > 10


def test_a_picture_names_its_axes_and_takes_its_colours_along() -> None:
    pytest.importorskip("matplotlib", reason="draws the figures: pip install -e '.[plots]'")
    drawn = figures([ROW, ROW | {"norm": "dyt"}])
    assert {*drawn} == {"loss", "over-baseline"} or {*drawn} == {"loss"}
    for text in ("step", "held-out loss, nats a token", "rms", "dyt"):
        assert text in drawn["loss"]
    assert "currentColor" not in drawn["loss"]


def test_a_terminal_tells_the_figures_at_the_swap_from_those_after_training() -> None:
    heads = terminal_part([ROW | {"perplexity_recovered": 1.5, "loss": 1.0}]).heads
    assert len(set(heads)) == len(heads)
    assert {"perplexity", "perplexity after training"} <= {*heads}
