"""Two models continue one prompt, and each also reads the text of the other.

So every position of either text has two distributions over the same context, and their divergence. V vocabulary.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.errors import RAISED
from minigpt.generation.batch import WASTE, Batch
from minigpt.generation.choosing import next_tokens
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.serve.channel import Channel, Post
from minigpt.serve.job import Failed

AT_ONCE = 4  # comparisons at a time; others wait


class Alternative(NamedTuple):
    """A token with its probability by each model."""

    id: int
    probabilities: tuple[float, float]


class Compared(NamedTuple):
    """A new token of one of the two texts.

    Attributes:
        side: which of the two models writes this text: 0 or 1.
        position: of the token, from 0.
        text: characters that can be shown since this side's last event.
        kl: Kullback-Leibler divergence of the second model's distribution from the first's, in nats.
        chosen: the new token.
        alternatives: the likeliest tokens by either model.
        end: why the text is over; None while it is not.
    """

    side: int
    position: int
    text: str
    kl: float
    chosen: Alternative
    alternatives: list[Alternative]
    end: str | None


class Comparison:
    """A request to compare two models.

    Args:
        names: of the two models.
        rows: the text of each, both with the same prompt.
        alternatives: how many of the likeliest tokens by each model to report.
    """

    def __init__(self, names: tuple[str, str], rows: tuple[Row, Row], alternatives: int) -> None:
        self.names, self.rows, self.alternatives = names, rows, alternatives
        self.channel: Channel[Compared | Failed] = Channel()
        self.is_over = False
        self._batches: list[Batch] = []

    def step(self, models: Mapping[str, GPT2]) -> list[Post]:
        """Add a token to each text that is not over; return the reports."""
        if not self._batches:
            settings = GenerationSettings(max_new_tokens=1)
            for name in self.names:
                room = models[name].config.n_positions + WASTE
                self._batches.append(Batch(models[name], settings, 2, room))
                self._batches[-1].join(list(self.rows))
        else:
            for batch in self._batches:
                batch.read()
        logits = [dict(zip(batch.rows, batch.logits.split(1), strict=True)) for batch in self._batches]
        events = [
            self._written(side, row, [of_model[row] for of_model in logits])
            for side, row in enumerate(self.rows)
            if row in logits[0]
        ]
        over = [row for row in self.rows if row.end]
        for batch in self._batches:
            batch.drop(over)
        self.is_over = len(over) == 2
        return [Post(self.channel, event, self.is_over) for event in events]

    def failed(self, error: BaseException) -> Post:
        """Stop, and return the report of the error."""
        self.is_over = True
        return Post(self.channel, Failed(error), True)

    @torch.inference_mode()
    def _written(self, side: int, row: Row, logits: list[Float[Tensor, "1 vocab"]]) -> Compared:
        (token,) = next_tokens(logits[side], [row])
        position = len(row.new_ids)
        row.push(token)
        both = torch.cat([of_model.cpu() for of_model in logits]).double().log_softmax(-1)  # (2, V)
        probabilities = both.exp()
        kl = float(torch.where(probabilities[0] > 0, probabilities[0] * (both[0] - both[1]), 0.0).sum())
        likeliest = probabilities.topk(self.alternatives).indices.T.flatten().tolist()  # of both models, in turn
        found = {id: Alternative(id, tuple(probabilities[:, id].tolist())) for id in [token, *likeliest]}
        alternatives = sorted((found[id] for id in dict.fromkeys(likeliest)), key=lambda one: -sum(one.probabilities))
        return Compared(side, position, row.take_text(), max(kl, 0.0), found[token], alternatives, row.end)


class ComparisonLane:
    """The comparisons, a few at a time."""

    def __init__(self, models: Mapping[str, GPT2]) -> None:
        self.models = models
        self.active: list[Comparison] = []
        self._waiting: deque[Comparison] = deque()

    def add(self, comparison: Comparison) -> None:
        self._waiting.append(comparison)

    @property
    def count_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.active or self._waiting)

    def step(self) -> list[Post]:
        """Take a step of each comparison; return the reports."""
        self.active = [one for one in self.active if not (one.channel.is_left or one.is_over)]
        while self._waiting and len(self.active) < AT_ONCE:
            self.active.append(self._waiting.popleft())
        posts = []
        for comparison in self.active:
            try:
                posts += comparison.step(self.models)
            except RAISED as error:
                posts.append(comparison.failed(error))
        return posts

    def fail(self, error: BaseException) -> list[Post]:
        """Give up everything; return the reports."""
        given_up, self.active = [*self.active, *self._waiting], []
        self._waiting.clear()
        return [comparison.failed(error) for comparison in given_up]
