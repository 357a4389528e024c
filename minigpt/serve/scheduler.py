"""The one thread that computes. It takes a step of each model that has work, in turn."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import Tensor

from minigpt.engine.int8 import drafter_of
from minigpt.errors import GenerationError
from minigpt.generation.batch import Batch, Step
from minigpt.generation.choosing import next_logits, next_tokens
from minigpt.generation.drafts import drafts_for
from minigpt.generation.row import Row
from minigpt.generation.slots import WASTE
from minigpt.model import GPT2
from minigpt.serve.jobs import Comparison, Job, Prefill, RequestRow, tokens_of
from minigpt.serve.protocol import RefusalError, shutting_down

PAUSE, MOST_PAUSES = 0.001, 10  # seconds to wait for the next of several requests, and how often
LEAST_READ, SHORT = 32, 128  # tokens of a piece, and of short texts that are read together
OVERHEAD = 32  # a forward takes as long as reading so many more tokens
READ_AT_ONCE = 512  # tokens of new prompts in a step in which no text waits for its next token, and of one request
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

    Long texts are read in pieces, so that the others get their next tokens in between. A text whose context is full
    waits for a place again, since it reads a whole window.

    Attributes:
        waiting: requests with texts that have no place yet. Any thread may append to it.
        writing: texts that have a place.
        prefills: what is to be read, the next first; a text that is to be written has a place already.
    """

    def __init__(self, name: str, model: GPT2, places: int, meters: Meters, draft: str | None) -> None:
        if draft == "int8":
            drafter_of(model)  # rounds the weights now, or says that the kernel does not serve the model
        self.name, self.model, self.places, self.meters, self.draft = name, model, places, meters, draft
        self.waiting: deque[Job] = deque()
        self.writing: list[RequestRow] = []
        self.prefills: deque[Prefill] = deque()
        self._joining: list[Prefill] = []  # those that the batch reads whole at its next step
        self._read: list[Prefill] = []  # those that are over, whose texts are not in the batch yet
        self._batch: Batch | None = None  # made when it is first needed
        self._pace = {False: 0.001, True: 0.002}  # seconds to read a token, without and with its log-probabilities
        self._seconds = 0.02  # of a step that reads no text
        self._credit = 0.0  # seconds that texts may be read before the others get their next tokens
        self._next_report = 0.0  # when texts that stream are next reported

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
        return bool(self.writing or self.waiting or self.prefills)

    @property
    def is_decoding(self) -> bool:
        return self._batch is not None and bool(self._batch.rows)

    @property
    def batch(self) -> Batch:
        if self._batch is None:
            self._batch = self._new_batch(self.places)
        return self._batch

    def step(self, is_busy: bool) -> None:
        """Fill the free places, read some texts, and add a token to every text that is read.

        Args:
            is_busy: texts wait for their next token. Then short texts are read for no longer than the steps take, and
                pieces of long ones for half as long.
        """
        self._fill_places()
        self._credit = min(self._credit, 0.0) + self._seconds if is_busy else 2 * READ_AT_ONCE * self._pace[False]
        self._read_some()
        if self.is_decoding or self._joining or self._read:
            try:
                self._report_tokens(*self._choose())
            except BaseException:
                self._one_by_one()
        self._release()

    def fail(self, error: BaseException) -> None:
        """Give up everything."""
        rows = [row for prefill in list(self.prefills) for row in prefill.rows]
        for job in {*list(self.waiting), *(text.job for text in (*rows, *self.writing))}:
            job.channel.fail(error)
        self.waiting.clear()
        self.prefills.clear()
        self.writing, self._joining, self._read, self._batch = [], [], [], None

    def _fill_places(self) -> None:
        """Take waiting texts, of each request in turn, as long as there are places."""
        skipped = 0
        while skipped < len(self.waiting):
            job = self.waiting.popleft()
            if job.channel.disconnected:
                continue
            if job.reading >= READ_AT_ONCE or (job.body.max_tokens and len(self.writing) >= self.places):
                skipped += 1
            else:
                skipped = 0
                self._start_prefill(job.waiting.popleft())
            if job.waiting:
                self.waiting.append(job)

    def _start_prefill(self, text: RequestRow) -> None:
        """Give a text a place, and let it be read; texts of one prompt share its reading."""
        job, body = text.job, text.job.body
        scores = body.scores_prompts and text.prompt not in job.scored
        if body.max_tokens:
            text.may_draft = body.logprobs is None  # log-probabilities need the logits of each token
            self.writing.append(text)
        elif not scores:
            job.report_read([text])
            return
        ids = self.batch.window(text)
        for prefill in self.prefills:
            if prefill.rows[0].job is job and prefill.rows[0].prompt == text.prompt and prefill.ids == ids:
                prefill.rows.append(text)
                return
        job.reading += len(ids)
        self.prefills.append(Prefill(self.batch, [text], ids, (body.logprobs or 0) if scores else None))

    def _read_some(self) -> None:
        """Read for as long as there is credit: short texts together at the next step, a piece of each of the others."""
        short = max(SHORT, self._credit / 2 / self._pace[False])  # tokens
        for prefill in [prefill for prefill in self.prefills if prefill.is_plain and self._credit > 0]:
            if len(prefill.ids) <= short:
                short -= len(prefill.ids)
                self.prefills.remove(prefill)
                self._joining.append(prefill)
                prefill.rows[0].job.reading -= len(prefill.ids)
        while self.prefills and self._credit > 0:
            prefill = self.prefills.popleft()
            job = prefill.rows[0].job
            if not job.channel.disconnected:
                self._advance(prefill, job)
            if prefill.left and not job.channel.disconnected:
                self.prefills.append(prefill)
            else:
                job.reading -= len(prefill.ids)

    def _advance(self, prefill: Prefill, job: Job) -> None:
        """Read a piece of a text."""
        is_scored = prefill.alternatives is not None
        tokens = max(LEAST_READ, int(self._credit / self._pace[is_scored]))
        try:
            with self._timed(is_scored, tokens, 2):
                prefill.advance(tokens)
        except BaseException as error:
            job.channel.fail(error)
        if prefill.left:
            return
        if is_scored:
            job.add_scored(prefill.rows[0].prompt, prefill.scored)
        if job.body.max_tokens:
            self._read.append(prefill)
        else:
            job.report_read(prefill.rows)

    @contextmanager
    def _timed(self, is_scored: bool, tokens: int, price: int = 1) -> Iterator[None]:
        """Take the time of a reading from the credit, and learn how long a token takes; a forward costs some more."""
        begun = time.perf_counter()
        yield
        took = time.perf_counter() - begun
        self._credit -= price * took
        self._pace[is_scored] += (took / (tokens + OVERHEAD) - self._pace[is_scored]) / 4

    def _choose(self) -> tuple[list[RequestRow], Tensor]:
        """Take a step of the batch; return its texts, each of which has a new token, and the logits that led to it."""
        batch, begun = self.batch, time.perf_counter()
        if batch.rows:
            batch.read()
        decoded = time.perf_counter()
        if new := [text for prefill in self._joining for text in prefill.rows if text in self.writing]:
            with self._timed(False, sum(len(prefill.ids) for prefill in self._joining)):
                batch.join(list(new))
        joined = time.perf_counter()
        for prefill in self._read:
            prefill.join([text for text in prefill.rows if text in self.writing])
        self._joining, self._read = [], []
        before = {row: len(row.ids) for row in batch.rows}
        texts: list[Any] = self._choose_tokens(batch) if batch.rows else []
        self.meters.tokens.labels(self.name).inc(sum(len(text.ids) - before[text] for text in texts))
        self._seconds += (decoded - begun + time.perf_counter() - joined - self._seconds) / 4
        return texts, batch.logits

    def _choose_tokens(self, batch: Batch) -> list[Row]:
        """Add a token to every text; a text whose settings leave none to choose is its client's error alone."""
        try:
            return batch.choose()
        except GenerationError as error:
            if len(batch.rows) == 1:  # also if it failed in the middle of a draft
                text: Any = batch.rows[0]
                text.job.channel.fail(error)
                batch.drop([text])
                return []
            logits_of, wrong = dict(zip(batch.rows, batch.logits.split(1), strict=True)), list[Any]()
            for row, logits in logits_of.items():
                try:
                    next_tokens(next_logits(self.model, logits), [row], keeps=False)
                except GenerationError as error:
                    wrong.append(row)
                    wrong[-1].job.channel.fail(error)
            batch.drop(wrong)
            batch.last_step = Step(torch.cat([batch.logits[:0], *(logits_of[row] for row in batch.rows)]))
            return batch.choose()

    def _new_batch(self, places: int) -> Batch:
        room = self.model.config.n_positions + WASTE
        return Batch(self.model, places, room, drafts=drafts_for(self.model, self.draft))

    def _one_by_one(self) -> None:
        """Read each text by itself after a step failed, so that only the client whose text fails gets an error."""
        unread = {text for prefill in self.prefills for text in prefill.rows}
        texts = [text for text in self.writing if text not in unread and not text.job.channel.disconnected]
        self._batch, self._joining, self._read = None, [], []
        for prefill in self.prefills:
            prefill.batch = self.batch
        for text in texts:
            prefill = Prefill(self.batch, [text], self.batch.window(text))
            try:
                prefill.advance(prefill.left)
            except BaseException as error:
                text.job.channel.fail(error)
            else:
                self._read.append(prefill)

    def _report_tokens(self, texts: list[RequestRow], logits: Tensor) -> None:
        """Report on texts that have a new token."""
        scored = [place for place, text in enumerate(texts) if text.job.body.logprobs is not None]
        if scored:
            most = max(texts[place].job.body.logprobs or 0 for place in scored)
            tokens = tokens_of(self.model, logits[scored], [texts[place].ids[-1] for place in scored], most)
            for place, token in zip(scored, tokens, strict=True):
                del token.top[texts[place].job.body.logprobs :]
                texts[place].tokens.append(token)
        if is_time := (now := time.monotonic()) >= self._next_report:
            self._next_report = now + STREAM_SECONDS
        for text in texts:
            job = text.job
            if is_first := len(text.ids) == text.prompt_length + 1:
                self.meters.first.labels(self.name).observe(now - job.channel.opened)
            if text.end or (job.body.stream and (is_time or is_first)):
                job.report(text)

    def _release(self) -> None:
        """Forget the texts that are over or whose client has gone; those whose context is full wait for a place."""
        gone = {text for text in self.writing if text.job.channel.disconnected and not text.end}
        full: list[Any] = [text for text in self.batch.full() if text not in gone]
        for text in full:
            text.job.waiting.append(text)
            if text.job not in self.waiting:
                self.waiting.append(text.job)
        if gone or full:
            self.batch.drop({*gone, *full})
        self.writing = [text for text in self.writing if not (text.end or text in gone or text in full)]
