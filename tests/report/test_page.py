"""The HTML face of a parity report: its figures are the report's, and it is whole, safe, and readable everywhere."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference, saved
from judgements import judge
from norm_classes import Louder
from reports import Report, made, sample_report, with_budget

import minigpt
from minigpt.report import page as pages
from minigpt.report.charts import LogScale, depth_ticks
from minigpt.report.numerals import percent, uncertain
from minigpt.report.parity_report import read_reports
from minigpt.report.sentences import heading

HOSTILE = (
    '</title></style><script>window.entered = 1</script><img src=x onerror="window.entered=1">'
    "\u202e\x00\ud800\"'& {{ 7 * 7 }} {% raw %} $\\frac{x"
)

VOID = {"meta", "link", "br", "col", "img", "hr", "input", "wbr"}

# Optional parts of a report; each fills the section of its name.
OPTIONAL = (
    "budget", "tokens", "text", "sensitivity", "bisect", "perplexity", "fit", "removal", "gradients",
)  # fmt: skip

# Numbers of the report that the page puts into a sentence or a drawing, or does not show.
NOT_FIGURES = (
    "versions", "tokens.new_from", "first_off", "bitwise", "bisect.verdicts", "removal.tokens", "text.tokens",
    "text.windows", "text.window", "distribution.worst", "logits.ratio_without_shift",
    "decoding.ratio_without_shift", "text.logits.ratio_without_shift", "coverage", "perplexity.rows", "nan",
    "precision", "account.tokens", "account.positions", "account.calm",
)  # fmt: skip


class Parsed(HTMLParser):
    """A page as elements with their attributes and text, which must be properly nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text, self.style = "", ""
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice: {attrs}"
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            self.style += data
        else:
            self.text += data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def sections(self) -> set[str]:
        return {attributes["id"] for attributes in self.of("section")}


REPORTS: dict[str, Callable[[], Report]] = {
    "12 layers": sample_report,
    "2 layers": lambda: sample_report(2),
    "1 layer": lambda: sample_report(1),
    "failing": lambda: sample_report(passing=False, norm="my_norms.py:Fast"),
    "48 layers": lambda: sample_report(48, passing=False),
    "budget": lambda: with_budget(sample_report(2, passing=False)),
}

every_report = pytest.mark.parametrize("name", REPORTS)


def report_page(*reports: Report) -> str:
    """The page of reports as their JSON holds them."""
    return pages.report_page(*map(made, reports))


@functools.cache
def page_of(name: str) -> str:
    return report_page(REPORTS[name]())


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a report with its path; the members of a list have one path."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from numbers(member, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for member in value:
            yield from numbers(member, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def assert_all_shown(page: str, *reports: Report) -> None:
    """The page has every number of the reports, and no other, rounded to the digits that it shows."""
    every = [pair for report in reports for pair in numbers(report)]
    expected = {x for path, x in every if x and not path.startswith(NOT_FIGURES)}
    shown = set()
    for value, text in re.findall('<data value="(.*?)">(.*?)</data>', page):
        values = [float(part) for part in value.split()]
        if len(values) == 1:
            assert_shows(text, *values)
        else:
            assert text in {uncertain(*values), uncertain(*values, percent)}
        shown.update(values)
    assert expected <= shown, f"not shown: {expected - shown}"
    assert shown <= {x for _, x in every}, f"not of the report: {shown - {x for _, x in every}}"


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """A deep copy with ``change`` applied to everything that is no list and no dict."""
    if isinstance(value, dict):
        return {key: replaced(member, change) for key, member in value.items()}
    return [replaced(member, change) for member in value] if isinstance(value, list) else change(value)


def assert_shows(text: str, value: float) -> None:
    """``text`` is ``value`` rounded to the digits that it has."""
    shown = text.replace(",", "").removesuffix("\u00d7")
    scale = 100 if shown.endswith("%") else 1
    mantissa, _, exponent = shown.removesuffix("%").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) / scale
    error = abs(float(shown.removesuffix("%")) / scale - value)
    assert error <= 0.5001 * unit, f"{text} is shown for {value}: off by {error:.3g}, half a digit is {unit / 2:.3g}"


