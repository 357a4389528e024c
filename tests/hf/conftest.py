"""What the tests in transformers' tools share."""

from collections.abc import Iterator

import pytest
import transformers

import minigpt


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our class is transformers' for GPT-2 during a test, without the network and without warnings."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    transformers.utils.logging.set_verbosity_error()
    minigpt.hf.register()
    yield
    minigpt.hf.unregister()
    transformers.utils.logging.set_verbosity_warning()
