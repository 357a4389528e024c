"""The texts of one model: they wait, take a place in a batch, and leave it."""

import time
from collections import deque
from threading import Lock

from torch import Tensor

from minigpt.engine import GPT2
from minigpt.errors import RAISED
from minigpt.generation.batch import WASTE, Batch
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.serve.channel import Post
from minigpt.serve.job import Job, PromptRead, Text
from minigpt.serve.logprobs import prompt_tokens, tokens_of
from minigpt.serve.meters import Meters

READ_AT_ONCE = 512  # tokens of new prompts, before the texts in progress get their next token
STREAM_SECONDS = 0.02  # between two reports of a text; what it adds in between is sent together
EVERY = GenerationSettings(max_new_tokens=1)  # of the batch as a whole; each row has its own


class Lane:
    """A model, its batch, and the requests for it.

    Only the scheduler's thread calls ``step`` and ``fail``. Any thread may call ``add``.
    """

    def __init__(self, name: str, model: GPT2, places: int, meters: Meters, draft: str | None = None) -> None:
        self.settings = EVERY.replace(draft=draft)
        self.name, self.model, self.places, self.meters = name, model, places, meters
        self.writing: dict[Row, Text] = {}
        self._batch: Batch | None = None  # made when it is first needed
        self._joining: list[Row] = []  # rows that have a place and are not in the batch
        self._waiting: deque[Job] = deque()
        self._lock = Lock()
        self._next_report = 0.0  # when texts that stream are next reported

    def add(self, job: Job) -> None:
        with self._lock:
            self._waiting.append(job)

    @property
    def count_waiting(self) -> int:
        """How many texts wait for a place."""
        with self._lock:
            return sum(len(job.waiting) for job in self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.writing or self._waiting)

    def step(self) -> list[Post]:
        """Fill the free places, and add a token to every text; return the reports."""
        posts = self._admit()
        if self.writing:
            try:
                posts += self._note(*self._choose())
            except RAISED:
                posts += self._one_by_one()
        self._let_go()
        return posts

    def fail(self, error: BaseException) -> list[Post]:
        """Give up everything; return the reports."""
        with self._lock:
            jobs = {*self._waiting, *(text.job for text in self.writing.values())}
            self._waiting.clear()
        self.writing, self._joining, self._batch = {}, [], None
        return [job.failed(error) for job in jobs]

    def _admit(self) -> list[Post]:
        """Give free places to waiting texts, to each request in turn; score prompts; return the reports."""
        posts, tokens = [], 0
        while len(self.writing) < self.places and tokens < READ_AT_ONCE and (text := self._next_text()) is not None:
            job, row = text.job, text.row
            if row.number == 0:  # other texts of the prompt share its reading
                tokens += len(row.ids)
                if job.scores_prompts:
                    try:
                        scores = prompt_tokens(self.model, row.ids, job.alternatives or 0)
                    except RAISED as error:
                        posts.append(job.failed(error))
                        continue
                    posts.append(Post(job.channel, PromptRead(row.prompt, scores), False))
            if job.writes:
                self.writing[row] = text
                row.may_draft = job.alternatives is None  # log-probabilities need the logits of each token
                self._joining.append(row)
            else:
                row.end = "length"
                posts.append(job.written(text))
        return posts

    def _next_text(self) -> Text | None:
        with self._lock:
            while self._waiting:
                job = self._waiting.popleft()
                if job.is_dropped:
                    continue
                text = job.waiting.popleft()
                if job.waiting:
                    self._waiting.append(job)
                return text
        return None

    def _choose(self) -> tuple[list[Row], Tensor]:
        """Take a step of the batch; return its rows, each of which has a new token, and the logits that led to it."""
        self._batch = batch = self._batch or self._new_batch(self.places)
        new, self._joining = self._joining, []
        if batch.rows:
            batch.read(new)
        else:
            batch.join(new)
        logits = batch.logits
        rows, written = list(batch.rows), sum(len(row.ids) for row in batch.rows)
        batch.choose()
        self.meters.tokens(self.name, sum(len(row.ids) for row in rows) - written)
        return rows, logits

    def _new_batch(self, places: int) -> Batch:
        return Batch(self.model, self.settings, places, self.model.config.n_positions + WASTE)

    def _one_by_one(self) -> list[Post]:
        """Take a step that failed again, each row by itself, so that only the client whose row fails gets an error."""
        posts = []
        for row, text in self.writing.items():
            if text.job.is_dropped:
                continue
            try:
                alone = self._new_batch(1)
                alone.join([row])
                logits = alone.logits
                posts += self._note(alone.choose(), logits)
                self.meters.tokens(self.name, 1)
            except RAISED as error:
                posts.append(text.job.failed(error))
        self._batch, self._joining = None, list(self.writing)
        return posts

    def _note(self, rows: list[Row], logits: Tensor) -> list[Post]:
        """Return the reports on rows that have a new token."""
        texts = [self.writing[row] for row in rows]
        scored = [place for place, text in enumerate(texts) if text.job.alternatives is not None]
        if scored:
            most = max(texts[place].job.alternatives or 0 for place in scored)
            found = tokens_of(logits[scored], [rows[place].ids[-1] for place in scored], most)
            for place, token in zip(scored, found, strict=True):
                del token.top[texts[place].job.alternatives :]
                texts[place].tokens.append(token)
        if is_time := (now := time.monotonic()) >= self._next_report:
            self._next_report = now + STREAM_SECONDS
        posts = []
        for text in texts:
            row, job = text.row, text.job
            if is_first := len(row.ids) == row.prompt_length + 1:
                self.meters.first_token(self.name, now - job.channel.opened)
            if row.end or (job.streams and (is_time or is_first)):
                posts.append(job.written(text))
        return posts

    def _let_go(self) -> None:
        """Forget the texts that are over, and drop those whose client has gone."""
        gone = {row for row, text in self.writing.items() if text.job.is_dropped and not row.end}
        self.writing = {row: text for row, text in self.writing.items() if not (row.end or row in gone)}
        if self._joining:
            self._joining = [row for row in self._joining if row in self.writing]
        if gone and self._batch is not None:
            self._batch.drop(gone)
