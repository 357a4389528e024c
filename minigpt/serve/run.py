"""The application on a socket, until a signal ends it."""

import asyncio
import ipaddress
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from minigpt.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

REQUEST_SECONDS = 30  # for a new connection to send the head of its first request
READ_SECONDS = 30  # for a client to read some of what has been sent
SWITCH_SECONDS = 1e-4  # a step lets go of Python's lock at each of its operations, and must soon have it back
CONNECTIONS = 1024  # at a time; beyond them the answer is 503


class Protocol(H11Protocol):
    """HTTP that closes the connection of a client that sends no request, or does not read the answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

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
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}") from error
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in found)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one.

    Raises:
        ConfigError: if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {said}") from error


def run(app: "ASGIApp", listening: socket.socket, grace: int) -> None:
    """Serve until SIGTERM or SIGINT; then accept no more, and let what is being written finish within ``grace`` s."""
    config = uvicorn.Config(
        app, http=Protocol, lifespan="on", log_level="warning", access_log=False, timeout_graceful_shutdown=grace,
        limit_concurrency=CONNECTIONS, server_header=False, proxy_headers=False,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # which uvicorn raises again at its end
    sys.setswitchinterval(SWITCH_SECONDS)
    uvicorn.Server(config).run(sockets=[listening])
