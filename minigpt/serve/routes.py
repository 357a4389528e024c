"""The endpoints."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from minigpt.errors import GenerationError
from minigpt.generation import GenerationSettings
from minigpt.model import GPT2
from minigpt.serve import protocol
from minigpt.serve.guard import EVERY, Guard, LockOfLoop, origin_of
from minigpt.serve.jobs import Comparison, Job, RequestRow
from minigpt.serve.protocol import Answer, CompletionRequest, RefusalError, refusal_of, settings_of
from minigpt.serve.scheduler import Scheduler
from minigpt.tokenizer import Tokenizer
from minigpt.version import __version__

MAX_PROMPT_TOKENS = 16384  # tokens of a prompt of which the model sees the last ones
MAX_NUMBERS = 2**20  # numbers in one answer
LONG_PROMPT = 2000  # characters; longer texts are encoded in another thread, since that takes a while
PAGE_POLICY = "default-src 'none'; img-src data:; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # noqa: E501
PAGE_HEADERS = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
PAGE = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def build_app(
    endpoints: "Endpoints", api_key: str | None, allowed_hosts: Sequence[str] | None, allowed_origins: Sequence[str]
) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(scheduler.stop)

    scheduler = endpoints.scheduler
    origins = [origin_of(origin) for origin in allowed_origins]
    middleware = [Middleware(Guard, scheduler=scheduler, api_key=api_key, hosts=allowed_hosts, origins=origins)]
    if origins:  # first, so that the other pages can read errors too
        every = [EVERY]
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every, allow_private_network=True
        )
        middleware.insert(0, cors)
    errors: Any = dict.fromkeys((RequestValidationError, HTTPException, Exception), _refuse)
    app = FastAPI(
        title="minigpt",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers=errors,
    )
    app.state.scheduler = scheduler
    app.post("/v1/completions", response_model=None)(endpoints.completions)
    app.post("/compare", response_model=None)(endpoints.compare)
    app.post("/tokenize", response_model=None)(endpoints.tokenize)
    app.post("/detokenize", response_model=None)(endpoints.detokenize)
    app.get("/v1/models", response_model=None)(endpoints.list_models)
    app.get("/v1/models/{name:path}", response_model=None)(endpoints.show_model)
    app.get("/health", response_model=None)(endpoints.health)
    app.get("/metrics", response_model=None)(endpoints.metrics)
    for name, kind in PAGE.items():
        content = files("minigpt.serve").joinpath("page", name).read_bytes()
        page = Response(content, media_type=kind, headers=PAGE_HEADERS)
        app.router.routes.append(Route(f"/{name}".removesuffix("index.html"), page, methods=["GET"]))
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    response = refusal_of(error).response()
    response.headers.update(getattr(error, "headers", None) or {})  # the methods that a path takes
    return response


class Endpoints:
    """The answers of the server, a method for each path.

    Args:
        models: by their ids.
        tokenizer: of all models.
    """

    def __init__(self, models: Mapping[str, GPT2], tokenizer: Tokenizer, scheduler: Scheduler) -> None:
        self.models = models
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.started = int(time.time())
        self._reading = LockOfLoop()
        self.token_text = lru_cache(maxsize=2**16)(self._token_text)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        prompts = await self._prompts(self._model(body.model), body.prompt)
        job = self._job(body, prompts)
        answer = Answer(body, prompts, self.tokenizer, self.token_text)
        events = job.channel.receive(request)
        if not body.stream:
            whole = await answer.whole([event async for event in events])
            return Response(whole, media_type="application/json")

        async def chunks() -> AsyncIterator[bytes]:
            async for event in events:
                yield await answer.chunk(event)
            if body.stream_options.include_usage:
                yield answer.last_chunk()

        return await _stream(chunks())

    async def compare(self, body: protocol.CompareRequest, request: Request) -> Response:
        settings = settings_of(body)
        models = self._model(body.models[0], "models"), self._model(body.models[1], "models")
        (ids,) = await self._prompts(models[0], body.prompt)
        for model in models:
            _require_fits(model, ids, settings, slides=False)
        if settings.samples and settings.seed is None:  # both must draw alike
            settings = settings.replace(seed=secrets.randbelow(2**31))
        pair = self._row(models[0], ids, settings), self._row(models[1], ids, settings)
        comparison = Comparison(models, pair, body.alternatives, self.token_text)
        self.scheduler.submit(comparison, 1)

        async def chunks() -> AsyncIterator[bytes]:
            async for event in comparison.channel.receive(request):
                yield to_json(event)

        return await _stream(chunks())

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.show_model(name) for name in self.models]}

    async def show_model(self, name: str) -> dict[str, Any]:
        context = self._model(name).config.n_positions
        return {
            "id": name, "object": "model", "created": self.started, "owned_by": "minigpt", "max_model_len": context,
        }  # fmt: skip

    async def tokenize(self, body: protocol.TokenizeRequest) -> Response:
        model = self._model(body.model or next(iter(self.models)))
        (ids,) = await self._encode([body.prompt])
        fields = {"tokens": ids, "count": len(ids), "max_model_len": model.config.n_positions}
        return Response(to_json(fields), media_type="application/json")

    async def detokenize(self, body: protocol.DetokenizeRequest) -> dict[str, str]:
        self._model(body.model or next(iter(self.models)))
        return {"prompt": self.tokenizer.decode(body.tokens)}

    async def health(self) -> dict[str, str]:
        if not self.scheduler.is_alive:
            raise RefusalError(503, "the thread that computes has ended; start the server again", code="not_alive")
        return {"status": "ok"}

    async def metrics(self) -> Response:
        return Response(generate_latest(self.scheduler.meters.registry), media_type=CONTENT_TYPE_LATEST)

    def _model(self, name: str, argument: str = "model") -> GPT2:
        if name not in self.models:
            message = f"{name!r:.200} does not exist; this server has {', '.join(self.models)}"
            raise RefusalError(404, message, argument, "model_not_found")
        return self.models[name]

    async def _prompts(self, model: GPT2, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        """Return the ids of each prompt. An empty text becomes the end-of-text token, which starts a new document."""
        is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
        several: list[Any] = [prompt] if is_single else list(prompt)
        if isinstance(several[0], str):
            prompts = await self._encode(several)
        else:
            prompts = list(map(list[int], several))
        end = self.tokenizer.end_of_text_id
        vocabulary = model.config.used_vocab_size or model.config.vocab_size
        for ids in prompts:
            if not ids:
                if end is None:
                    raise RefusalError(400, "is empty, and the vocabulary has no end-of-text token", "prompt")
                ids.append(end)
            if max(ids) >= vocabulary or min(ids) < 0:
                raise RefusalError(400, f"must hold token ids within [0, {vocabulary})", "prompt")
        return prompts

    async def _encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts. Long ones are read in another thread, one request after the other."""
        if sum(map(len, texts)) >= LONG_PROMPT:
            encode = self.tokenizer.backend.encode_batch  # lets other threads run, unlike ``Tokenizer.encode``
            with suppress(Exception):  # ``Tokenizer.encode`` says why a text cannot be read
                async with self._reading.get():
                    return [encoding.ids for encoding in await asyncio.to_thread(encode, texts)]
        try:
            return [self.tokenizer.encode(text) for text in texts]
        except GenerationError as error:
            raise RefusalError(400, error.message, "prompt") from error

    def _job(self, body: CompletionRequest, prompts: list[list[int]]) -> Job:
        """Submit the texts of a request."""
        model = self._model(body.model)
        settings = settings_of(body)
        scores_prompt = body.echo and body.logprobs is not None
        for ids in prompts:
            _require_fits(model, ids, settings, slides=not scores_prompt)
        count = len(prompts) * body.n
        most = self.scheduler.max_queue
        if count > most:
            field = "n" if body.n > 1 else "prompt"
            raise RefusalError(400, f"asks for {count} texts, and a request may for {most}", field)
        read = sum(map(len, prompts))
        if body.logprobs is not None:
            scored = count * body.max_tokens
            if body.echo:
                scored += body.n * read
            _require_few_numbers(scored, body.logprobs)
        rows: list[RequestRow] = []
        for prompt, ids in enumerate(prompts):
            for number in range(body.n):
                rows.append(self._row(model, ids, settings, prompt, number, len(rows)))
        job = Job(body, rows)
        self.scheduler.submit(job, count, body.model)
        self.scheduler.meters.prompts.labels(body.model).inc(read)
        return job

    def _row(
        self, model: GPT2, ids: list[int], settings: GenerationSettings, prompt: int = 0, copy: int = 0, index: int = 0
    ) -> RequestRow:
        seed = settings.seed
        if seed is not None:
            seed += index
        return RequestRow(list(ids), settings, settings.end_ids(model), self.tokenizer, prompt, copy, seed)

    def _token_text(self, id: int) -> str:
        """Return the text of one token, or its bytes if they are not whole characters."""
        data = self.tokenizer.decode_bytes([id])
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _require_few_numbers(tokens: int, logprobs: int) -> None:
    """Check that the log-probabilities of so many tokens fit into an answer."""
    numbers = tokens * (logprobs + 1)
    if numbers > MAX_NUMBERS:
        message = f"of {tokens} tokens are {numbers} numbers, and an answer has at most {MAX_NUMBERS}"
        raise RefusalError(400, message, "logprobs")


