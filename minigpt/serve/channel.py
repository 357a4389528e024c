"""The way from the scheduler's thread to a client's coroutine."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

Event = TypeVar("Event")


class Post(NamedTuple, Generic[Event]):
    """Events that arrive together; after the last post comes no other."""

    events: list[Event]
    is_last: bool


class Channel(Generic[Event]):
    """Events for one client. As a context manager it is cancelled at the end.

    The scheduler puts events and delivers them once a step; the client receives. Create it in the client's coroutine.

    Args:
        streams: deliver events as they come; otherwise all of them at the end.

    Attributes:
        cancelled: the client has gone, so its work is to be dropped.
        is_over: the last event has been put.
    """

    def __init__(self, streams: bool) -> None:
        self.streams, self.cancelled, self.is_over = streams, False, False
        self.opened = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._posts: asyncio.Queue[Post[Event]] = asyncio.Queue()
        self._events: list[Event] = []

    def put(self, event: Event, is_last: bool = False) -> None:
        self._events.append(event)
        self.is_over = is_last

    def cancel(self) -> None:
        self.cancelled = True

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.cancel()

    async def receive(self) -> Post[Event]:
        """Wait for the next post."""
        return await self._posts.get()

    @staticmethod
    def deliver(channels: "Iterable[Channel[Event]]") -> None:
        """Send what has been put, with one wake-up for each event loop."""
        posts: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Post[Event]], Post[Event]]]]
        posts = defaultdict(list)
        for channel in channels:
            if channel._events and (channel.streams or channel.is_over):
                post = Post(channel._events, channel.is_over)
                channel._events = []
                posts[channel._loop].append((channel._posts, post))
        for loop, few in posts.items():
            with suppress(RuntimeError):  # the loop is closed, and so nobody is waiting
                loop.call_soon_threadsafe(_hand_over, few)


def _hand_over(posts: list[tuple[asyncio.Queue[Post[Event]], Post[Event]]]) -> None:
    for queue, post in posts:
        queue.put_nowait(post)
