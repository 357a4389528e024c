"""The one thread that computes. It takes a step of each model that has work, in turn.

R tokens, V vocabulary.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.int8 import drafter_of
from minigpt.errors import RAISED
from minigpt.generation.batch import WASTE, Batch
from minigpt.generation.choosing import next_logits
from minigpt.generation.drafts import Drafts
from minigpt.model import GPT2
from minigpt.serve.comparison import Comparison
from minigpt.serve.job import Job, Text, Token
from minigpt.serve.meters import Meters
from minigpt.serve.protocol import RefusalError

PAUSE, MOST_PAUSES = 0.001, 10  # seconds to wait for the next of several requests, and how often
AT_ONCE = 4  # comparisons at a time; others wait
READ_AT_ONCE = 512  # tokens of new prompts, before the texts in progress get their next token
STREAM_SECONDS = 0.02  # between two reports of a text; what it adds in between is sent together
LOWEST = -9999.0  # log-probability instead of -inf, which JSON does not have
SCORED_AT_ONCE = 128  # positions of a prompt whose logits are computed at a time


class Scheduler:
    """Serves the requests for several models.

    Args:
        places: texts that are written at a time, of each model.
        max_queue: texts that may wait for a place.
        draft: as in ``generate``.
    """

    def __init__(self, models: Mapping[str, GPT2], places: int, max_queue: int, draft: str | None = None) -> None:
        self.meters = Meters(lambda: self.count_writing, lambda: self.count_waiting)
        self.lanes = {name: Lane(name, model, places, self.meters, draft) for name, model in models.items()}
        self.comparisons: list[Comparison] = []
        self.max_queue = max_queue
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def count_waiting(self) -> int:
        return sum(lane.count_waiting for lane in self.lanes.values()) + len(self.comparisons[AT_ONCE:])

    @property
    def count_writing(self) -> int:
        return sum(len(lane.writing) for lane in self.lanes.values()) + len(self.comparisons[:AT_ONCE])

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
                raise _shutting_down()
            if (waiting := self.count_waiting) + texts > self.max_queue:
                said = f"{waiting} texts are waiting, and at most {self.max_queue} may; try again in a moment"
                raise RefusalError(429, said, code="queue_full")
            waiting_for: Any = self.comparisons if name is None else self.lanes[name].waiting
            waiting_for.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="minigpt-scheduler", daemon=True)
                self._thread.start()
            self._wake.notify()

    def stop(self) -> None:
        """End the thread, and report an error to everybody who still waits. Calls after the first do nothing."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._fail(_shutting_down())

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self.has_work)
                if self._stopping:
                    return
            self._gather()
            try:
                for lane in self.lanes.values():
                    if lane.has_work:
                        lane.step()
                for comparison in self.comparisons[:AT_ONCE]:
                    if comparison.is_over or comparison.channel.is_left:
                        self.comparisons.remove(comparison)
                    else:
                        comparison.step()
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
        with self._wake:
            for lane in self.lanes.values():
                lane.fail(error)
            for comparison in self.comparisons:
                comparison.channel.fail(error)
            self.comparisons.clear()


def _shutting_down() -> RefusalError:
    return RefusalError(503, "the server is shutting down", code="shutting_down")