def _require_fits(model: GPT2, ids: list[int], settings: GenerationSettings, slides: bool) -> None:
    context = model.config.n_positions
    new = settings.max_new_tokens
    may_slide = slides and settings.overflow == "slide"
    if len(ids) + new > context and not may_slide:
        message = f"has {len(ids)} tokens and {new} are to be written; this model's context is {context}"
        raise RefusalError(400, message, "prompt", "context_length_exceeded")
    if len(ids) > MAX_PROMPT_TOKENS:
        message = f"may have {MAX_PROMPT_TOKENS} tokens, got {len(ids)}"
        raise RefusalError(400, message, "prompt", "context_length_exceeded")
    settings.require_known_ids(model.config.vocab_size)


async def _stream(parts: AsyncIterator[bytes]) -> Response:
    """Return a stream of server-sent events. It starts when the first is known, so an early error has its status.

    Raises:
        RefusalError, ClientDisconnect: if the first part cannot be had.
    """
    first = await anext(parts)

    async def events() -> AsyncIterator[bytes]:
        with suppress(ClientDisconnect):
            try:
                yield b"data: %b\n\n" % first
                async for part in parts:
                    yield b"data: %b\n\n" % part
                yield b"data: [DONE]\n\n"
            except Exception as error:  # the status has been sent already
                yield refusal_of(error).event()

    return StreamingResponse(events(), media_type="text/event-stream", headers=STREAM_HEADERS)
