"""The table of a study: paired differences and their errors, digits that fit, and what was done."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt.study.page import _cells, figures, page
from minigpt.study.table import TRAINED, Column, Figure, csv_table, latex_table, meaning, over_seeds, shown, stages

RESULTS = Path(__file__).parents[2] / "docs" / "results"

ROW: dict[str, Any] = {
    "model": "demo", "norm": "rms", "sites": "*", "seed": 0, "verdict": "fail", "outcome": "DIFFERENT", "reason": None,
    "ratio": 2.5, "kl_mean": 0.1, "kl_median": 0.05, "top1_agreement": 0.9, "loss_change": 0.5,
    "perplexity_before": 2.0, "perplexity_after": 3.0, "perplexity_recovered": None, "seconds": 1.0,
    "command": "minigpt parity", "report": "reports/a.html", "losses": [], "eval_losses": [[0, 2.0], [10, 1.0]],
    "swaps": {"ln_f": 5}, "kl_recovered": None, "kl_median_recovered": None, "top1_recovered": None, "tasks": {},
    "settings": ["model", "norm", "steps"], "steps": 10, "fingerprint": "f0", "tokens": 1234,
    "protocol": {"texts": {"text": "held.txt, SHA-256 0123", "training text": "train.txt"},
                 "versions": {"torch": "2.13"}, "commit": "abc-dirty"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "column", "text"),
    [
        (Figure(1.1913504, 8.2e-5, None), Column("x"), "1.191350 ± 0.000082"),
        (Figure(0.979, 0.0053, None), Column("x", "%"), "97.90 ± 0.53"),
        (Figure(0.28692, 5.5e-4, 0.0031), Column("x"), "0.28692 ± 0.00055 ± 0.0031"),
        (Figure(-3.48e-7, 1e-7, None), Column("x", is_difference=True), "(−3.5 ± 1.0)e-7"),  # noqa: RUF001
        (Figure(361222.2, 130.0, None), Column("x"), "361,222 ± 130"),
        (Figure(0.0127, None, None), Column("x", is_difference=True), "+0.0127"),
        (Figure(0.0, 0.0, 0.0), Column("x"), "0"),
        (None, Column("x"), "–"),  # noqa: RUF001
    ],
)
def test_the_digits_are_those_that_the_error_leaves(figure: Figure | None, column: Column, text: str) -> None:
    assert shown(figure, column) == text


def test_a_difference_from_the_control_is_paired_by_seed_and_by_row_of_the_text() -> None:
    """A text's rows differ far more among each other than one row does between two models."""
    generator = torch.Generator().manual_seed(0)
    hard = 100 + 30 * torch.randn(400, generator=generator, dtype=torch.double)
    losses = {seed: hard + 5 * seed for seed in range(3)}
    worse = {
        seed: own + 0.5 + 0.1 * torch.randn(400, generator=generator, dtype=torch.double)
        for seed, own in losses.items()
    }
    rows = [
        ROW | {"norm": norm, "control": norm == "fused", "seed": seed, "text_rows": [[50, one] for one in own.tolist()]}
        for norm, seeds in (("fused", losses), ("rms", worse)) for seed, own in seeds.items()
    ]  # fmt: skip
    (_, control), (_, rms) = ((row["norm"], row) for row in over_seeds(rows)[0])
    apart = [float((worse[seed] - losses[seed]).mean()) / 50 for seed in range(3)]
    assert rms["over_baseline"].mean == pytest.approx(statistics.fmean(apart))
    assert rms["over_baseline"].seeds == pytest.approx(statistics.stdev(apart) / 3**0.5)
    assert rms["over_baseline"].rows == pytest.approx(0.1 / 50 / 400**0.5 / 3**0.5, rel=0.1), "that of the seeds' mean"
    assert rms["loss"].rows == pytest.approx(30 / 50 / 400**0.5, rel=0.1)
    assert control["over_baseline"] == Figure(0, 0, 0)


def test_rows_of_text_of_different_lengths_count_by_their_tokens() -> None:
    """The standard error is that of the mean of a token, by the jackknife over rows."""
    lengths = torch.randint(20, 200, (60,), generator=torch.Generator().manual_seed(1)).double()
    sums = lengths * (3 + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(2)))
    mean = float(sums.sum() / lengths.sum())
    row = ROW | {"text_rows": torch.stack([lengths, sums], 1).tolist(), "perplexity_recovered": math.exp(mean)}
    merged = over_seeds([row])[0][0]
    figure = merged["loss"]
    assert merged["perplexity_recovered"].rows == pytest.approx(math.exp(mean) * figure.rows)
    left_out = (sums.sum() - sums) / (lengths.sum() - lengths)
    assert figure.mean == pytest.approx(float(sums.sum() / lengths.sum()))
    assert figure.rows == pytest.approx(float(((left_out - left_out.mean()).square().sum() * 59 / 60).sqrt()), rel=0.05)


