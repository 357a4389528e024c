"""Clocks, and turns."""

import itertools

import torch

from minigpt.measure.stopwatch import in_turns

CPU = torch.device("cpu")


def test_contestants_take_turns() -> None:
    order = itertools.count()
    assert in_turns({"a": lambda: next(order), "b": lambda: next(order)}, range(3)) == {"a": [0, 2, 4], "b": [1, 3, 5]}
    assert in_turns({"a": lambda: next(order)}, ()) == {"a": []}