class Lane:
    """A model, its batch, and the requests for it. Only the scheduler's thread calls ``step``.

    Attributes:
        waiting: requests with texts that have no place yet. Any thread may append to it.
        writing: texts that have a place.
    """

    def __init__(self, name: str, model: GPT2, places: int, meters: Meters, draft: str | None) -> None:
        if draft is not None:
            drafter_of(model)  # rounds the weights now, or says that the kernel does not serve the model
        self.name, self.model, self.places, self.meters, self.draft = name, model, places, meters, draft
        self.waiting: deque[Job] = deque()
        self.writing: list[Text] = []
        self._joining: list[Text] = []  # those of ``writing`` that are not in the batch
        self._batch: Batch | None = None  # made when it is first needed
        self._next_report = 0.0  # when texts that stream are next reported

    @property
    def count_waiting(self) -> int:
        """How many texts wait for a place."""
        return sum(len(job.waiting) for job in list(self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.writing or self.waiting)

    def step(self) -> None:
        """Fill the free places, and add a token to every text."""
        self._admit()
        if self.writing:
            try:
                self._note(*self._choose())
            except RAISED:
                self._one_by_one()
        self._let_go()

    def fail(self, error: BaseException) -> None:
        """Give up everything."""
        for job in {*self.waiting, *(text.job for text in self.writing)}:
            job.channel.fail(error)
        self.waiting.clear()
        self.writing, self._joining, self._batch = [], [], None

    def _admit(self) -> None:
        """Give free places to waiting texts, to each request in turn; score prompts."""
        tokens = 0
        while len(self.writing) < self.places and tokens < READ_AT_ONCE and (text := self._next_text()) is not None:
            job = text.job
            if text.number == 0:  # other texts of the prompt share its reading
                tokens += len(text.ids)
                if job.body.scores_prompts:
                    try:
                        job.scored[text.prompt] = prompt_tokens(self.model, text.ids, job.body.alternatives or 0)
                    except RAISED as error:
                        job.channel.fail(error)
                        continue
            if job.body.new_tokens:
                text.may_draft = job.body.alternatives is None  # log-probabilities need the logits of each token
                self.writing.append(text)
                self._joining.append(text)
            else:
                text.end = "length"
                job.report(text)

    def _next_text(self) -> Text | None:
        while self.waiting:
            job = self.waiting.popleft()
            if job.channel.is_left:
                continue
            text = job.waiting.popleft()
            if job.waiting:
                self.waiting.append(job)
            return text
        return None

    def _choose(self) -> tuple[list[Text], Tensor]:
        """Take a step of the batch; return its texts, each of which has a new token, and the logits that led to it."""
        self._batch = batch = self._batch or self._new_batch(self.places)
        new, self._joining = self._joining, []
        if batch.rows:
            batch.read(new)
        else:
            batch.join(list(new))
        logits, before = batch.logits, sum(len(row.ids) for row in batch.rows)
        texts: Any = batch.choose()
        self.meters.tokens.labels(self.name).inc(sum(len(text.ids) for text in texts) - before)
        return texts, logits

    def _new_batch(self, places: int) -> Batch:
        drafts = Drafts(self.model, draft=self.draft) if self.draft else None
        return Batch(self.model, places, self.model.config.n_positions + WASTE, drafts=drafts)

    def _one_by_one(self) -> None:
        """Take a step that failed again, each text by itself: only the client whose text fails gets an error."""
        for text in self.writing:
            if text.job.channel.is_left:
                continue
            try:
                alone = self._new_batch(1)
                alone.join([text])
                logits = alone.logits
                alone.choose()
                self._note([text], logits)
                self.meters.tokens.labels(self.name).inc()
            except RAISED as error:
                text.job.channel.fail(error)
        self._batch, self._joining = None, list(self.writing)

    def _note(self, texts: list[Text], logits: Tensor) -> None:
        """Report on texts that have a new token."""
        scored = [place for place, text in enumerate(texts) if text.job.body.alternatives is not None]
        if scored:
            most = max(texts[place].job.body.alternatives or 0 for place in scored)
            found = tokens_of(logits[scored], [texts[place].ids[-1] for place in scored], most)
            for place, token in zip(scored, found, strict=True):
                del token.top[texts[place].job.body.alternatives :]
                texts[place].tokens.append(token)
        if is_time := (now := time.monotonic()) >= self._next_report:
            self._next_report = now + STREAM_SECONDS
        for text in texts:
            job = text.job
            if is_first := len(text.ids) == text.prompt_length + 1:
                self.meters.first.labels(self.name).observe(now - job.channel.opened)
            if text.end or (job.body.stream and (is_time or is_first)):
                job.report(text)

    def _let_go(self) -> None:
        """Forget the texts that are over, and drop those whose client has gone."""
        gone = {text for text in self.writing if text.job.channel.is_left and not text.end}
        self.writing = [text for text in self.writing if not (text.end or text in gone)]
        self._joining = [text for text in self._joining if text in self.writing]
        if gone and self._batch is not None:
            self._batch.drop(gone)


@torch.inference_mode()
def tokens_of(logits: Float[Tensor, "rows vocab"], ids: list[int], alternatives: int) -> list[Token]:
    """Return the token ``ids[i]`` of each row with its log-probability and the row's likeliest ``alternatives``."""
    logprobs = logits.log_softmax(-1).clamp_min(LOWEST)  # (R, V)
    chosen = logprobs.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0].tolist()
    values, likeliest = (part.tolist() for part in logprobs.topk(min(alternatives, logits.shape[-1])))
    tops = [list(zip(*pair, strict=True)) for pair in zip(likeliest, values, strict=True)]
    return [Token(*token) for token in zip(ids, chosen, tops, strict=True)]


@torch.inference_mode()
def prompt_tokens(model: GPT2, ids: list[int], alternatives: int) -> list[Token]:
    """Return the tokens of a prompt with their log-probabilities, from one forward."""
    hidden = model.hidden_states(torch.tensor([ids], device=model.wte.weight.device))[:, :-1]  # (1, T - 1, C)
    tokens = [Token(ids[0], None, [])]
    for part in hidden.split(SCORED_AT_ONCE, dim=1):
        if part.shape[1]:
            logits = next_logits(model, model.head(part)[0])  # (R, V)
            tokens += tokens_of(logits, ids[len(tokens) : len(tokens) + len(logits)], alternatives)
    return tokens
