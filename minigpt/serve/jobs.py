"""The scheduler's work for one request, and the way of its events to the client's coroutine.

R rows, V vocabulary.
"""

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.generation.batch import Batch, Piece
from minigpt.generation.choosing import NoTokenLeftError, next_tokens
from minigpt.generation.row import Row
from minigpt.model import GPT2
from minigpt.serve.protocol import REASONS, CompletionRequest, RefusalError, TextEvent, Token

LOWEST_LOGPROB = -9999.0  # log-probability instead of -inf, which JSON does not have
NOT_NUMBERS = "the model's logits are NaN or infinite; its weights, norms or dtype cannot compute this text"


class EventChannel:
    """Events for one client. Create it in the client's coroutine.

    Attributes:
        disconnected: no one receives any more, so no more work is to be done.
        opened: when the request came, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.opened = time.monotonic()
        self.disconnected = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Any, bool]] = asyncio.Queue()

    def send(self, event: object, is_last: bool) -> None:
        """Add an event. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed, so no one is waiting
            self._loop.call_soon_threadsafe(self._events.put_nowait, (event, is_last))

    def fail(self, error: BaseException) -> None:
        """End with an error of client, server or model. Any thread may call this, and the first error counts."""
        if self.disconnected:
            return
        self.disconnected = True
        if not isinstance(error, RefusalError | ClientDisconnect | NoTokenLeftError):
            message = f"the model failed: {type(error).__name__}: {str(error)[:500]}"
            error = RefusalError(500, message, code="model_failed")
        self.send(error, True)

    async def receive(self, request: Request) -> AsyncIterator[Any]:
        """Yield the events until the last.

        Raises:
            ClientDisconnect: if the client hangs up.
            RefusalError, NoTokenLeftError: if the request has failed.
        """
        watch = asyncio.create_task(self._watch(request))
        is_last = False
        try:
            while not is_last:
                event, is_last = await self._events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.disconnected = True
            watch.cancel()

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientDisconnect())


