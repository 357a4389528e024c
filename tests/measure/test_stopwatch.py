"""Clocks: a GPU is timed while it has nothing to wait for."""

import contextlib
import itertools
import time

import pytest
import torch

from minigpt.measure.stopwatch import HEAD_START, gpu_seconds, in_turns, wall_seconds

CPU = torch.device("cpu")


def test_contestants_take_turns() -> None:
    order = itertools.count()
    assert in_turns({"a": lambda: next(order), "b": lambda: next(order)}, range(3)) == {"a": [0, 2, 4], "b": [1, 3, 5]}
    assert in_turns({"a": lambda: next(order)}, ()) == {"a": []}


def test_the_wall_counts_every_call() -> None:
    calls: list[int] = []
    assert wall_seconds(lambda: time.sleep(0.01) or calls.append(1), 3, CPU) >= 0.01
    assert len(calls) == 3


@pytest.mark.parametrize(("needed", "sleeps"), [(1, 1), (5, 4), (10**6, 8)])
def test_a_gpu_sleeps_for_longer_until_the_host_is_ahead(
    needed: int, sleeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of which nothing is there but its queue: it sleeps 1, 2, 4, ... heads' starts, and the host needs some."""
    slept: list[int] = []
    calls: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...
        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return slept[-1] < needed * HEAD_START

        def elapsed_time(self, end: "Event") -> float:
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert gpu_seconds(lambda: calls.append(1), 4, CPU) == pytest.approx(0.003)
    assert slept == [HEAD_START << i for i in range(sleeps)]
    assert len(calls) == 4 * sleeps


@pytest.mark.gpu
def test_a_gpu_is_timed_and_not_its_host() -> None:
    def slow_to_ask() -> None:
        time.sleep(1e-4)
        torch.cuda._sleep(20_000)

    device = torch.device("cuda")
    alone = min(gpu_seconds(slow_to_ask, 20, device) for _ in range(5))  # others may be at work on it
    assert 2e-6 < alone < 1e-4 < wall_seconds(slow_to_ask, 20, device)
