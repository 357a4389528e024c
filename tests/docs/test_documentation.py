"""The documentation is true: its code runs, its commands work, its links resolve, its figures are the results' own."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import diagnosis_rates
import pytest
import rates
from docs.blocks import as_notebook, blocks_of, commands_of, run_command, run_python, shown_after, write_files

import minigpt
from docs import network, tables

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMES = [page.name for page in PAGES]


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_python_block_runs_and_prints_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for block, printed in run_python(text):
        shown = shown_after(text, block)
        assert printed == ("" if shown is None else shown.body), block.body


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    write_files(text, tmp_path)
    for name in ("README.md", "train.txt", "held.txt"):  # commands that need some text read it
        shutil.copy(ROOT / "README.md", tmp_path / name)
    for command in commands_of(text):
        done = run_command(command, tmp_path)
        assert done.returncode in (0, 1), f"{command}: {done.stderr}"
        assert "Traceback" not in done.stderr, f"{command}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_to_a_file_or_a_heading_resolves(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", text) + re.findall(
        r'src="(?!https?://)([^"]+)"', text
    )
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}"


def test_the_notebook_is_the_tutorial() -> None:
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8")) == as_notebook(tutorial)


def test_the_figures_of_speed_are_those_of_the_results() -> None:
    for level in tables.LEVELS:
        assert tables.speed(level) in (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert tables.speed("bf16", tables.IN_SHORT) in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("study", tables.STUDIES)
def test_the_tables_of_studies_are_those_of_the_results(study: str) -> None:
    assert tables.of_study(study) in (ROOT / "docs" / "study.md").read_text(encoding="utf-8")


def test_the_table_of_attention_is_that_of_the_results() -> None:
    assert tables.attention() in (ROOT / "docs" / "study.md").read_text(encoding="utf-8")


def test_the_table_of_rates_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "docs" / "results" / "rates.json").read_text(encoding="utf-8"))
    assert rates.table(results) in (ROOT / "docs" / "norms.md").read_text(encoding="utf-8")


def test_the_table_of_other_programs_is_that_of_the_results() -> None:
    assert tables.elsewhere_gpt2() in (ROOT / "docs" / "elsewhere.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["diagnosis.json", "any-model.json"])
def test_the_table_of_diagnoses_is_that_of_the_results(name: str) -> None:
    results = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))
    assert diagnosis_rates.table(results) in (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")


def test_the_page_of_the_network_is_made_of_its_files() -> None:
    """Each definition of the six files has a place, and every line of code stands in the page once."""
    page = (ROOT / "docs" / "network.md").read_text(encoding="utf-8")
    assert page == network.page()
    shown = "\n".join(block.body for block in blocks_of(page))
    for file in {file for _, _, parts in network.ORDER for file, _ in parts}:
        for piece in network.pieces_of((network.PACKAGE / file).read_text(encoding="utf-8")).values():
            for _, code in network.rows_of(piece.lines):
                assert "\n".join(code).rstrip() in shown, (file, code)


def test_the_site_has_the_groups_and_the_pages_of_the_index() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w/-]+\.md)\)", index)
    shown = ["index.md"]
    for entry in site["nav"][1:]:
        for pages in entry.values():
            shown += [place for page in pages for place in page.values()]
    assert sorted(shown[1:]) == sorted(named)
    assert {place.name for place in (ROOT / "docs").glob("*.md")} == {place for place in shown if "/" not in place}
    assert f"minigpt {minigpt.__version__} " in site["copyright"]


def test_every_result_is_cited() -> None:
    cited = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    kept = [path.name for path in (ROOT / "docs" / "results").iterdir() if path.name != "README.md"]
    assert [name for name in kept if f"({name})" not in cited] == []


def test_the_network_is_as_short_as_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = re.findall(r"`(\w+\.py)`", readme.partition("Read these first:")[2].partition("in `minigpt/model/`")[0])
    paths = [*(ROOT / "minigpt/model" / name for name in files), ROOT / "minigpt/norms/textbook.py"]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    limits = {int(number) for number in re.findall(r"under (\d+) lines", readme)}
    assert (len(files), len(limits)) == (5, 1)
    assert all(limit - 60 <= lines < limit for limit in limits), lines
