"""The checker that all tests run under sees what is wrong, and asks nothing of what has no shape."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

import minigpt

if importlib.util.find_spec("beartype") is None:
    pytest.skip("beartype is not installed, and nothing is checked", allow_module_level=True)
import shapes


def test_no_module_with_shapes_is_left_out() -> None:
    """Every function of the package whose annotations say a shape is one that checks them."""
    package, count = Path(minigpt.__file__).parent, 0
    for name, module in [*sys.modules.items()]:
        if not str(getattr(module, "__file__", "")).startswith(str(package)):
            continue
        classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
        for owner in (module, *classes):
            for function in vars(owner).values():
                if not inspect.isfunction(function) or function.__module__ != name:
                    continue
                if any(map(shapes.has_shape, function.__annotations__.values())):
                    assert hasattr(function, "__wrapped__"), f"{name}: {function.__qualname__}"
                    count += 1
    assert count > 50


def test_the_project_runs_under_it(unchecked: None) -> None:
    import jaxtyping

    model = minigpt.from_pretrained("demo")
    with torch.no_grad(), pytest.raises(minigpt.MiniGPTError):
        model(torch.ones(2, 3))
    jaxtyping.config.update("jaxtyping_disable", False)
    with torch.no_grad(), pytest.raises(TypeError, match="input_ids of"):
        model(torch.ones(2, 3))
