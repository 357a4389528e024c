"""The one thread that computes. It takes a step of each model that has work, in turn."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import Tensor

from minigpt.engine.int8 import drafter_of
from minigpt.errors import GenerationError
from minigpt.generation.batch import Batch, Piece, Step
from minigpt.generation.drafts import drafts_for
from minigpt.generation.row import Row
from minigpt.model import GPT2
from minigpt.serve.jobs import Comparison, Job, RequestRow, tokens_of
from minigpt.serve.protocol import RefusalError, Token, shutting_down

PAUSE, MOST_PAUSES = 0.001, 10  # seconds to wait for the next of several requests, and how often
READ_AT_ONCE, READ_BESIDE = 512, 64  # tokens of prompts in a step: where no text is decoding, and beside some
STREAM_SECONDS = 0.02  # between two reports of a text; what it adds in between is sent together
STOP_SECONDS = 0.3  # for the step in progress when the server stops
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Meters:
    """What ``GET /metrics`` counts; ``writing`` and ``waiting`` count texts at the time of a request."""

    def __init__(self, writing: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.registry = to = CollectorRegistry()
        model, path = ("model",), ("path",)
        self.tokens = Counter("minigpt_generated_tokens_total", "Tokens written.", model, registry=to)
        self.prompts = Counter("minigpt_prompt_tokens_total", "Tokens of prompts.", model, registry=to)
        first = "From a request to its text's first token."
        self.first = Histogram("minigpt_time_to_first_token_seconds", first, model, registry=to, buckets=SECONDS)
        self.responses = Counter("minigpt_requests_total", "Responses.", ("path", "status"), registry=to)
        whole = "From a request to the end of its response."
        self.seconds = Histogram("minigpt_request_seconds", whole, path, registry=to, buckets=SECONDS)
        Gauge("minigpt_texts_writing", "Texts that are being written.", registry=to).set_function(writing)
        Gauge("minigpt_texts_waiting", "Texts that wait for a place.", registry=to).set_function(waiting)


class Scheduler:
    """Serves the requests for several models.

    Args:
        places: texts that are written at a time, of each model.
        max_queue: texts that may wait for a place; no more of one request count than there are places.
        draft: as in ``generate``.
    """

    def __init__(self, models: Mapping[str, GPT2], places: int, max_queue: int, draft: str | None = "auto") -> None:
        self.meters = Meters(lambda: self.count_writing, lambda: self.count_waiting)
        self.lanes = {name: Lane(name, model, places, self.meters, draft) for name, model in models.items()}
        self.comparisons: deque[Comparison] = deque()
        self._next_comparison = 0.0  # when one may take its next step
        self.places, self.max_queue = places, max_queue
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def count_waiting(self) -> int:
        return sum(lane.count_waiting for lane in self.lanes.values())

    @property
    def count_writing(self) -> int:
        return sum(len(lane.writing) for lane in self.lanes.values()) + len(self.comparisons)

    @property
    def is_alive(self) -> bool:
        """False if requests would wait for ever."""
        return not self._stopping and (self._thread is None or self._thread.is_alive())

    @property
    def has_work(self) -> bool:
        return bool(self.comparisons) or any(lane.has_work for lane in self.lanes.values())

    def submit(self, work: Job | Comparison, texts: int, name: str | None = None) -> None:
        """Let a request for so many texts wait: a job for the model of this name, or a comparison.

        Raises:
            RefusalError: if too many texts wait, or the server is shutting down.
        """
        with self._wake:
            if self._stopping:
                raise shutting_down()
            queued = sum(lane.count_queued for lane in self.lanes.values()) + len(self.comparisons)
            if queued + min(texts, self.places) > self.max_queue:
                message = f"the queue is full: {queued} texts wait, of {self.max_queue}; try again in a moment"
                raise RefusalError(429, message, code="queue_full")
            queue: Any = self.comparisons if name is None else self.lanes[name].waiting
            queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="minigpt-scheduler", daemon=True)
                self._thread.start()
            self._wake.notify()

    def stop(self) -> None:
        """Report an error to everybody who still waits, and end the thread, unless its step takes too long."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        self._fail(shutting_down())

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self.has_work)
            if self._stopping:
                return
            self._gather()
            try:
                self._step()
            except BaseException as error:  # a bug of ours must not leave clients waiting
                logging.getLogger("minigpt").exception("a step failed")
                self._fail(error)

    def _step(self) -> None:
        """Take a step of every model that has work, and of one comparison; beside texts for half of the time."""
        is_busy = bool(self.comparisons) or any(lane.is_decoding for lane in self.lanes.values())
        busy = [lane for lane in self.lanes.values() if lane.has_work]
        for lane in busy:
            lane.step(is_busy)
        begun = time.monotonic()
        if self.comparisons and (not busy or begun >= self._next_comparison):
            comparison = self.comparisons.popleft()
            if not comparison.channel.disconnected:
                comparison.step()
                if not comparison.is_over:
                    self.comparisons.append(comparison)
            self._next_comparison = 2 * time.monotonic() - begun

    def _gather(self) -> None:
        """Before the first step, wait while further requests come in: it is faster to read them together."""
        before = 0
        for _ in range(MOST_PAUSES):
            if self.count_writing or (waiting := self.count_waiting) == before:
                return
            before = waiting
            time.sleep(PAUSE)

    def _fail(self, error: BaseException) -> None:
        for lane in self.lanes.values():
            lane.fail(error)
        for comparison in list(self.comparisons):
            comparison.channel.fail(error)
        self.comparisons.clear()


