"""Checks of a request before it reaches an endpoint: who sends it, and how large it is."""

import asyncio
import hmac
import re
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minigpt.errors import ConfigError, MiniGPTError
from minigpt.serve.protocol import RefusalError, refusal_of
from minigpt.serve.scheduler import Scheduler

MAX_BODY = 2**20  # bytes of a request
SHARE = 0.5  # of the time that requests may take while texts are written
OPEN = ("/health", "/", "/page.css", "/page.js")  # paths that need no key
ONCE = ("host", "origin", "authorization")  # a proxy might read another one than this server does
EVERY = "*"  # as an allowed host or origin
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")
USUAL_PORTS = {"http://": ":80", "https://": ":443"}  # which browsers leave out
HUNG_UP = 499  # status, in the metrics, of a request whose client has hung up


class LockOfLoop:
    """One ``asyncio.Lock`` for each event loop: a lock stays with the first loop in which a task had to wait.

    A server has one loop. Programs that ask an application in their own process often run one loop after the other.
    """

    def __init__(self) -> None:
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def get(self) -> asyncio.Lock:
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())


class Guard:
    """ASGI middleware that checks who sends a request, and limits the size of its body.

    It answers with the error object of every error about input that a check or an endpoint raises, also when the server
    shuts down and cancels the request. It answers HEAD as GET, without the body.

    The Host header must be known, so that a web page cannot reach the server by a name that it controls (DNS
    rebinding). The Origin header must be the server's own or allowed, so that other pages cannot use the server.
    """

    def __init__(
        self, app: ASGIApp, *, scheduler: Scheduler, api_key: str | None, hosts: Sequence[str] | None,
        origins: Sequence[str],
    ) -> None:  # fmt: skip
        self.app = app
        self.scheduler = scheduler
        self.api_key = None if api_key is None else api_key.encode()
        self.hosts = None if hosts is None or EVERY in hosts else set(map(name_in_host, hosts))
        self.origins = set(origins)
        self._turns = LockOfLoop()
        self._newest = 0.0  # when the newest request began, by time.monotonic
        self._busy_before = 0.0  # seconds of processor time of this thread until then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        status = HUNG_UP
        is_sent = False
        is_head = scope["method"] == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}

        async def noted(message: Message) -> None:
            nonlocal status, is_sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            else:
                is_sent = not message.get("more_body", False)
                if is_head:
                    message["body"] = b""
            await send(message)

        try:
            self._check(scope)
            body = await _whole_body(receive)
            await self._wait_for_turn()
            await self.app(scope, _receiving(body, receive), noted)
        except (MiniGPTError, asyncio.CancelledError) as error:  # cancelled: the server does not wait any longer
            if status == HUNG_UP:
                await refusal_of(error).response()(scope, receive, noted)
            elif not is_sent:
                await noted({"type": "http.response.body", "body": refusal_of(error).event()})
            if isinstance(error, asyncio.CancelledError):
                raise
        except ClientDisconnect:
            pass  # no one reads an answer
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.scheduler.meters.responses.labels(path, str(status)).inc()
            self.scheduler.meters.seconds.labels(path).observe(time.monotonic() - began)

    async def _wait_for_turn(self) -> None:
        """While texts are written, begin so late that the requests' thread is busy for at most SHARE of the time.

        The thread that computes needs Python's lock at every operation, and a busy thread keeps it for milliseconds.
        """
        async with self._turns.get():
            if self.scheduler.count_writing:
                busy = time.thread_time() - self._busy_before
                elapsed = time.monotonic() - self._newest
                await asyncio.sleep(busy / SHARE - elapsed)
            self._newest = time.monotonic()
            self._busy_before = time.thread_time()

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        for name in ONCE:
            if len(headers.getlist(name)) > 1:
                raise RefusalError(400, f"a request may have one {name} header, got {len(headers.getlist(name))}")
        host = headers.get("host", "").lower()
        if self.hosts is not None and name_in_host(host) not in self.hosts:
            message = f"the Host header is {host!r:.100}, and this server answers to {', '.join(sorted(self.hosts))}"
            raise RefusalError(403, message, code="host_not_allowed")
        origin = headers.get("origin", "").lower()
        is_own = origin in ("", f"http://{host}", f"https://{host}")
        if not is_own and self.origins.isdisjoint((origin, EVERY)):
            message = f"pages of {origin!r:.100} may not use this server; start it with --allow-origin to permit them"
            raise RefusalError(403, message, code="origin_not_allowed")
        if self.api_key is None or scope["path"] in OPEN:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip(" ").encode("latin-1"), self.api_key)
        if scheme.lower() != "bearer" or not is_right:
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise RefusalError(401, message, code="invalid_api_key")


def name_in_host(host: str) -> str:
    """Return the name or address in a Host header, or in an option, as ``Guard`` compares it.

    A port is left out. An address of IPv6 has colons of its own, so brackets are around it.
    """
    name = host.lower()
    if name.count(":") > 1 and not name.startswith("["):
        return f"[{name}]"
    if name.endswith("]"):
        return name
    return name.rpartition(":")[0] or name


def origin_of(origin: str) -> str:
    """Return an origin that may call the server, as browsers write it in an Origin header.

    Raises:
        ConfigError: if it is no origin.
    """
    name = origin.lower().rstrip("/")
    if name not in (EVERY, "null") and not ORIGIN.fullmatch(name):
        message = f"must be '{EVERY}', or a scheme and a host as https://example.org, got {origin!r}"
        raise ConfigError(message, argument="allowed_origins")
    for scheme, port in USUAL_PORTS.items():
        if name.startswith(scheme):
            name = name.removesuffix(port)
    return name


async def _whole_body(receive: Receive) -> bytes:
    """Wait for the whole body, and return it.

    A body that is too large is read and dropped, since a client reads the answer after it has sent.

    Raises:
        RefusalError: if it is too large.
    """
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        part = message.get("body", b"")
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
    if size > MAX_BODY:
        raise RefusalError(413, f"the body of a request may have at most {MAX_BODY} bytes", code="too_large")
    return b"".join(parts)


def _receiving(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that begins with this body."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        if waiting:
            return waiting.pop()
        return await receive()

    return next_message
