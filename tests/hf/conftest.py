"""What the tests in transformers' tools share."""

from collections.abc import Iterator

import pytest
import transformers

import minigpt


@pytest.fixture
def registered(offline: None) -> Iterator[None]:
    """Our class is transformers' for GPT-2 during a test, without the network and without warnings."""
    transformers.utils.logging.set_verbosity_error()
    minigpt.hf.register()
    yield
    minigpt.hf.unregister()
    transformers.utils.logging.set_verbosity_warning()
