"""The checker that all tests run under sees what is wrong, and asks nothing of what has no shape."""

import importlib.util

import pytest
import torch

import minigpt

if importlib.util.find_spec("beartype") is None:
    pytest.skip("beartype is not installed, and nothing is checked", allow_module_level=True)


def test_the_project_runs_under_it(unchecked: None) -> None:
    import jaxtyping

    model = minigpt.from_pretrained("demo")
    with torch.no_grad(), pytest.raises(minigpt.MiniGPTError):
        model(torch.ones(2, 3))
    jaxtyping.config.update("jaxtyping_disable", False)
    with torch.no_grad(), pytest.raises(TypeError, match="input_ids of"):
        model(torch.ones(2, 3))
