"""Runs the application on a socket until a signal ends it."""

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minigpt.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SEND_SECONDS = 30  # for a client to send the head of a request, and to send its body
READ_SECONDS = 30  # for a client to read some of what has been sent
LAST_SECONDS = 0.4  # for clients to read an error, when the grace is over
MOST_READ = 2**26  # bytes of a body
MOST_HEAD = 2**16  # bytes of a request before its body
CONNECTIONS = 1024  # at a time; beyond them the answer is 503


class Protocol(HttpToolsProtocol):
    """HTTP that closes the connection of a client that sends too slowly or too much, or does not read."""

    _began: float | None = None  # when the part of a request began that is not complete yet
    _part, _room = 0, MOST_HEAD  # the number of that part, and how many bytes it may still have
    _unread, _read_at = 0, 0.0  # bytes that wait for the client, and when it last read some

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(MOST_HEAD)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._began is None and self.cycle is not None and self.cycle.response_complete:
            self._expect(MOST_HEAD)
        before = self._part
        super().data_received(data)
        if self._part == before:  # the same part goes on
            self._room -= len(data)
            if self._room < 0:
                self.transport.close()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._expect(MOST_READ)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect(MOST_HEAD)
        self._began = None

    def _expect(self, most: int) -> None:
        """Wait for the next part of a request, of so many bytes."""
        self._began, self._part, self._room = self.loop.time(), self._part + 1, most

    def _watch(self) -> None:
        """Look every second whether the client sends, and reads what waits for it."""
        now, unread = self.loop.time(), self.transport.get_write_buffer_size()
        if unread < self._unread or not unread:
            self._read_at = now
        self._unread = unread
        if now - self._read_at > READ_SECONDS:
            self.transport.abort()
        elif self._began is not None and now - self._began > SEND_SECONDS:
            self.transport.close()
        self._timer = self.loop.call_later(1, self._watch)


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
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        is_busy = getattr(error, "errno", None) == errno.EADDRINUSE
        reason = f"{getattr(error, 'strerror', None) or error}{'; --port 0 takes a free one' * is_busy}"
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error


class GracefulServer(uvicorn.Server):
    """A server that gives requests in progress some seconds when it shuts down, and then an error.

    Args:
        grace: those seconds.
    """

    def __init__(self, config: uvicorn.Config, grace: int) -> None:
        super().__init__(config)
        self.grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        end.cancel()

    async def _end(self) -> None:
        await asyncio.sleep(self.grace)
        for task in list(self.server_state.tasks):
            task.cancel()
        await asyncio.sleep(LAST_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def run(app: "ASGIApp", listening: socket.socket, grace: int) -> None:
    """Serve until SIGTERM or SIGINT. Then end the process: requests in progress get ``grace`` seconds."""
    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="on", log_level="warning", access_log=False,
        limit_concurrency=CONNECTIONS, server_header=False, proxy_headers=False,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again at its end
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # or a client that hangs up would end the server
    GracefulServer(config, grace).run(sockets=[listening])
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end takes long, and it cannot end a step that goes on
