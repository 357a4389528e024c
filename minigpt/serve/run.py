"""Runs the application on a socket until a signal ends it."""

import asyncio
import errno
import ipaddress
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minigpt.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

BODY_SECONDS = 30  # for a client to send the body of a request
HEAD_SECONDS = 30  # for a client to send a request up to its body
READ_SECONDS = 30  # for a client to read some of what has been sent
MOST_READ = 2**26  # bytes of a body
MOST_HEAD = 2**16  # bytes of a request before its body
CONNECTIONS = 1024  # at a time; beyond them the answer is 503


class Protocol(HttpToolsProtocol):
    """HTTP that closes the connection of a client that sends too slowly or too much, or does not read."""

    _late: asyncio.TimerHandle | None = None  # runs while a part of a request is missing
    _unread: asyncio.TimerHandle | None = None  # runs while the client has to read
    _part, _room = 0, MOST_HEAD  # the part's number, and how many bytes it may still have

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(HEAD_SECONDS, MOST_HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._late is None and self.cycle is not None and self.cycle.response_complete:
            self._expect(HEAD_SECONDS, MOST_HEAD)
        before = self._part
        super().data_received(data)
        if self._part == before:  # the same part goes on
            self._room -= len(data)
            if self._room < 0:
                self._close()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._expect(BODY_SECONDS, MOST_READ)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect(None, MOST_HEAD)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # it waits for the client to read the rest
            self._watch_reading()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def _expect(self, seconds: float | None, most: int) -> None:
        """Wait for the next part of a request, of so many bytes; without a limit of time between two requests."""
        if self._late is not None:
            self._late.cancel()
        self._late = None if seconds is None else self.loop.call_later(seconds, self._close)
        self._part, self._room = self._part + 1, most

    def _close(self) -> None:
        self.transport.close()
        self._watch_reading()

    def _watch_reading(self, before: int | None = None) -> None:
        """Hang up unless the client reads some of what waits for it, from time to time."""
        now = self.transport.get_write_buffer_size()
        if before is not None and now >= before:
            self.transport.abort()
        else:
            if self._unread is not None:
                self._unread.cancel()
            self._unread = self.loop.call_later(READ_SECONDS, self._watch_reading, now)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}") from error
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        ConfigError: if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        is_busy = getattr(error, "errno", None) == errno.EADDRINUSE
        raise ConfigError(
            f"cannot listen on {host} port {port}: {said}" + "; --port 0 takes a free one" * is_busy
        ) from error


def run(app: "ASGIApp", listening: socket.socket, grace: int) -> None:
    """Serve until SIGTERM or SIGINT. Then accept no more requests, and give those in progress ``grace`` seconds."""
    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="on", log_level="warning", access_log=False,
        timeout_graceful_shutdown=grace, limit_concurrency=CONNECTIONS, server_header=False, proxy_headers=False,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again at its end
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # or a client that hangs up would end the server
    uvicorn.Server(config).run(sockets=[listening])
