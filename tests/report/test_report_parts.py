"""The parts of a report: every figure that is measured is shown, and the docs say what it is."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from reports import made, sample_report

from minigpt.report.fields import Distribution, LogitsError, NormSiteError
from minigpt.report.part import shown
from minigpt.report.parts import parts_of

DOCS = Path(__file__).parents[2] / "docs"
NOT_IN_A_TABLE = {"ratio_without_shift", "worst", "site", "swapped"}  # a sentence, a row or a mark tells these

every_kind = pytest.mark.parametrize("kind", [LogitsError, Distribution, NormSiteError])


@every_kind
def test_every_figure_has_a_title_or_is_the_error_of_one_that_has(kind: type) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    errors = {name for name in names if name.removesuffix("_se") in shown(kind)}
    assert names - errors - NOT_IN_A_TABLE == set()


@every_kind
def test_the_docs_say_what_every_figure_is(kind: type) -> None:
    page = (DOCS / "parity.md").read_text(encoding="utf-8")
    table = page.partition("| figure |")[2].partition("\n\n")[0]
    titles = ", ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)).split(", ")
    for figure in shown(kind).values():
        assert figure.title.partition(",")[0] in titles, figure.title


def test_a_part_has_a_cell_for_every_head() -> None:
    report = made(sample_report(2, passing=False))
    for part in parts_of(report):
        assert all(len(row) == len(part.heads) for row in part.rows), part.name
        assert part.title
        assert len(part.about) <= 250


def test_a_centred_model_has_no_table_of_norms() -> None:
    report = made(sample_report(2) | {"center": True})
    assert "sites" not in {part.name for part in parts_of(report)}


@pytest.mark.parametrize("passing", [True, False])
def test_a_report_is_read_as_it_was_written(passing: bool) -> None:
    """Reports of older versions hold the time of a forward too; a number that is not finite is null."""
    sample = sample_report(2, passing=passing)
    sample["logits"] |= {"ratio": None}
    report = made(sample | {"speed": {"candidate_ms": 3.1, "reference_ms": 4.2}})
    assert report.to_dict() == sample | {"passed": report.passed}
    assert math.isnan(report.logits.ratio)
