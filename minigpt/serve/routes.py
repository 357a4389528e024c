"""The endpoints."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import minigpt
from minigpt.serve.completions import Answer
from minigpt.serve.guard import Guard
from minigpt.serve.protocol import CompareRequest, CompletionRequest, DetokenizeRequest, RefusalError, TokenizeRequest
from minigpt.serve.service import Service

NO_JSON = "the body must be a JSON object in UTF-8, sent with 'Content-Type: application/json'"
NO_PATH = "there is no such path; GPT-2 was trained on plain text, not on chats, so use /v1/completions"
PAGE_POLICY = "default-src 'none'; img-src data:; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # noqa: E501
PAGE_HEADERS = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}


def build(
    service: Service, *, api_key: str | None, allowed_hosts: Sequence[str] | None, allowed_origins: Sequence[str]
) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.scheduler.stop)

    meters, every = service.scheduler.meters, ["*"]
    middleware = [Middleware(Guard, meters=meters, api_key=api_key, hosts=allowed_hosts, origins=allowed_origins)]
    if allowed_origins:  # first, so that the other pages can read errors too
        cors = Middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=every, allow_headers=every)
        middleware.insert(0, cors)
    app = FastAPI(
        title="minigpt", version=minigpt.__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        middleware=middleware,
    )  # fmt: skip
    app.state.service = service
    _add_errors(app)
    _add_texts(app, service)
    _add_information(app, service)
    folder = files("minigpt.serve").joinpath("page")
    for path, kind in {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}.items():
        page = Response(folder.joinpath(path).read_bytes(), media_type=kind, headers=PAGE_HEADERS)
        app.router.routes.append(Route(f"/{path}".removesuffix("index.html"), page, methods=["GET"]))
    return app


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model = service.model(body.model)
        prompts = await service.prompts(model, body.prompt)
        job = service.job(body, model, prompts)
        answer, reports = Answer(service, body, prompts, job.scored), job.channel.receive(request)
        if not body.stream:
            whole = answer.whole([event async for events in reports for event in events])
            return Response(to_json(whole), media_type="application/json")

        async def chunks() -> AsyncIterator[list[dict[str, Any]]]:
            async for events in reports:
                yield answer.chunks(events)
            yield answer.last_chunks()

        return await _stream(chunks())

    @app.post("/compare")
    async def compare(body: CompareRequest, request: Request) -> Response:
        return await _stream((await service.comparison(body)).channel.receive(request))


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
        return {"prompt": service.tokenizer.decode(body.tokens)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.scheduler.meters.registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> Response:
        said = {400: NO_JSON, 404: NO_PATH, 405: "this path does not take that method"}
        return RefusalError(error.status_code, said.get(error.status_code, str(error.detail))).response()

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return RefusalError(500, f"the server made a mistake: {type(error).__name__}").response()


def _invalid(error: RequestValidationError) -> RefusalError:
    """Return the refusal for the first of the errors in a body."""
    first = error.errors()[0]
    where, said = [str(part) for part in first["loc"][1:]], first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":  # a check of ours, which names the field
        return RefusalError(400, said, said.partition(" ")[0])
    if not where or first["type"] == "json_invalid":
        return RefusalError(400, NO_JSON)
    return RefusalError(400, f"{'.'.join(where)[:100]}: {said}", where[0][:100])


async def _stream(parts: AsyncIterator[list[dict[str, Any]]]) -> Response:
    """Return a stream of server-sent events. It starts when the first part is known, so an early error has its status.

    Raises:
        RefusalError, ClientDisconnect: if the first part cannot be had.
    """
    first = await anext(parts)

    async def pieces() -> AsyncIterator[bytes]:
        with suppress(ClientDisconnect):
            try:
                yield _sent(first)
                async for part in parts:
                    yield _sent(part)
                yield b"data: [DONE]\n\n"
            except RefusalError as error:  # the status has been sent already
                yield _sent([error.to_dict()])

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(pieces(), media_type="text/event-stream", headers=headers)


def _sent(chunks: list[dict[str, Any]]) -> bytes:
    """Return chunks as server-sent events."""
    return b"".join(b"data: %b\n\n" % to_json(chunk) for chunk in chunks)