# What the page says


@every_report
def test_every_figure_is_the_reports_own(name: str) -> None:
    assert_all_shown(page_of(name), REPORTS[name]())


@pytest.mark.parametrize("many", [2, 4])
def test_a_page_of_many_shows_every_figure_of_every_report(many: int) -> None:
    reports = [sample_report(2 + i, passing=i == 0, norm=f"norm {i}", seed=i) for i in range(many)]
    assert_all_shown(report_page(*reports), *reports)


@pytest.mark.parametrize("norm", ["textbook", Louder])
def test_every_figure_of_a_judgement_is_on_its_page(norm: Any, tmp_path: Path) -> None:
    """The other reports here are made up."""
    report = judge(saved(reference(std=0.3), tmp_path), norm, sensitivity=True, gradients=True, budget="kl=1e-3")
    assert_all_shown(pages.report_page(report), report.to_dict())


def test_a_page_of_many_names_its_models_and_counts_the_verdicts() -> None:
    page = report_page(sample_report(2), sample_report(12, passing=False), sample_report(2))
    head = page[page.index("<header") : page.index("</header>")]
    assert "<title>3 reports: demo, gpt2</title>" in page
    for words in ("demo, gpt2", "3 reports", "2 PASS, 1 FAIL."):
        assert words in head


@every_report
def test_the_verdict_and_its_reasons_come_first(name: str) -> None:
    report, parsed = REPORTS[name](), Parsed(page_of(name))
    assert heading(made(report)) in parsed.text
    for reason in report["reasons"]:
        assert parsed.text.index(reason) < parsed.text.index("Next-token distribution")
    assert len(parsed.of("h1")) == 1


def test_the_page_says_of_each_limit_whether_it_is_kept() -> None:
    page = report_page(with_budget(sample_report(2)))
    budget = re.search(r'<section id="budget".*?</section>', page, flags=re.S)
    assert budget is not None
    assert re.findall(r"✓ kept|✗ not kept", budget[0]) == ["✗ not kept", "✓ kept"]


def test_swapped_and_noisy_sites_are_marked_by_symbols() -> None:
    report = sample_report(passing=False)
    page = report_page(report)
    swapped = sum(site["swapped"] for site in report["norm_sites"])
    over = sum(site["propagated_error"] > 2 * site["noise"] for site in report["norm_sites"])
    assert page.count('aria-label="swapped"') == 2 * swapped + 1, "two maps and the legend"
    assert page.count('aria-label="beyond the noise"') == over + 1
    assert 0 < over < swapped


def test_a_deep_model_fits_in_rows_of_twelve_blocks() -> None:
    page = report_page(sample_report(48))
    rows = re.findall(r'<tr role="row">(.*?)</tr>', page, flags=re.S)
    assert len(rows) == 2 * 4 * 3  # two maps, four rows of blocks, each with a head and two norms
    assert max(row.count("<td") + row.count("<th") for row in rows) == 1 + 12 + 1


def test_the_text_shows_line_breaks_and_where_it_is_continued() -> None:
    page = report_page(sample_report())
    assert "\u21b5</span>" in page
    assert page.count("token new") == len(sample_report()["tokens"]["pieces"]) - 7


@pytest.mark.parametrize("part", OPTIONAL)
def test_what_was_not_measured_leaves_its_section_out(part: str) -> None:
    whole = with_budget(sample_report(2, passing=False))
    lacking = {"text": {"text": None, "prompt_off": None}}.get(part, {part: None})
    actual = Parsed(report_page(whole | lacking)).sections
    assert Parsed(report_page(whole)).sections - actual == {{"text": "first-off"}.get(part, part)}


