"""The one thread that computes. It takes a step of each model that has work, in turn."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from minigpt.engine import GPT2
from minigpt.serve.channel import deliver
from minigpt.serve.comparison import Comparison, ComparisonLane
from minigpt.serve.job import Job
from minigpt.serve.lane import Lane
from minigpt.serve.meters import Meters
from minigpt.serve.refusal import RefusalError

PAUSE, MOST_PAUSES = 0.001, 10  # seconds to wait for the next of several requests, and how often


class Scheduler:
    """Serves the requests for several models.

    Args:
        places: texts that are written at a time, of each model.
        max_queue: texts that may wait for a place.
        draft: as in ``generate``.
    """

    def __init__(
        self, models: Mapping[str, GPT2], places: int, max_queue: int, meters: Meters, draft: str | None = None
    ) -> None:
        self.lanes = {name: Lane(name, model, places, meters, draft) for name, model in models.items()}
        self.comparisons = ComparisonLane(models)
        self.max_queue = max_queue
        self._all: list[Lane | ComparisonLane] = [*self.lanes.values(), self.comparisons]
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def count_waiting(self) -> int:
        return sum(lane.count_waiting for lane in self._all)

    @property
    def count_writing(self) -> int:
        return sum(len(lane.writing) for lane in self.lanes.values()) + len(self.comparisons.active)

    def submit(self, name: str, job: Job) -> None:
        """Let a request wait for places of a model.

        Raises:
            RefusalError: if too many texts wait, or the server is shutting down.
        """
        self._submit(len(job.waiting), lambda: self.lanes[name].add(job))

    def compare(self, comparison: Comparison) -> None:
        """Let a comparison wait; errors as ``submit``."""
        self._submit(1, lambda: self.comparisons.add(comparison))

    def stop(self) -> None:
        """End the thread, and report an error to everybody who still waits. Calls after the first do nothing."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._fail(_shutting_down())

    def _submit(self, texts: int, add: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise _shutting_down()
            if (waiting := self.count_waiting) + texts > self.max_queue:
                said = f"{waiting} texts are waiting, and at most {self.max_queue} may; try again in a moment"
                raise RefusalError(429, said, code="queue_full")
            add()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="minigpt-scheduler", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or any(lane.has_work for lane in self._all))
                if self._stopping:
                    return
            self._gather()
            try:
                for lane in self._all:
                    if lane.has_work:
                        deliver(lane.step())
            except Exception as error:  # a bug of ours must not leave clients waiting
                logging.getLogger("minigpt").exception("a step failed")
                self._fail(error)

    def _gather(self) -> None:
        """Before the first step, wait while further requests come in: it is faster to read them together."""
        before = 0
        for _ in range(MOST_PAUSES):
            if self.count_writing or (waiting := self.count_waiting) == before:
                return
            before = waiting
            time.sleep(PAUSE)

    def _fail(self, error: BaseException) -> None:
        for lane in self._all:
            deliver(lane.fail(error))


def _shutting_down() -> RefusalError:
    return RefusalError(503, "the server is shutting down", code="shutting_down")
