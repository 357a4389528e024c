"""What the scheduler is asked to do for one request, and what it reports."""

import dataclasses
from collections import deque
from typing import NamedTuple

from minigpt.generation.row import Row
from minigpt.serve.channel import Channel
from minigpt.serve.logprobs import Token


class PromptRead(NamedTuple):
    """The tokens of a prompt have log-probabilities."""

    prompt: int
    tokens: list[Token]


@dataclasses.dataclass(frozen=True)
class Written:
    """A text has grown.

    Attributes:
        index: which of the request's texts.
        text: the characters that can be shown since the last event.
        count: how many tokens it has by now.
        tokens: the tokens since the last event, where the request wants log-probabilities.
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
        writes: add tokens; otherwise the prompts are only scored.
        streams: report each token as it comes.
    """

    def __init__(
        self, rows: list[Row], *, alternatives: int | None, scores_prompts: bool, writes: bool, streams: bool
    ) -> None:
        self.alternatives, self.writes, self.scores_prompts = alternatives, writes, scores_prompts
        self.waiting = deque(Text(self, index, row) for index, row in enumerate(rows))
        self.channel: Channel[Event] = Channel(streams)
        self._left = len(rows)

    def report(self, text: Text) -> None:
        """Report what a text has added since this was last called."""
        row = text.row
        self._left -= row.end is not None
        tokens, text.tokens = text.tokens, []
        self.channel.put(Written(text.index, row.take_text(), len(row.new_ids), tokens, row.end), not self._left)

    def fail(self, error: BaseException) -> None:
        """Report an error, and drop all texts."""
        if not self.channel.is_over:
            self.channel.put(Failed(error), True)
        self.channel.cancel()
