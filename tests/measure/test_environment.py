"""What a figure was measured on."""

import torch

import minigpt
from minigpt.measure.environment import PACKAGES, environment


def test_it_names_processor_threads_and_versions() -> None:
    found = environment(3, "safetensors", "no_such_package")
    assert found["processor"]
    assert found["threads"] == 3
    assert (found["minigpt"], found["torch"]) == (minigpt.__version__, torch.__version__)
    assert {*PACKAGES, "python", "load_average", "instructions"} <= found.keys()
    assert found["safetensors"].partition(".")[0].isdigit()
    assert found["no_such_package"] is None
