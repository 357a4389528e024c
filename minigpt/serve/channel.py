"""The way from the scheduler's thread to a client's coroutine."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from starlette.requests import Request

Event = TypeVar("Event")


class GoneError(Exception):
    """The client has hung up."""


class Channel(Generic[Event]):
    """Events for one client. Create it in the client's coroutine.

    Attributes:
        is_left: no one receives any more.
        opened: when the request came, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.opened, self.is_left = time.monotonic(), False
        self._events: list[Event] = []
        self._is_over = False
        self._news = asyncio.Event()

    async def receive(self, request: Request) -> AsyncIterator[list[Event]]:
        """Yield the events that have arrived since the last time, until the last.

        Raises:
            GoneError: if the client hangs up.
        """
        watch = asyncio.create_task(self._watch(request))
        try:
            while self._events or not self._is_over:
                await self._news.wait()
                if self.is_left:
                    raise GoneError
                self._news.clear()
                events, self._events = self._events, []
                yield events
        finally:
            self.is_left = True
            watch.cancel()

    def add(self, event: Event, is_last: bool) -> None:
        self._events.append(event)
        self._is_over |= is_last
        self._news.set()

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.is_left = True
        self._news.set()


class Post(NamedTuple):
    """An event on its way to a channel."""

    channel: Channel
    event: object
    is_last: bool


def deliver(posts: list[Post]) -> None:
    """Send events to their channels, with one wake-up for each event loop. Any thread may call this."""
    for loop in {post.channel.loop for post in posts}:
        with suppress(RuntimeError):  # the loop is closed, so no one is waiting
            loop.call_soon_threadsafe(_hand_over, [post for post in posts if post.channel.loop is loop])


def _hand_over(posts: Iterable[Post]) -> None:
    for post in posts:
        post.channel.add(post.event, post.is_last)
