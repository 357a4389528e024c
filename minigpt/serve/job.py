"""What the scheduler is asked to do for one request, and the way of its reports to the client's coroutine."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request

from minigpt.generation.choosing import NoTokenLeftError
from minigpt.generation.row import Row
from minigpt.serve.protocol import CompletionRequest, RefusalError

REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}  # Row.end -> finish_reason


class Channel:
    """Events for one client. Create it in the client's coroutine.

    Attributes:
        is_left: no one receives any more, so no more work is to be done.
        opened: when the request came, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.opened, self.is_left = time.monotonic(), False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Any, bool]] = asyncio.Queue()

    def send(self, event: object, is_last: bool) -> None:
        """Add an event. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed, so no one is waiting
            self._loop.call_soon_threadsafe(self._events.put_nowait, (event, is_last))

    def fail(self, error: BaseException) -> None:
        """End with an error. Any thread may call this."""
        self.is_left = True
        self.send(error, True)

    async def receive(self, request: Request) -> AsyncIterator[list[Any]]:
        """Yield the events that have arrived since the last time, until the last.

        Raises:
            ClientDisconnect: if the client hangs up.
            RefusalError: if an event is an error.
        """
        watch, is_over = asyncio.create_task(self._watch(request)), False
        try:
            while not is_over:
                arrived = [await self._events.get()]
                while not self._events.empty():
                    arrived.append(self._events.get_nowait())
                for event, is_last in arrived:
                    if isinstance(event, BaseException):
                        raise _failure(event)
                    is_over |= is_last
                yield [event for event, _ in arrived]
        finally:
            self.is_left = True
            watch.cancel()

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientDisconnect())


def _failure(error: BaseException) -> BaseException:
    """Return the error that a client gets if its request failed while it was computed."""
    if isinstance(error, RefusalError | ClientDisconnect):
        return error
    if isinstance(error, NoTokenLeftError):
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


class Text(Row):
    """One of a request's texts.

    Attributes:
        job: the request.
        index: its number among the request's texts.
        tokens: those since the last report, if the request wants log-probabilities.
    """

    job: "Job"
    index: int
    tokens: list[Token]


class Job:
    """A request for texts.

    Attributes:
        waiting: texts that have no place yet; the texts of a prompt are side by side.
        scored: the tokens of each prompt with their log-probabilities, if the request wants them.
    """

    def __init__(self, body: CompletionRequest, texts: list[Text]) -> None:
        self.body = body
        self.waiting = deque(texts)
        self.scored: dict[int, list[Token]] = {}
        self.channel = Channel()
        self._left = len(texts)
        for index, text in enumerate(texts):
            text.job, text.index, text.tokens = self, index, []

    def report(self, text: Text) -> None:
        """Send what a text has added since the last report."""
        self._left -= text.end is not None
        total = len(text.ids) - text.prompt_length
        self.channel.send(Written(text.index, text.take_text(), total, text.tokens, text.end), not self._left)
        text.tokens = []
