"""Runs the application on a socket until a signal ends it."""

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from minigpt.errors import ConfigError
from minigpt.serve.protocol import RefusalError

SEND_SECONDS = 30  # for a client to send the head of a request, and to send its body
READ_SECONDS = 30  # for a client to take data, once the buffers of its system are full
MAX_HEAD = 2**16  # bytes of the head of a request
MAX_RECEIVED = 2**26  # bytes that are received of its body, of which the guard accepts less
MAX_CONNECTIONS = 1024  # at a time
OVERLOADED = "this server answers as many requests at a time as it can; try again in a moment"


class Connection(H11Protocol):
    """A connection whose client must send in time. Where there are too many, those that wait for their clients close.

    uvicorn's h11 protocol ignores an offer of HTTP/2, keeps its body, and sends no chunks to an HTTP/1.0 client.
    Its httptools protocol does neither.

    Attributes:
        waiting_since: when the connection began to wait for the next part of a request; None while it answers one.
        room: bytes that the client may still send of this part.
    """

    waiting_since: float | None
    room: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._part: Any = None
        self._note_part()
        self._timer = self.loop.call_later(1, self._watch)
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.room -= len(data)
        super().data_received(data)
        if self.room < 0:
            self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        self._note_part()

    def _should_upgrade(self) -> bool:
        return False  # and no warning: Java's client offers HTTP/2 with every request

    def _note_part(self) -> None:
        """Note when the connection begins to wait for another part of a request: its head or its body."""
        part = self.conn.their_state, self.cycle
        if part == self._part:
            return
        self._part = part
        self.room = MAX_RECEIVED
        is_waiting = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        self.waiting_since = self.loop.time() if is_waiting else None

    def _watch(self) -> None:
        if self.waiting_since is not None and self.loop.time() - self.waiting_since > SEND_SECONDS:
            self.transport.close()
        self._timer = self.loop.call_later(1, self._watch)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client; if none waits, refuse this one."""
        others: Any = self.connections - {self}
        waiting = [other for other in others if other.waiting_since is not None]
        if waiting:
            longest = min(waiting, key=lambda other: other.waiting_since)
            self.connections.discard(longest)
            longest.transport.abort()
        else:
            self.app = _answer_overloaded


class Server(uvicorn.Server):
    """A server that cancels the requests in progress at a second Ctrl-C, so that their clients are told at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            for task in self.server_state.tasks.copy():
                task.get_loop().call_soon_threadsafe(task.cancel)
        self.should_exit = True


async def _answer_overloaded(scope: Any, receive: Any, send: Any) -> None:
    response = RefusalError(503, OVERLOADED, code="overloaded").response()
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"must be an address of this machine, got {host}", argument="host") from error
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in addresses)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        ConfigError: if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            reason += "; --port 0 takes a free one"
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * READ_SECONDS)
    return listening


def server_of(app: ASGIApp, grace: int) -> Server:
    """Return a server of the application.

    Args:
        grace: seconds that requests in progress get. After that their tasks are cancelled, and the app answers them.
    """

    async def uncancelled(scope: Any, receive: Any, send: Any) -> None:
        with suppress(asyncio.CancelledError):  # uvicorn would log it as an error of the app
            await app(scope, receive, send)

    return Server(uvicorn.Config(
        uncancelled, http=Connection, ws="none", lifespan="on", log_level="warning", access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=grace,
        h11_max_incomplete_event_size=MAX_HEAD,
    ))  # fmt: skip


def run(server: Server, listening: socket.socket, ready: str) -> None:
    """Print ``ready``, and serve until SIGTERM or SIGINT. Then end the process, with status 0."""
    for number in (signal.SIGTERM, signal.SIGINT):  # before and after the server has its own handlers
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    print(ready, flush=True)
    server.run(sockets=[listening])
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end takes long, and it cannot end a step that goes on
