"""docs/transformers.md has the figures of docs/results/hf-suite.json."""

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_the_figures_of_the_results() -> None:
    results = json.loads((DOCS / "results/hf-suite.json").read_text(encoding="utf-8"))
    page = " ".join((DOCS / "transformers.md").read_text(encoding="utf-8").split())
    counts, checks = results["counts"], results["checks"]
    assert results["lost"] == {}
    assert set(checks.values()) == {"same"}
    assert counts["transformers"] == counts["minigpt"]
    assert f"transformers {results['tests_of']['transformers']}" in page
    assert f"pass {counts['minigpt']['passed']} tests and fail the same {counts['minigpt']['failed']}." in page
    assert f"all {len(checks)}" in page
