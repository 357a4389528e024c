"""The page in a browser: nothing is fetched, nothing runs, nothing is wider than the window, every figure is there.

Playwright drives the system's Chromium. The tests are skipped if there is none.
"""

import importlib.resources
from pathlib import Path
from typing import Any

import pytest
import sabotages
from reports import Report, made, sample_report, with_budget
from test_page import HOSTILE, assert_all_shown, replaced

from minigpt.conformance import check_norm
from minigpt.conformance.summary import conformance_page
from minigpt.report.page import report_page

Pages = dict[str, tuple[Path, dict[str, Report]]]
VIEWS = [(width, scheme) for width in (1280, 768, 390) for scheme in ("light", "dark")]

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Pages on disk, each with the reports it shows by their labels."""
    hostile = replaced(sample_report(2, passing=False), lambda leaf: leaf + HOSTILE if isinstance(leaf, str) else leaf)
    failing = with_budget(sample_report(passing=False, norm="a_rather_long_package.of_norms:AndALongClassNameInIt"))
    reports: dict[str, dict[str, Report]] = {
        "12 layers": {"": sample_report()},
        "2 layers": {"": sample_report(2)},
        "failing": {"": failing},
        "hostile": {"": hostile | {"verdict": "fail"}},
        "two": {"A": sample_report(), "B": failing},
        "four": {letter: sample_report(2, passing=letter == "A", norm=f"norm {letter}") for letter in "ABCD"},
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, shown in reports.items():
        (folder / f"{name}.html").write_text(report_page(*map(made, shown.values())), encoding="utf-8")
    return {name: (folder / f"{name}.html", shown) for name, shown in reports.items()}


@pytest.mark.parametrize("name", ["12 layers", "2 layers", "failing", "hostile", "two", "four"])
def test_the_page_fits_every_window_and_shows_every_figure(browser: Any, pages: Pages, name: str) -> None:
    file, reports = pages[name]
    for width, scheme in VIEWS:
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        requests, complaints = [], []
        page.on("request", lambda request, seen=requests: seen.append(request.url))
        page.on("console", lambda message, seen=complaints: seen.append(message.text))
        page.on("pageerror", lambda error, seen=complaints: seen.append(str(error)))
        page.goto(file.as_uri())
        assert requests == [page.url]
        assert page.evaluate("document.scripts.length + document.images.length") == 0
        assert page.evaluate("typeof window.entered") == "undefined"
        for state in ("as opened", "all unfolded"):
            right = page.evaluate("Math.max(document.documentElement.scrollWidth, window.innerWidth)")
            assert right <= width, f"{state}: {right} CSS pixels wide in a window of {width}"
            page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
        assert_all_shown(page.content(), *reports.values())
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert paper == {"light": "rgb(252, 251, 249)", "dark": "rgb(18, 23, 27)"}[scheme]
        assert complaints == []
        page.close()


def test_a_phone_shows_every_site_without_scrolling(browser: Any, pages: Pages) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(pages["failing"][0].as_uri())
    assert page.evaluate(
        "[...document.querySelectorAll('.heat')].every(t => t.scrollWidth <= t.closest('.scroll').clientWidth)"
    )
    right = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.heat td')].map(e => e.getBoundingClientRect().right))"
    )
    assert right <= 390
    page.close()


@pytest.fixture(scope="module")
def all_kinds(pages: Pages) -> list[Path]:
    """Every kind of page: a report that passes and one that fails, four on a page, and the check of a norm."""
    checked = check_norm(sabotages.DividesByNMinusOne, device="cpu", cases=["width*", "values", "layouts"])
    check = pages["four"][0].with_name("check.html")
    check.write_text(conformance_page(checked), encoding="utf-8")
    return [pages["2 layers"][0], pages["failing"][0], pages["four"][0], check]


def test_axe_finds_no_accessibility_error(browser: Any, all_kinds: list[Path]) -> None:
    package = importlib.resources.files("axe_playwright_python")  # of minigpt[dev]
    axe = package.joinpath("axe.min.js").read_text(encoding="utf-8")
    for file in all_kinds:
        for width, scheme in ((1280, "light"), (390, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
            page.goto(file.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
            page.evaluate(axe)
            violations = page.evaluate("axe.run().then(result => result.violations)")
            told = [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in violations]
            assert told == [], f"{file.name} at {width} in {scheme}"
            page.close()
