"""The style checker reads prose and skips code."""

from pathlib import Path

import pytest
from docs.style import main, prose_of_markdown, prose_of_python

PYTHON = '''"""Return what is no tensor."""

name = "is no name"  # too short a string
text = f"{value} is no tensor at all, got {other}"  # ``is no code``
'''


def test_it_reads_docstrings_comments_and_messages_at_their_places() -> None:
    lines = prose_of_python(PYTHON).split("\n")
    assert "Return what is no tensor." in lines[0]
    assert "name" not in lines[2].split("|")[0]
    assert "too short a string" in lines[2]
    assert lines[3].index("is no tensor") == PYTHON.split("\n")[3].index("is no tensor")
    assert "value" not in lines[3]
    assert "is no code" not in lines[3]


def test_it_skips_the_code_of_a_page() -> None:
    page = "Call `is_no` here:\n```python\nx = 1  # is no tensor\n```\nIt is no tensor.\n"
    prose = prose_of_markdown(page)
    assert prose.split("\n")[4] == "It is no tensor."
    assert "is_no" not in prose
    assert len(prose) == len(page)


@pytest.mark.parametrize(
    ("sentence", "finding"), [("It is no tensor.", "minigpt.is_no"), ("Whoever reads.", "plain_words")]
)
def test_the_rules_find_old_english(
    tmp_path: Path, sentence: str, finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n{sentence}\n")
    assert main([str(tmp_path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "page.md:3:" in line
    assert finding in line