@pytest.mark.parametrize("value", [None, 0.0, 1e150, 5e-324])
@pytest.mark.thorough
def test_any_number_can_be_drawn(value: float | None) -> None:
    report = replaced(
        with_budget(sample_report(2, passing=False)),
        lambda leaf: value if isinstance(leaf, float) else leaf,
    )
    parsed = Parsed(report_page(report))
    assert ("not finite" in parsed.text) is (value is None)


# What a page must be


@every_report
def test_the_page_is_whole_and_its_references_lead_somewhere(name: str) -> None:
    page = page_of(name)
    parsed = Parsed(page)
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id twice"
    named = set(re.findall(r'(?:href="|url\()#([^")]+)|aria-labelledby="([^"]+)', page))
    assert {name for pair in named for name in pair if name} <= set(ids)


def test_nothing_is_fetched_and_nothing_runs() -> None:
    for page in (report_page(sample_report(passing=False)), report_page(sample_report(), sample_report(2))):
        parsed = Parsed(page)
        assert {"script", "img", "iframe", "object", "base", "form"}.isdisjoint(tag for tag, _ in parsed.elements)
        assert [attributes["href"] for attributes in parsed.of("link")] == ["data:,"]
        assert "//" not in page.replace("</", ""), "an address of some kind"
        assert not re.search(r"@import|url\(", parsed.style)
        assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
        assert "default-src 'none'" in page


@pytest.mark.parametrize("compare", [False, True])
def test_no_text_of_a_report_becomes_markup(compare: bool) -> None:
    report = with_budget(sample_report(2, passing=False))
    honest = Parsed(report_page(report, report) if compare else report_page(report))
    report = replaced(report, lambda leaf: f"{leaf}{HOSTILE}" if isinstance(leaf, str) else leaf)
    report["verdict"] = "fail"
    report["versions"] = {f"{name}{HOSTILE}": value for name, value in report["versions"].items()}
    page = report_page(report, report) if compare else report_page(report)
    parsed = Parsed(page)
    assert {tag for tag, _ in parsed.elements} == {tag for tag, _ in honest.elements}
    assert "<script>window.entered = 1</script>" in parsed.text
    assert "{{ 7 * 7 }} {% raw %}" in parsed.text
    assert "\x00" not in page
    page.encode("utf-8")


# What cannot be drawn


@pytest.mark.parametrize("report", [{}, [], {name: x for name, x in sample_report(2).items() if name != "bisect"}])
def test_what_is_no_report_of_this_version_is_refused(report: Any, unchecked: None) -> None:
    with pytest.raises(minigpt.MiniGPTError, match=r"^report 2 is not a parity report of this version; write one with"):
        read_reports([sample_report(2), report])


# Its parts


def test_log_scale() -> None:
    scale = LogScale([1e-6, 0.0, None, 1e-2, 1e-4])
    assert [scale.place(x) for x in (1e-6, 1e-4, 1e-2, 0.0, None)] == pytest.approx([0, 0.5, 1, 0, 1])
    assert (LogScale([3e-7, 2e-5]).decades.low, LogScale([3e-7, 2e-5]).decades.high) == pytest.approx((1e-7, 1e-4))
    assert LogScale([]).place(3.0) == 1.0


@pytest.mark.parametrize("layers", [1, 2, 7, 8, 12, 24, 36, 48])
def test_ticks_leave_room_for_each_other(layers: int) -> None:
    blocks = [f"h.{i}" for i in range(layers)]
    for places in (blocks, [f"{block}.{norm}" for block in blocks for norm in ("ln_1", "ln_2")] + ["ln_f"]):
        ticks = depth_ticks(places)
        gaps = [b - a for (a, _), (b, _) in itertools.pairwise(ticks)]
        assert ticks[-1] == (len(places) - 1, places[-1].removeprefix("h."))
        assert len(ticks) <= 8
        assert min(gaps, default=1) >= 0.7 * len(places) / 9
