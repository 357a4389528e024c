"""What the scheduler is asked to do for one request, and the way of its reports to the client's coroutine."""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request

from minigpt.generation.choosing import NO_TOKEN_LEFT
from minigpt.generation.row import Row
from minigpt.serve.protocol import RefusalError

REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}  # Row.end -> finish_reason


class Channel:
    """Reports for one client. Create it in the client's coroutine.

    Attributes:
        is_left: no one receives any more.
        opened: when the request came, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.opened, self.is_left = time.monotonic(), False
        self._events: list[Any] = []
        self._is_over = False
        self._news = asyncio.Event()

    async def receive(self, request: Request) -> AsyncIterator[list[Any]]:
        """Yield the events that have arrived since the last time, until the last.

        Raises:
            ClientDisconnect: if the client hangs up.
            RefusalError: if an event is an error.
        """
        watch = asyncio.create_task(self._watch(request))
        try:
            while self._events or not self._is_over:
                await self._news.wait()
                if self.is_left:
                    raise ClientDisconnect
                self._news.clear()
                events, self._events = self._events, []
                for event in events:
                    if isinstance(event, BaseException):
                        raise _failure(event)
                yield events
        finally:
            self.is_left = True
            watch.cancel()

    def add(self, event: object, is_last: bool) -> None:
        self._events.append(event)
        self._is_over |= is_last
        self._news.set()

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.is_left = True
        self._news.set()


class Post(NamedTuple):
    """An event on its way to a channel. An error is an event too, and the last."""

    channel: Channel
    event: object
    is_last: bool


def deliver(posts: list[Post]) -> None:
    """Send events to their channels, with one wake-up for each event loop. Any thread may call this."""
    for loop in {post.channel.loop for post in posts}:
        with suppress(RuntimeError):  # the loop is closed, so no one is waiting
            loop.call_soon_threadsafe(_hand_over, [post for post in posts if post.channel.loop is loop])


def _hand_over(posts: list[Post]) -> None:
    for channel, event, is_last in posts:
        channel.add(event, is_last)


def _failure(error: BaseException) -> RefusalError:
    """Return the error that a client gets if its request failed while it was computed."""
    if isinstance(error, RefusalError):
        return error
    if str(error) == NO_TOKEN_LEFT:
        return RefusalError(400, str(error))
    return RefusalError(500, f"the model failed: {type(error).__name__}: {str(error)[:500]}", code="model_failed")


class Token(NamedTuple):
    """A token of a prompt or of a completion, with the model's own log-probabilities.

    Attributes:
        logprob: natural logarithm of its probability; None for the first token of a prompt, which has no context.
        top: the likeliest ids at its position with their log-probabilities, the likeliest first.
    """

    id: int
    logprob: float | None
    top: list[tuple[int, float]]


class Written(NamedTuple):
    """The event that a text has grown.

    Attributes:
        number: which of the request's texts.
        text: the characters that can be shown since the last event.
        total: how many tokens it has now.
        tokens: the tokens since the last event, if the request wants log-probabilities.
        end: why the text is over: "eos", "stop" or "length"; None while it is not.
    """

    number: int
    text: str
    total: int
    tokens: list[Token]
    end: str | None


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
        scores_prompts: put the log-probabilities of each prompt's tokens into ``scored`` before its texts grow.
        writes: add tokens; otherwise only score the prompts.
        streams: report the tokens as they come; otherwise only when a text is over.
    """

    def __init__(
        self, rows: list[Row], *, alternatives: int | None, scores_prompts: bool, writes: bool, streams: bool
    ) -> None:
        self.alternatives, self.scores_prompts = alternatives, scores_prompts
        self.writes, self.streams = writes, streams
        self.waiting = deque(Text(self, index, row) for index, row in enumerate(rows))
        self.scored: dict[int, list[Token]] = {}
        self.channel = Channel()
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
        return Post(self.channel, error, True)