def test_a_row_that_failed_is_in_every_form(tmp_path: Path) -> None:
    failed = dict.fromkeys(ROW) | {name: ROW[name] for name in ("model", "sites", "seed", "seconds", "command")} | {
        "norm": "<b>", "verdict": "fail", "outcome": "FAILED", "reason": "no & room_left", "losses": [],
        "eval_losses": [], "swaps": {}, "tasks": {}, "settings": ["model", "norm"], "protocol": {},
    }  # fmt: skip
    text = page([ROW, failed], "a study", tmp_path, tmp_path / "study.html", "minigpt study s.toml")
    for part in ("&lt;b&gt;", "DIFFERENT", "FAILED", "no &amp; room_left", "held.txt, SHA-256 0123", "1,234",
                 "abc-dirty", "minigpt study s.toml", "torch 2.13", TRAINED["loss"].title):  # fmt: skip
        assert part in text
    assert ROW["report"] not in text, "a page without reports beside it leads to none"
    assert csv_table([ROW, failed]).splitlines()[1].startswith("demo,rms,*,0,,10,fail,DIFFERENT,,2.5")
    assert r"\label{tab:50-of-a_study}" in latex_table([ROW, failed], "50 % of a_study")
    assert "held-out" in latex_table([ROW, failed], "a study")
    small = ROW | {
        "norm": "std_eps",
        "kl_recovered": 1.05e-7,
        "settings": ["schedule"],
        "schedule": "h.*.ln_1@20+2, " * 4,
    }
    body = latex_table([ROW, small], "a study")
    assert r"1.05$\cdot10^{-7}$ " in body
    assert body.count("h.{*}.ln\\_1@20+2, &") == 4


def study_of_seeds() -> list[dict[str, Any]]:
    """Three seeds of the control and of a class, with errors over rows of a text."""
    return [
        ROW | {"norm": norm, "control": norm == "fused", "seed": seed, "kl_recovered": loss + seed / 9,
               "kl_recovered_se": 0.1, "settings": ["model", "norm", "sites", "steps", "batch_size"], "batch_size": 4,
               "text_rows": [[50, loss * (50 + seed + row)] for row in range(9)], "entropy": loss + seed,
               "perplexity_recovered": math.exp(loss) + seed}
        for norm, loss in (("fused", 1.0), ("some/folder/l1_norm.py:L1Norm", 1.5)) for seed in range(3)
    ]  # fmt: skip


def test_the_columns_say_which_errors_they_have() -> None:
    merged = over_seeds(study_of_seeds())[0]
    text = meaning(merged, stages(merged))
    assert "over 3 seeds, then over 9 rows of the text in held-out loss, over the control, perplexity, KL mean" in text
    assert "over 3 seeds in entropy" in text
    assert "The second of KL mean is the mean of the seeds' errors" in text
    assert "Differences are paired" not in meaning(merged, [("", {"loss": TRAINED["loss"]})])
    assert meaning(over_seeds([ROW])[0], []) == ""


def test_a_table_for_a_paper_stands_alone_and_fits_a_column() -> None:
    table = latex_table(study_of_seeds(), "norms")
    for part in (r"\caption{Norms in GPT-2 (demo) at every site, after 10 steps of training on train.txt, ",
                 "Batch size 4.", "Block size 51 (the context).", "held.txt, 451 tokens, in 9 rows",
                 r"KL(original $\|$ model)", "The control, fused, ", "seeds 0, 1, 2",
                 "over 3 seeds. Differences are paired: seed with seed.",
                 r"\label{tab:norms}", "\nL1Norm & "):  # fmt: skip
        assert part in table
    assert "rows of the text." not in table.split("tabular")[0], "a figure has one error"
    swapped = [row | {"losses": [], "eval_losses": [], "steps": None} for row in study_of_seeds()[::3]]
    table = latex_table(swapped, "norms").split("tabular")[0]
    assert "swapped without training" in table
    assert "seed" not in table
    assert "control" not in table


@pytest.mark.parametrize("file", sorted(RESULTS.glob("study-*.jsonl")), ids=lambda file: file.stem)
def test_kept_rows_of_older_versions_make_a_table(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert latex_table(rows, file.stem).count("\n") > len(over_seeds(rows)[0])
    assert csv_table(rows).count("\n") == len(rows) + 1


@pytest.mark.parametrize(("worst", "scale"), [(5.0, "symlog"), (0.003, "linear")])
def test_one_bad_cell_does_not_hide_the_others(worst: float, scale: str) -> None:
    pytest.importorskip("matplotlib", reason="draws the figures: pip install 'minigpt[plots]'")
    from matplotlib.figure import Figure as Canvas

    axes = Canvas().add_subplot()
    _cells(axes, [(str(x), x, 0.0001, "k") for x in (0.0, -0.0002, 0.001, worst)], TRAINED["over_baseline"])
    assert axes.get_xscale() == scale


def test_a_picture_names_its_axes_and_takes_its_colours_along() -> None:
    pytest.importorskip("matplotlib", reason="draws the figures: pip install 'minigpt[plots]'")
    drawn = figures([ROW, ROW | {"norm": "dyt"}])
    assert {*drawn} == {"loss", "over-baseline"} or {*drawn} == {"loss"}
    for text in ("step", "held-out loss, nats a token", "rms", "dyt"):
        assert text in drawn["loss"]
    assert "currentColor" not in drawn["loss"]
