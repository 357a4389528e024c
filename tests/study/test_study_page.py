"""The page of a study in a browser: it fits every window, leads to its reports, sorts, and fetches nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_table import ROW

from minigpt.study.page import page

playwright = pytest.importorskip("playwright.sync_api", reason="drives the browser and comes with minigpt[dev]")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium brings one"),
]
TRAINED = {"perplexity_recovered": 1.2, "kl_recovered": 0.1, "kl_median_recovered": 0.01, "top1_recovered": 0.99,
           "entropy": 0.2, "metrics": {"accuracy": 0.5}}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows: list[dict[str, Any]] = [
        ROW | TRAINED | {"norm": norm, "seed": seed, "kl_mean": kl + seed / 100}
        for norm, kl in (("fused", 0.0), ("dyt", 3.0), ("a_rather_long_file_name.py:AndALongClass", 0.5))
        for seed in (0, 1)
    ]
    place = tmp_path_factory.mktemp("study") / "study.html"
    report = place.parent / "out" / ROW["report"]
    report.parent.mkdir(parents=True)
    report.touch()
    place.write_text(page(rows, "a study", place.parent / "out", place), encoding="utf-8")
    return place


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_the_page_fits_and_its_reports_are_in_sight(file: Path, width: int) -> None:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": width, "height": 844})
        seen: list[str] = []
        shown.on("request", lambda request: seen.append(request.url))
        shown.on("console", lambda message: seen.append(message.text))
        shown.on("pageerror", lambda error: seen.append(str(error)))
        shown.goto(file.as_uri())
        assert seen == [shown.url]
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        links = shown.evaluate(
            "[...document.querySelectorAll('td a')].map(a => [a.innerText, a.getBoundingClientRect().right])"
        )
        assert len(links) == 6, "in both tables"
        assert all(text.startswith("DIFFERENT") and right <= width for text, right in links)
        shown.evaluate("document.querySelector('.scroll').scrollLeft = 200")
        left = shown.evaluate("document.querySelector('tbody th').getBoundingClientRect().left")
        assert left == shown.evaluate("document.querySelector('.scroll').getBoundingClientRect().left")  # it stays
        shown.get_by_role("button", name="KL, mean").first.click()
        shown.get_by_role("button", name="KL, mean").first.click()
        assert shown.locator("tbody th").first.inner_text().startswith("dyt")
        browser.close()
