"""What the scheduler is asked to do for one request, and what it reports."""

import dataclasses
from collections import deque
from typing import NamedTuple

from minigpt.generation.row import Row
from minigpt.serve.channel import Channel, Post
from minigpt.serve.logprobs import Token


class PromptRead(NamedTuple):
    """A prompt has log-probabilities."""

    prompt: int
    tokens: list[Token]


@dataclasses.dataclass(frozen=True)
class Written:
    """A text has grown.

    Attributes:
        index: which of the request's texts.
        text: the characters that can be shown since the last event.
        count: how many tokens it has now.
        tokens: the tokens since the last event, if the request wants log-probabilities.
        end: why the text is over: "eos", "stop" or "length"; None while it is not.
    """

    index: int
    text: str
    count: int
    tokens: list[Token]
    end: str | None


class Failed(NamedTuple):
    """The request cannot be finished."""

    error: BaseException


Event = PromptRead | Written | Failed


@dataclasses.dataclass(eq=False)
class Text:
    """One of a request's texts."""

    job: "Job"
    index: int
    row: Row
    tokens: list[Token] = dataclasses.field(default_factory=list)


class Job:
    """A request for texts.

    Args:
        rows: one for each text; the texts of a prompt are side by side.
        alternatives: how many of the likeliest ids to report at each token; None for no log-probabilities.
        scores_prompts: report the log-probabilities of the prompts' tokens.
        writes: add tokens; otherwise only score the prompts.
        streams: report the tokens as they come; otherwise only when a text is over.
    """

    def __init__(
        self, rows: list[Row], *, alternatives: int | None, scores_prompts: bool, writes: bool, streams: bool
    ) -> None:
        self.alternatives, self.writes, self.scores_prompts = alternatives, writes, scores_prompts
        self.streams = streams
        self.waiting = deque(Text(self, index, row) for index, row in enumerate(rows))
        self.channel: Channel[Event] = Channel()
        self._left, self._has_failed = len(rows), False

    @property
    def is_dropped(self) -> bool:
        """True if no more work is to be done for it."""
        return self._has_failed or self.channel.is_left

    def written(self, text: Text) -> Post:
        """Return the report of what a text has added since the last report."""
        row = text.row
        self._left -= row.end is not None
        tokens, text.tokens = text.tokens, []
        event = Written(text.index, row.take_text(), len(row.ids) - row.prompt_length, tokens, row.end)
        return Post(self.channel, event, not self._left)

    def failed(self, error: BaseException) -> Post:
        """Drop all texts, and return the report of the error."""
        self._has_failed = True
        return Post(self.channel, Failed(error), True)
