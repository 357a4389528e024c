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

REQUEST_SECONDS = 30  # for a new connection to send the head of its first request
READ_SECONDS = 30  # for a client to read some of what has been sent
MOST_HEAD = 2**16  # bytes of a request before its body
CONNECTIONS = 1024  # at a time; beyond them the answer is 503


class Protocol(HttpToolsProtocol):
    """HTTP that closes the connection of a client that sends no request or too large a head, or does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = 0
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_head = self.cycle is None or self.cycle.response_complete
        self._head = self._head + len(data) if is_head else 0
        if self._head > MOST_HEAD:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._deadline.cancel()
        super().resume_writing()

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


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
        app, http=Protocol, lifespan="on", log_level="warning", access_log=False, timeout_graceful_shutdown=grace,
        limit_concurrency=CONNECTIONS, server_header=False, proxy_headers=False,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again at its end
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # or a client that hangs up would end the server
    uvicorn.Server(config).run(sockets=[listening])
