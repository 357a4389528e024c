"""What a type checker makes of user code, in pyright's strict mode."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).with_name("user_code.py")


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_strict_pyright_finds_every_mistake_and_no_any(tmp_path: Path) -> None:
    lines = PAGE.read_text().splitlines()
    (tmp_path / "page.py").write_text("\n".join(lines))
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({
            "typeCheckingMode": "strict", "include": ["page.py"], "extraPaths": [str(PAGE.parents[1])],
            "reportUnusedExpression": False,
        })
    )  # fmt: skip
    done = subprocess.run(["pyright", "--outputjson"], cwd=tmp_path, capture_output=True, text=True, check=False)
    message = json.loads(done.stdout)["generalDiagnostics"]
    errors = {each["range"]["start"]["line"]: each["message"] for each in message if each["severity"] == "error"}
    wrong = {number for number, line in enumerate(lines) if line.endswith("# wrong")}
    assert errors.keys() == wrong, {lines[number]: errors.get(number) for number in errors.keys() ^ wrong}

    revealed = {
        each["range"]["start"]["line"]: each["message"] for each in message if each["severity"] == "information"
    }
    requested = {number for number, line in enumerate(lines) if line.startswith("reveal_type")}
    assert revealed.keys() == requested
    vague = {lines[number]: message for number, message in revealed.items() if re.search(r"\b(Any|Unknown)\b", message)}
    assert not vague
