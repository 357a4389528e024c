"""How often a judgement opens the files of a checkpoint: once for each model that it needs in memory."""

from pathlib import Path
from typing import Any

import pytest

import minigpt
from minigpt.checkpoint import Files


def test_a_parity_opens_a_checkpoint_once_for_each_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For transformers at every dtype, for minigpt in reference arithmetic, and for the candidate."""
    opened: list[Path] = []
    read = Files.tensors

    def counted(files: Files) -> Any:
        opened.append(files.place)
        return read(files)

    monkeypatch.setattr(Files, "tensors", counted)
    report = minigpt.parity(folder, norm="rms", prompts=[[5, 17, 42, 8], [3, 60, 1]], max_new_tokens=2, device="cpu")
    print(f"opened {len(opened)} times, at most 3")
    assert report.precision is not None, "transformers in other dtypes has been read too"
    assert opened == [folder] * 3