class PlainCodec:
    """A tokenizer whose text leaves out special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = tokenizer.encode
        self.decode_bytes = partial(tokenizer.decode_bytes, skip_special_tokens=True)


@dataclasses.dataclass(eq=False)
class RequestRow(Row):
    """One of a request's texts.

    Attributes:
        job: the request, which ``join`` sets.
        index: its number among the request's texts.
        tokens: those that the next event reports, if the request wants log-probabilities.
        is_read: its text is read to the end.
    """

    job: "Job" = dataclasses.field(init=False, repr=False)
    index: int = 0
    tokens: list[Token] = dataclasses.field(default_factory=list)
    is_read: bool = False

    def join(self, job: "Job", index: int) -> None:
        """Become the text of this number of a request, and report what it asks for."""
        self.job = job
        self.index = index
        if job.body.skip_special_tokens and self.tokenizer is not None:
            self.tokenizer = PlainCodec(self.tokenizer)
        if job.body.logprobs is None:
            return
        self.may_draft = False  # log-probabilities need the logits of each token
        if job.body.echo:
            self.scores_prompt = True
            self.tokens = [Token(self.ids[0], None, [])]

    @property
    def is_wanted(self) -> bool:
        """True while somebody receives the text."""
        return not self.job.channel.disconnected

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        self.job.channel.fail(error)


class Job:
    """A request for texts.

    Args:
        rows: all that are to be written; the texts of a prompt are side by side.

    Attributes:
        waiting: texts that have no place yet.
    """

    def __init__(self, body: CompletionRequest, rows: list[RequestRow]) -> None:
        self.body = body
        self.channel = EventChannel()
        self.waiting = deque(rows)
        self._unfinished = len(rows)
        for index, row in enumerate(rows):
            row.join(self, index)

    @property
    def count_waiting(self) -> int:
        """The number of texts that wait for a place: 0 as soon as the client has gone."""
        return 0 if self.channel.disconnected else len(self.waiting)

    def report(self, row: RequestRow) -> None:
        """Send what a text has added since the last report."""
        if row.end is not None:
            self._unfinished -= 1
        total = len(row.ids) - row.prompt_length
        event = TextEvent(row.index, row.take_text(), total, row.tokens, row.end)
        self.channel.send(event, not self._unfinished)
        row.tokens = []


@torch.inference_mode()
def tokens_of(model: GPT2, logits: Float[Tensor, "rows vocab"], ids: list[int], alternatives: int) -> list[Token]:
    """Return the token ``ids[i]`` of each row with its log-probability and the row's likeliest ``alternatives``.

    Probabilities are over all of the model's logits, also of ids that pad the vocabulary.
    """
    logprobs = logits.float().log_softmax(-1).clamp_min(LOWEST_LOGPROB)  # (R, V)
    chosen = logprobs.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0].tolist()
    named = logprobs[:, : model.config.used_vocab_size]  # those that have a text
    likeliest = named.topk(min(alternatives, named.shape[-1]))
    values = likeliest.values.tolist()
    indices = likeliest.indices.tolist()
    tokens: list[Token] = []
    for row, (id, logprob) in enumerate(zip(ids, chosen, strict=True)):
        top = list(zip(indices[row], values[row], strict=True))
        tokens.append(Token(id, logprob, top))
    return tokens


class Comparison:
    """A request to compare two models.

    Both continue the same prompt and score each other's text, so every position has both distributions.

    Args:
        models: the two.
        rows: the text of each, both with the same prompt.
        alternatives: how many of the likeliest tokens by each model to report.
        token_text: returns the text of a token.
    """

    def __init__(
        self, models: tuple[GPT2, GPT2], rows: tuple[Row, Row], alternatives: int, token_text: Callable[[int], str]
    ) -> None:
        self.models = models
        self.rows = rows
        self.alternatives = alternatives
        self.token_text = token_text
        self.channel = EventChannel()
        self.is_over = False
        self._batches: list[Batch] = []

    def step(self, budget: int) -> None:
        """Read up to ``budget`` tokens of the prompt, or add a token to each text that is not over; report tokens."""
        if not self._batches:
            self._batches = self._new_batches()
        pieces: list[Piece] = []
        for batch in self._batches:
            pieces += batch.read(budget)
        events: list[dict[str, Any]] = []
        for side, row in enumerate(self.rows):
            logits = [piece.logits for piece in pieces if piece.is_whole and piece.row is row]  # of both models
            if logits:
                events.append(self._event(side, row, logits))
        ended = [row for row in self.rows if row.end]
        for batch in self._batches:
            batch.drop(ended)
        self.is_over = len(ended) == len(self.rows)
        for event in events:
            self.channel.send(event, self.is_over and event is events[-1])

    def _new_batches(self) -> list[Batch]:
        """Return a batch for each model, with both texts."""
        columns = len(self.rows[0].ids) + self.rows[0].settings.max_new_tokens
        batches: list[Batch] = []
        for model in self.models:
            batch = Batch(model, 2, columns)
            batch.add(self.rows)
            batches.append(batch)
        return batches

    @torch.inference_mode()
    def _event(self, side: int, row: Row, logits: list[Float[Tensor, "1 vocab"]]) -> dict[str, Any]:
        """Add a token to a text; return the event, as the client gets it.

        Its ``kl`` is the Kullback-Leibler divergence of the second model's distribution from the first's, in nats.
        """
        (token,) = next_tokens(self.models[side], logits[side], [row])
        position = len(row.new_ids)
        row.push(token)
        pair = torch.cat([of_model.cpu() for of_model in logits]).double()  # (2, V)
        both = pair.log_softmax(-1).clamp_min(LOWEST_LOGPROB)
        probabilities = both.exp()
        kl = float((probabilities[0] * (both[0] - both[1])).sum())
        if math.isnan(kl):
            raise GenerationError(NOT_NUMBERS)
        named = probabilities[:, : self.models[0].config.used_vocab_size]
        likeliest = named.topk(self.alternatives).indices.T.flatten().tolist()  # of both models, in turn

        def shown(id: int) -> dict[str, Any]:
            return {"id": id, "token": self.token_text(id), "probabilities": probabilities[:, id].tolist()}

        alternatives = [shown(id) for id in dict.fromkeys(likeliest)]
        alternatives.sort(key=lambda one: -sum(one["probabilities"]))
        return {
            "side": side,
            "position": position,
            "text": row.take_text(),
            "kl": max(kl, 0.0),
            "chosen": shown(token),
            "alternatives": alternatives,
            "finish_reason": REASONS[row.end],
        }
