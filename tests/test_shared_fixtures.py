"""A name that files share means one thing in all of them."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
ANOTHER = {"device"}  # of Triton's kernels, which are interpreted on the CPU alone


def fixtures_of(file: Path) -> set[str]:
    return {*re.findall(r"^@pytest\.fixture.*\ndef (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)}


def test_no_file_gives_a_shared_fixture_another_meaning() -> None:
    home = TESTS / "shared_fixtures.py"
    shared = fixtures_of(home) - ANOTHER
    assert {"folder", "original", "hf_model", "talking", "run"} <= shared
    others = {str(file): fixtures_of(file) & shared for file in TESTS.rglob("*.py") if file != home}
    assert {file: names for file, names in others.items() if names} == {}
