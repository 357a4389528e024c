"""The check of the built documentation finds dead links and fences, and the site has neither."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs.site import complaints

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ('<a href="../other/#there">fine</a> <img src="../a.png"> <a href="https://example.org">elsewhere</a>', None),
        ("<p>```sh no-run pip install</p>", "backticks"),
        ('<a href="../other/#nowhere">a</a>', "../other/#nowhere"),
        ('<a href="../results/run.json">a</a>', "../results/run.json"),
        ('<img src="b.png">', "b.png"),
    ],
)
def test_dead_links_and_fences_are_found(tmp_path: Path, body: str, finding: str | None) -> None:
    for name, text in {"page": body, "other": '<h2 id="there">There</h2>'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(text)
    (tmp_path / "a.png").touch()
    found = complaints(tmp_path)
    assert len(found) == (finding is not None)
    assert finding is None or finding in found[0]


@pytest.mark.thorough
def test_the_site_builds_without_dead_links_or_fences(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert complaints(tmp_path / "site") == []
    assert len(list((tmp_path / "site").glob("*/index.html"))) == len(list((ROOT / "docs").glob("*.md")))
