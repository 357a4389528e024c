"""Clocks, and turns."""

import itertools
import time

import torch

from minigpt.measure.stopwatch import in_turns, wall_seconds

CPU = torch.device("cpu")


def test_contestants_take_turns() -> None:
    order = itertools.count()
    assert in_turns({"a": lambda: next(order), "b": lambda: next(order)}, range(3)) == {"a": [0, 2, 4], "b": [1, 3, 5]}
    assert in_turns({"a": lambda: next(order)}, ()) == {"a": []}


def test_the_wall_counts_every_call() -> None:
    calls: list[int] = []
    assert wall_seconds(lambda: time.sleep(0.01) or calls.append(1), 3, CPU) >= 0.01
    assert len(calls) == 3
