"""Findings have the form that CONTRIBUTING.md states; they run by hand, since they install other packages."""

import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "findings"
FINDINGS = sorted(FOLDER.glob("*"))


def test_there_are_findings() -> None:
    assert FINDINGS


@pytest.mark.parametrize("file", FINDINGS, ids=lambda file: file.name)
def test_a_finding_has_its_form(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    head = re.match(r"#!/usr/bin/env bash\n((?:#.*\n)+)", text)
    assert head, "it begins with a comment"
    assert re.search(r"\d+\.\d+", head[1]), "the comment has a version"
    assert re.search(r"^# Seen[:,] ", head[1], re.MULTILINE), "it says what is seen"
    assert os.access(file, os.X_OK)
    assert "mktemp -d" in text
    installs = re.findall(r"pip\S* install --quiet (.*)", text)
    packages = [word for install in installs for word in install.split() if not word.startswith("-")]
    assert packages
    assert all("==" in package for package in packages), packages
    assert "minigpt" not in text
    assert "assert " in text