class Lane:
    """A model, its batch, and the requests for it. Only the scheduler's thread calls ``step``.

    Attributes:
        waiting: requests with texts that have no place yet. Any thread may append to it.
    """

    def __init__(self, name: str, model: GPT2, places: int, meters: Meters, draft: str | None) -> None:
        if draft == "int8":
            drafter_of(model)  # rounds the weights now, or says that the kernel does not serve the model
        self.name, self.model, self.places, self.meters, self.draft = name, model, places, meters, draft
        self.waiting: deque[Job] = deque()
        self._batch: Batch | None = None  # made when it is first needed
        self._next_report = 0.0  # when texts that stream are next reported

    @property
    def writing(self) -> list[Any]:
        """The texts that have a place."""
        return [] if self._batch is None else self._batch.rows

    @property
    def count_waiting(self) -> int:
        """How many texts wait for a place."""
        return sum(len(job.waiting) for job in list(self.waiting))

    @property
    def count_queued(self) -> int:
        """How many texts count towards a full queue: of each request as many as there are places."""
        return sum(min(len(job.waiting), self.places) for job in list(self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.writing or self.waiting)

    @property
    def is_decoding(self) -> bool:
        return any(len(text.ids) > text.prompt_length for text in self.writing)

    @property
    def batch(self) -> Batch:
        if self._batch is None:
            drafts = drafts_for(self.model, self.draft)
            self._batch = Batch(self.model, self.places, self.model.config.n_positions, drafts)
        return self._batch

    def step(self, is_busy: bool) -> None:
        """Fill the free places, read some tokens, and add a token to every text that is read to its end.

        Args:
            is_busy: some texts are decoding. Then fewer tokens of prompts are read, so that they do not wait long.
        """
        self._admit()
        step = self._read(READ_BESIDE if is_busy else READ_AT_ONCE)
        for piece in step.pieces:
            if piece.row.scores_prompt:
                try:
                    self._score(piece)
                except GenerationError as error:
                    piece.row.fail(error)
        logits = {piece.row: piece.logits[-1:] for piece in step.pieces if piece.is_whole}
        before = {text: len(text.ids) for text in logits}
        texts: list[Any] = self.batch.choose(step)
        self.meters.tokens.labels(self.name).inc(sum(len(text.ids) - before[text] for text in texts))
        self._report(texts, logits)
        self.batch.drop([text for text in self.writing if text.job.channel.disconnected])

    def fail(self, error: BaseException) -> None:
        """Give up everything."""
        for job in {*list(self.waiting), *(text.job for text in self.writing)}:
            job.channel.fail(error)
        self.waiting.clear()
        self._batch = None

    def _admit(self) -> None:
        """Give places to waiting texts, of each request in turn."""
        while self.waiting and len(self.writing) < self.places:
            job = self.waiting.popleft()
            if job.channel.disconnected:
                continue
            text = job.waiting.popleft()
            text.may_draft = job.body.logprobs is None  # log-probabilities need the logits of each token
            text.scores_prompt = job.body.scores_prompts and text.prompt not in job.scored
            if text.scores_prompt:
                job.scored.add(text.prompt)
                text.tokens = [Token(text.ids[0], None, [])]
            self.batch.add([text])
            if job.waiting:
                self.waiting.append(job)

    def _read(self, budget: int) -> Step:
        try:
            return self.batch.read(budget)
        except BaseException:
            return self._one_by_one(budget)

    def _one_by_one(self, budget: int) -> Step:
        """Read tokens of each text by itself after a step failed, so that only the client of a failing text is told."""
        pieces: list[Piece] = []
        for text in self.writing:
            try:
                pieces += self.batch.read(budget, [text]).pieces
            except BaseException as error:
                text.job.channel.fail(error)
        logits = [piece.logits for piece in pieces]
        return Step(pieces, torch.cat(logits) if logits else torch.empty(0))

    def _score(self, piece: Piece) -> None:
        """Note the log-probabilities of a prompt's tokens."""
        text: Any = piece.row
        after = text.ids[piece.first + 1 : min(piece.first + 1 + len(piece.ids), text.prompt_length)]
        alternatives = text.job.body.logprobs or 0
        text.tokens += tokens_of(self.model, piece.logits[: len(after)], after, alternatives)
        if piece.is_whole:
            text.scores_prompt = False
            text.job.add_scored(text.prompt, text.tokens)

    def _report(self, texts: list[RequestRow], logits: dict[Row, Tensor]) -> None:
        """Report on texts that have a new token, or are over."""
        scored = [text for text in texts if text.job.body.logprobs is not None and text.new_ids]
        if scored:
            most = max(text.job.body.logprobs or 0 for text in scored)
            rows = torch.cat([logits[text] for text in scored])  # (B, V)
            for text, token in zip(
                scored, tokens_of(self.model, rows, [text.ids[-1] for text in scored], most), strict=True
            ):
                del token.top[text.job.body.logprobs :]
                text.tokens.append(token)
        if is_time := (now := time.monotonic()) >= self._next_report:
            self._next_report = now + STREAM_SECONDS
        for text in texts:
            job = text.job
            if is_first := len(text.ids) == text.prompt_length + 1:
                self.meters.first.labels(self.name).observe(now - job.channel.opened)
            if text.end or (job.body.stream and (is_time or is_first)):
                job.report(text)
