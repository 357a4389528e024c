"""The endpoints."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse

import minigpt
from minigpt.serve.comparison import Alternative, Compared
from minigpt.serve.completions import Answer, failure
from minigpt.serve.guard import Guard
from minigpt.serve.job import Failed
from minigpt.serve.protocol import CompareRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from minigpt.serve.refusal import RefusalError
from minigpt.serve.service import Service

Got = TypeVar("Got")
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PAGE_POLICY = "default-src 'none'; img-src data:; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # noqa: E501
NOT_OURS = {
    "/v1/chat/completions": "GPT-2 was trained on plain text and knows no chat; use /v1/completions",
    "/v1/embeddings": "this server does not make embeddings; use /v1/completions",
    "/v1/responses": "GPT-2 was trained on plain text and knows no chat; use /v1/completions",
}


class GoneError(Exception):
    """The client has hung up."""


def build(
    service: Service, *, api_key: str | None, allowed_hosts: Sequence[str] | None, allowed_origins: Sequence[str]
) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.scheduler.stop)

    middleware = [
        Middleware(Guard, meters=service.meters, api_key=api_key, hosts=allowed_hosts, origins=allowed_origins)
    ]
    if allowed_origins:
        every = ["*"]
        cors = Middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=every, allow_headers=every)
        middleware.append(cors)
    app = FastAPI(
        title="minigpt", version=minigpt.__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        middleware=middleware,
    )  # fmt: skip
    _add_errors(app)
    _add_completions(app, service)
    _add_compare(app, service)
    _add_information(app, service)
    _add_page(app)
    app.state.service = service
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model = service.model(body.model)
        body.check()
        prompts = await service.prompts(model, body.prompt)
        job = service.job(body, model, prompts)
        answer, channel = Answer(service, body, prompts), job.channel
        try:
            first = await _unless_gone(request, channel.receive())
            if not body.stream:
                return JSONResponse(answer.whole(first.events))
            chunks = answer.chunks(first.events)
        except BaseException:
            channel.cancel()
            raise

        async def pieces() -> AsyncIterator[str]:
            with channel:
                yield _sent(chunks)
                is_last = first.is_last
                while not is_last:
                    events, is_last = await channel.receive()
                    yield _sent(answer.chunks(events))
                yield _sent(answer.last_chunks()) + "data: [DONE]\n\n"

        return _stream(pieces())

    def refuse(path: str) -> None:
        async def refusing() -> Response:
            raise RefusalError(404, NOT_OURS[path], code="not_supported")

        app.add_api_route(path, refusing, methods=["POST"])

    for path in NOT_OURS:
        refuse(path)


def _add_compare(app: FastAPI, service: Service) -> None:
    @app.post("/compare")
    async def compare(body: CompareRequest, request: Request) -> Response:
        for name in body.models:
            service.model(name)
        comparison = await service.comparison(body)
        channel = comparison.channel
        try:
            first = await _unless_gone(request, channel.receive())
            _require_compared(first.events)
        except BaseException:
            channel.cancel()
            raise

        async def pieces() -> AsyncIterator[str]:
            with channel:
                post = first
                while True:
                    yield _sent(_compared(service, event) for event in _require_compared(post.events))
                    if post.is_last:
                        break
                    post = await channel.receive()
                yield "data: [DONE]\n\n"

        return _stream(pieces())


def _require_compared(events: list[Compared | Failed]) -> list[Compared]:
    found = []
    for event in events:
        if isinstance(event, Failed):
            raise failure(event.error)
        found.append(event)
    return found


def _compared(service: Service, event: Compared) -> dict[str, Any]:
    def shown(one: Alternative) -> dict[str, Any]:
        return {"id": one.id, "token": service.token_text(one.id), "probabilities": list(one.probabilities)}

    return {
        "side": event.side, "position": event.position, "text": event.text, "kl": event.kl,
        "chosen": shown(event.chosen), "alternatives": [shown(one) for one in event.alternatives],
        "finish_reason": {None: None, "length": "length"}.get(event.end, "stop"),
    }  # fmt: skip


def _add_information(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, Any]:
        context = service.model(name).config.n_positions
        made = {"object": "model", "created": service.started, "owned_by": "minigpt"}
        return {"id": name, **made, "max_model_len": context}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in service.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return described(name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        found = service.model(body.model if body.model is not None else next(iter(service.models)))
        ids = await service.encode(body.prompt) if body.prompt else []
        return {"tokens": ids, "count": len(ids), "max_model_len": found.config.n_positions}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        if body.model is not None:
            service.model(body.model)
        return {"prompt": service.decode(body.tokens)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.meters.text(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    folder = files("minigpt.serve").joinpath("page")

    def add(path: str, file: str, kind: str) -> None:
        content = folder.joinpath(file).read_text(encoding="utf-8")
        headers = {
            "Content-Security-Policy": PAGE_POLICY,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
        }

        async def page() -> Response:
            return Response(content, media_type=kind, headers=headers)

        app.add_api_route(path, page, methods=["GET"], include_in_schema=False)

    for path, (file, kind) in PAGE.items():
        add(path, file, kind)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RefusalError)
    async def refused(_: Request, error: RefusalError) -> Response:
        return error.response()

    @app.exception_handler(GoneError)
    async def gone(_: Request, error: GoneError) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> Response:
        said = {404: "there is no such path", 405: "this path does not take that method"}
        return RefusalError(error.status_code, said.get(error.status_code, str(error.detail))).response()

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return RefusalError(500, f"the server made a mistake: {type(error).__name__}").response()


def _invalid(error: RequestValidationError) -> RefusalError:
    """Return the refusal for the first of the errors in a body."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    field = where[0] if where else None
    if first["type"] == "json_invalid":
        return RefusalError(400, "the body of the request is not valid JSON")
    if field is None or first["type"] in ("model_attributes_type", "dict_type"):
        return RefusalError(400, "the body must be a JSON object, sent with 'Content-Type: application/json'")
    if first["type"] == "extra_forbidden":
        return RefusalError(400, f"the field {'.'.join(where)!r:.100} is not supported", ".".join(where)[:100])
    if first["type"] == "missing":
        return RefusalError(400, f"the field {field!r} is missing", field)
    said = first["msg"].removeprefix("Value error, ")
    said = said if said.startswith(f"{field} ") else f"{'.'.join(where)[:100]}: {said}"
    return RefusalError(400, said, field)


async def _unless_gone(request: Request, waiting: Awaitable[Got]) -> Got:
    """Wait for something, but no longer than the client does.

    Raises:
        GoneError: if the client has hung up.
    """
    result = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise GoneError
        return result.result()
    finally:
        result.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sent(chunks: Iterable[dict[str, Any]]) -> str:
    """Chunks as server-sent events."""
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)


def _stream(pieces: AsyncIterator[str]) -> StreamingResponse:
    async def with_errors() -> AsyncIterator[str]:
        try:
            async for piece in pieces:
                if piece:
                    yield piece
        except RefusalError as error:  # the status has been sent already
            yield _sent([error.to_dict()])

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(with_errors(), media_type="text/event-stream", headers=headers)
