"""The texts of one model: they wait, take a place in a batch, and leave it."""

from collections import deque
from threading import Lock

from torch import Tensor

from minigpt.engine import GPT2
from minigpt.errors import RAISED
from minigpt.generation.batch import WASTE, Batch
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.serve.channel import Channel
from minigpt.serve.job import Event, Job, PromptRead, Text
from minigpt.serve.logprobs import prompt_tokens, tokens_of
from minigpt.serve.meters import Meters

SCORED = 512  # tokens of prompts to score before the texts that are being written go on
EVERY = GenerationSettings(max_new_tokens=1)  # of the batch as a whole; each row has its own


class Lane:
    """A model, its batch, and the requests for it.

    Only the scheduler's thread calls ``step``; ``add`` may be called by any.
    """

    def __init__(self, name: str, model: GPT2, places: int, meters: Meters) -> None:
        self.name, self.model, self.places, self.meters = name, model, places, meters
        self.writing: dict[Row, Text] = {}
        self._batch: Batch | None = None
        self._joining: list[Row] = []  # that have a place and are not in the batch
        self._waiting: deque[Job] = deque()
        self._lock = Lock()

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

    def step(self) -> set[Channel[Event]]:
        """Fill the free places, and add a token to every text; return whose texts have grown."""
        touched = self._admit()
        if self.writing:
            try:
                rows, logits = self._choose()
            except RAISED:
                self._one_by_one()
            else:
                self._note(rows, logits)
        touched |= {text.job.channel for text in self.writing.values()}
        self._let_go()
        return touched

    def fail(self, error: BaseException) -> set[Channel[Event]]:
        """Give up everything; return who is told."""
        with self._lock:
            jobs = {*self._waiting, *(text.job for text in self.writing.values())}
            self._waiting.clear()
        for job in jobs:
            job.fail(error)
        self.writing, self._joining, self._batch = {}, [], None
        return {job.channel for job in jobs}

    def _admit(self) -> set[Channel[Event]]:
        """Give free places to waiting texts, to each request in turn; score prompts; return whose jobs have events."""
        touched, scored = set(), 0
        while len(self.writing) < self.places and scored < SCORED and (text := self._next_text()) is not None:
            job, row = text.job, text.row
            touched.add(job.channel)
            if job.scores_prompts and row.number == 0:
                scored += len(row.ids)
                try:
                    tokens = prompt_tokens(self.model, row.ids, job.alternatives or 0)
                except RAISED as error:
                    job.fail(error)
                    continue
                job.channel.put(PromptRead(row.prompt, tokens))
            if job.writes:
                self.writing[row] = text
                self._joining.append(row)
            else:
                row.end = "length"
                job.report(text)
        return touched

    def _next_text(self) -> Text | None:
        with self._lock:
            while self._waiting:
                job = self._waiting.popleft()
                if job.channel.cancelled:
                    continue
                text = job.waiting.popleft()
                if job.waiting:
                    self._waiting.append(job)
                return text
        return None

    def _choose(self) -> tuple[list[Row], Tensor]:
        """Take a step of the batch; return its rows, each of which has a new token, and the logits that led to it."""
        batch = self._batch or self._new_batch(self.places)
        self._batch = batch
        new, self._joining = self._joining, []
        if batch.rows:
            batch.read(new)
        else:
            batch.join(new)
        rows, logits = list(batch.rows), batch.logits
        batch.choose()
        return rows, logits

    def _new_batch(self, places: int) -> Batch:
        return Batch(self.model, EVERY, places, self.model.config.n_positions + WASTE)

    def _one_by_one(self) -> None:
        """Take a step that failed again, each row by itself, so that the error is only its own client's."""
        self._batch = None
        for row, text in list(self.writing.items()):
            try:
                alone = self._new_batch(1)
                alone.join([row])
                rows, logits = list(alone.rows), alone.logits
                alone.choose()
            except RAISED as error:
                text.job.fail(error)
            else:
                self._note(rows, logits)
        self._joining = list(self.writing)

    def _note(self, rows: list[Row], logits: Tensor) -> None:
        """Report the tokens that rows have got."""
        wanted = {place: self.writing[row] for place, row in enumerate(rows) if row in self.writing}
        scored = [place for place, text in wanted.items() if text.job.alternatives is not None]
        if scored:
            most = max(wanted[place].job.alternatives or 0 for place in scored)
            found = tokens_of(logits[scored], [rows[place].ids[-1] for place in scored], most)
            for place, token in zip(scored, found, strict=True):
                text = wanted[place]
                del token.top[text.job.alternatives :]
                text.tokens.append(token)
        for text in wanted.values():
            row, job = text.row, text.job
            if len(row.new_ids) == 1:
                self.meters.first_token(self.name, job.channel.opened)
            if job.channel.streams or row.end:
                job.report(text)
        self.meters.tokens(self.name, len(wanted))

    def _let_go(self) -> None:
        """Forget the texts that are over, and drop those whose client has gone."""
        gone = {row for row, text in self.writing.items() if text.job.channel.cancelled and not row.end}
        for row in [row for row in self.writing if row.end or row in gone]:
            del self.writing[row]
        if self._joining:
            self._joining = [row for row in self._joining if row in self.writing]
        if self._batch is not None:
            self._batch.drop(gone)
            if not self._batch.rows:
                self._batch = None  # with its cache
