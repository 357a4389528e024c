"""What most tests of a judgement start from."""

from pathlib import Path

import pytest
from checkpoints import reference, saved


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers without a tokenizer, whose logits are far from uniform."""
    return saved(reference(std=0.3), tmp_path_factory.mktemp("tiny"))
