"""The one thread that computes. It takes a step of each model that has work, in turn."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import Tensor

from minigpt.engine.int8 import drafter_of
from minigpt.errors import GenerationError
from minigpt.generation.batch import Batch, Piece
from minigpt.generation.drafts import drafts_for
from minigpt.model import GPT2
from minigpt.serve.jobs import NOT_NUMBERS, Comparison, EventChannel, Job, RequestRow, tokens_of
from minigpt.serve.protocol import RefusalError, shutting_down

PAUSE, MAX_PAUSES = 0.001, 10  # seconds to wait for the next of several requests, and how often
PROMPT_TOKENS = 512  # prefill budget of a step while no text gets its next token
PROMPT_TOKENS_BESIDE = 16  # prefill budget of a step while some do
COMPARISONS = 4  # that run at a time, a step of each in turn
STREAM_SECONDS = 0.02  # between two reports of a text; what it adds in between is sent together
STOP_SECONDS = 0.3  # for the step in progress when the server stops
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Meters:
    """The numbers of ``GET /metrics``; ``writing`` and ``waiting`` count texts at the time of a request."""

    def __init__(self, writing: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.registry = to = CollectorRegistry()
        model, path = ("model",), ("path",)
        self.tokens = Counter("minigpt_generated_tokens_total", "Tokens written.", model, registry=to)
        self.prompts = Counter("minigpt_prompt_tokens_total", "Tokens of prompts.", model, registry=to)
        first = "From a request to its text's first token."
        self.first = Histogram("minigpt_time_to_first_token_seconds", first, model, registry=to, buckets=BUCKETS)
        self.responses = Counter("minigpt_requests_total", "Responses.", ("path", "status"), registry=to)
        whole = "From a request to the end of its response."
        self.seconds = Histogram("minigpt_request_seconds", whole, path, registry=to, buckets=BUCKETS)
        Gauge("minigpt_texts_writing", "Texts that are being written.", registry=to).set_function(writing)
        Gauge("minigpt_texts_waiting", "Texts that wait for a place.", registry=to).set_function(waiting)


class Scheduler:
    """Serves the requests for several models.

    Args:
        places: texts that are written at a time, of each model.
        max_queue: size of the queue in texts. A request counts as at most ``places`` texts.
        draft: as in ``generate``.
    """

    def __init__(self, models: Mapping[str, GPT2], places: int, max_queue: int, draft: str | None = "auto") -> None:
        self.meters = Meters(lambda: self.count_writing, lambda: self.count_waiting)
        self.lanes = {name: Lane(name, model, places, self.meters, draft) for name, model in models.items()}
        self.comparisons: deque[Comparison] = deque()  # the first of them run
        self._next_comparison = 0.0  # when one may take its next step
        self.places, self.max_queue = places, max_queue
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._channels = WeakSet[EventChannel]()  # of all requests that are not over

    @property
    def count_waiting(self) -> int:
        return sum(lane.count_waiting for lane in self.lanes.values())

    @property
    def count_writing(self) -> int:
        texts = sum(lane.count_writing for lane in self.lanes.values())
        return texts + self.count_comparisons

    @property
    def count_comparisons(self) -> int:
        """The number of comparisons that run or wait and have a client."""
        return sum(not comparison.channel.disconnected for comparison in list(self.comparisons))

    @property
    def has_work(self) -> bool:
        return bool(self.comparisons) or any(lane.has_work for lane in self.lanes.values())

    @property
    def is_alive(self) -> bool:
        """False if requests would wait for ever."""
        return not self._stopping and (self._thread is None or self._thread.is_alive())

    def submit(self, work: Job | Comparison, texts: int, name: str | None = None) -> None:
        """Queue a request for a number of texts: a job for the model of this name, or a comparison.

        Raises:
            RefusalError: if too many texts wait, or the server is shutting down.
        """
        with self._wake:
            if self._stopping:
                raise shutting_down()
            queued = sum(lane.count_queued for lane in self.lanes.values()) + self.count_comparisons
            if queued + min(texts, self.places) > self.max_queue:
                message = f"the queue is full: {queued} texts wait, of {self.max_queue}; try again in a moment"
                raise RefusalError(429, message, code="queue_full")
            queue: Any = self.comparisons if name is None else self.lanes[name].waiting
            queue.append(work)
            self._channels.add(work.channel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="minigpt-scheduler", daemon=True)
                self._thread.start()
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after its step, unless that takes too long, and report an error to everybody who waits."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        for channel in list(self._channels):
            channel.fail(shutting_down())

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self.has_work)
            if self._stopping:
                return
            self._gather()
            self._step()

    def _step(self) -> None:
        """Run a step of every busy model, then of one comparison. Comparisons get at most half of the time."""
        is_decoding = any(lane.is_decoding for lane in self.lanes.values())
        budget = PROMPT_TOKENS
        if self.comparisons or is_decoding:
            budget = PROMPT_TOKENS_BESIDE
        busy = [lane for lane in self.lanes.values() if lane.has_work]
        for lane in busy:
            lane.step(budget)
        begun = time.monotonic()
        if not self.comparisons or (busy and begun < self._next_comparison):
            return
        comparison = self.comparisons.popleft()
        if comparison.channel.disconnected:
            return
        try:
            comparison.step(PROMPT_TOKENS_BESIDE)
        except BaseException as error:  # a norm may raise anything
            comparison.channel.fail(error)
        if not (comparison.is_over or comparison.channel.disconnected):
            self.comparisons.insert(COMPARISONS - 1, comparison)  # others have their turn
        self._next_comparison = 2 * time.monotonic() - begun

    def _gather(self) -> None:
        """Before the first step, wait while further requests come in: it is faster to read them together."""
        before = 0
        for _ in range(MAX_PAUSES):
            if self.count_writing:
                return
            waiting = self.count_waiting
            if waiting == before:
                return
            before = waiting
            time.sleep(PAUSE)


class Lane:
    """A model, its batch, and the requests for it. Only the scheduler's thread calls ``step``.

    Attributes:
        waiting: requests with texts that have no place yet. Any thread may append to it.
        rows: the texts that have a place.
        is_decoding: some texts get their next token in the next step.
    """

    def __init__(self, name: str, model: GPT2, places: int, meters: Meters, draft: str | None) -> None:
        if draft == "int8":
            drafter_of(model)  # rounds the weights now, or says that the kernel does not serve the model
        self.name = name
        self.model = model
        self.places = places
        self.meters = meters
        self.draft = draft
        self.waiting: deque[Job] = deque()
        self.rows: list[RequestRow] = []
        self.is_decoding = False
        self._batch: Batch | None = None  # made when it is first needed
        self._next_report = 0.0  # when texts that stream are next reported

    @property
    def count_waiting(self) -> int:
        """The number of texts that wait for a place."""
        return sum(job.count_waiting for job in list(self.waiting))

    @property
    def count_writing(self) -> int:
        """The number of texts that have a place, and somebody who receives them."""
        return sum(row.is_wanted for row in list(self.rows))

    @property
    def count_queued(self) -> int:
        """The number of texts that count towards a full queue: of each request at most as many as there are places."""
        return sum(min(job.count_waiting, self.places) for job in list(self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.waiting)

    def step(self, budget: int) -> None:
        """Fill the free places, read tokens, and add a token to every text that is read to its end.

        An error that is not one text's ends all requests: it is a mistake of ours, and must not leave clients waiting.

        Args:
            budget: tokens to read of texts that are not read yet, in all.
        """
        try:
            if self._batch is None:
                drafts = drafts_for(self.model, self.draft)
                self._batch = Batch(self.model, self.places, self.model.config.n_positions, drafts)
            self._fill_places(self._batch)
            self._step(self._batch, budget)
        except BaseException as error:
            logging.getLogger("minigpt").exception("a step failed")
            jobs = {row.job for row in self.rows}
            while self.waiting:  # one by one: another thread may append meanwhile
                jobs.add(self.waiting.popleft())
            for job in jobs:
                job.channel.fail(error)
            self._batch, self.rows, self.is_decoding = None, [], False

    def _step(self, batch: Batch, budget: int) -> None:
        is_scoring = any(row.scores_prompt for row in self.rows)
        if is_scoring:  # a token that is scored takes twice as long
            budget //= 2
        pieces = self._read(batch, budget)
        whole: list[Any] = batch.choose(pieces)
        self._note_tokens(pieces)
        new = 0
        for piece in pieces:
            if piece.is_whole:
                new += len(piece.row.ids) - piece.first - len(piece.ids)
        self.meters.tokens.labels(self.name).inc(new)
        self._report([row for row in whole if row.is_wanted])
        for row in whole:
            row.is_read = len(row.ids) <= batch.context
            reads_again = not (row.is_read or row.end)
            if row.is_wanted and reads_again:  # a window of its text: others first
                self._wait_again(row)
                batch.drop([row])
        batch.drop([row for row in self.rows if not row.is_wanted])
        rows: list[Any] = batch.rows
        self.rows = list(rows)
        self.is_decoding = any(row.is_read for row in self.rows)

    def _wait_again(self, row: RequestRow) -> None:
        """Let a text wait for a place behind the others."""
        row.job.waiting.append(row)
        if row.job not in self.waiting:
            self.waiting.append(row.job)

    def _fill_places(self, batch: Batch) -> None:
        """Give places to waiting texts, of each request in turn."""
        for job in list(self.waiting):
            if job.channel.disconnected:
                self.waiting.remove(job)
        skipped = 0
        while skipped < len(self.waiting) and len(self.rows) < self.places:
            job = self.waiting.popleft()
            if job.channel.disconnected:
                continue
            if self._unread_of(job, batch) >= PROMPT_TOKENS:
                skipped += 1
            else:
                skipped = 0
                row = job.waiting.popleft()
                self.rows.append(row)
                batch.add([row])
            if job.waiting:
                self.waiting.append(job)

    def _unread_of(self, job: Job, batch: Batch) -> int:
        """Return how many tokens are to be read of the request's texts that have a place."""
        tokens = 0
        for row in self.rows:
            if row.job is job and not row.is_read:
                tokens += min(len(row.ids), batch.context)
        return tokens

    def _read(self, batch: Batch, budget: int) -> list[Piece]:
        """Read tokens of all texts. If that fails, read each text by itself: only a text that fails gets an error."""
        with suppress(BaseException):  # a norm may raise anything
            return batch.read(budget)
        pieces: list[Piece] = []
        for row in self.rows:
            try:
                pieces += batch.read(budget, [row])
            except BaseException as error:
                row.fail(error)
        return pieces

    def _note_tokens(self, pieces: list[Piece]) -> None:
        """Let the next events report the log-probabilities of tokens: of prompts, and new ones."""
        rows: list[Any] = []
        ids: list[int] = []
        logits: list[Tensor] = []
        most = 0
        for piece in pieces:
            row: Any = piece.row
            logprobs = row.job.body.logprobs
            if logprobs is None:
                continue
            most = max(most, logprobs)
            end = piece.first + len(piece.ids) + 1
            tokens = row.ids[end - len(piece.logits) : end]  # each after one of the logits, but for the last
            rows += [row] * len(tokens)
            ids += tokens
            logits.append(piece.logits[: len(tokens)])
            if piece.is_whole:
                row.scores_prompt = False
        if not ids:
            return
        for row, token in zip(rows, tokens_of(self.model, torch.cat(logits), ids, most), strict=True):
            if math.isnan(token.logprob or 0):
                row.fail(GenerationError(NOT_NUMBERS))
            top = token.top[: row.job.body.logprobs]
            row.tokens.append(token._replace(top=top))

    def _report(self, rows: list[RequestRow]) -> None:
        """Report on texts that have a new token, or are over."""
        now = time.monotonic()
        is_time = now >= self._next_report
        if is_time:
            self._next_report = now + STREAM_SECONDS
        for row in rows:
            job = row.job
            is_first = len(row.ids) == row.prompt_length + 1
            if is_first:
                self.meters.first.labels(self.name).observe(now - job.channel.opened)
            streams = job.body.stream and (is_time or is_first)
            if row.end or streams:
                job.report(row)
