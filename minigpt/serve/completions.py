"""Turns the scheduler's events into answers of OpenAI's completions API."""

import codecs
import dataclasses
import secrets
import statistics
import time
from typing import Any

import minigpt
from minigpt.generation.choosing import NO_TOKEN_LEFT
from minigpt.serve.job import Event, Failed, PromptRead, Written
from minigpt.serve.logprobs import Token
from minigpt.serve.protocol import CompletionRequest
from minigpt.serve.refusal import RefusalError
from minigpt.serve.service import Service

REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}  # Row.end -> finish_reason


class _Choice:
    """One text, as far as it is known."""

    def __init__(self) -> None:
        self.text, self.count = "", 0
        self.tokens: list[Token] = []  # the prompt's too, if it is echoed
        self.logprobs: list[float] = []  # of the new tokens
        self.end: str | None = None
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def offset(self, data: bytes) -> int:
        """Return where a token begins, in characters. Call this once for each token, in order."""
        at = self._offset
        self._offset += len(self._characters.decode(data))
        return at


class Answer:
    """The answer to one request, for the events so far."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[list[int]]) -> None:
        self.service, self.body, self.prompts = service, body, prompts
        self.choices = [_Choice() for _ in range(len(prompts) * body.copies)]
        self.scored: dict[int, list[Token]] = {}
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}", "object": "text_completion", "created": int(time.time()),
            "model": body.model, "system_fingerprint": f"minigpt-{minigpt.__version__}",
        }  # fmt: skip

    def chunks(self, events: list[Event]) -> list[dict[str, Any]]:
        """Return what to stream after these events.

        Raises:
            RefusalError: if the request has failed.
        """
        usage = {"usage": None} if self._includes_usage else {}
        return [
            {**self._head, "choices": [self._choice(new.index, new.index, new.text, new.tokens, new.end)], **usage}
            for event in events
            if (new := self._added(event)) is not None
        ]

    @property
    def _includes_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return what ends a stream."""
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._includes_usage else []

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """Return the answer to a request that is not streamed, for all of its events.

        Raises:
            RefusalError: if the request has failed.
        """
        for event in events:
            if (new := self._added(event)) is not None:
                choice = self.choices[new.index]
                choice.text, choice.tokens, choice.end = choice.text + new.text, choice.tokens + new.tokens, new.end
        copies, returned = self.body.copies, []
        for first in range(0, len(self.choices), copies):
            own = range(first, first + copies)
            returned += own if copies == self.body.choices else self._likeliest(own)
        choices = [
            self._choice(place, index, self.choices[index].text, self.choices[index].tokens, self.choices[index].end)
            for place, index in enumerate(returned)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _added(self, event: Event) -> Written | None:
        """Return what an event adds to a text. The first addition starts with the prompt if this is to be echoed."""
        if isinstance(event, Failed):
            raise failure(event.error)
        if isinstance(event, PromptRead):
            self.scored[event.prompt] = event.tokens
            return None
        choice, prompt = self.choices[event.index], event.index // self.body.copies
        choice.logprobs += [token.logprob for token in event.tokens if token.logprob is not None]
        is_first, choice.count = choice.count == 0, event.count
        if is_first and self.body.echo:
            tokens = self.scored.get(prompt, []) + event.tokens
            return dataclasses.replace(event, text=self._echo(prompt) + event.text, tokens=tokens)
        return event

    def _echo(self, prompt: int) -> str:
        given = self.body.prompt
        if isinstance(given, str):
            return given
        text = given[prompt]
        return text if isinstance(text, str) else self.service.decode(self.prompts[prompt])

    def _likeliest(self, indices: range) -> list[int]:
        def mean(index: int) -> float:
            return statistics.fmean(self.choices[index].logprobs or [0.0])

        return sorted(indices, key=mean, reverse=True)[: self.body.choices]

    def _choice(self, place: int, index: int, text: str, tokens: list[Token], end: str | None) -> dict[str, Any]:
        logprobs = None if self.body.logprobs is None else self._logprobs(self.choices[index], tokens)
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": REASONS[end]}

    def _logprobs(self, choice: _Choice, tokens: list[Token]) -> dict[str, Any]:
        name, asked = self.service.token_text, self.body.logprobs

        def top(token: Token) -> dict[str, float] | None:
            if token.logprob is None:
                return None
            found = {name(id): logprob for id, logprob in token.top[:asked]}
            return found | {name(token.id): token.logprob} if asked else found

        return {
            "tokens": [name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [top(token) for token in tokens],
            "text_offset": [choice.offset(self.service.token_bytes(token.id)) for token in tokens],
        }

    def _usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self.prompts)), sum(choice.count for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def failure(error: BaseException) -> RefusalError:
    """Return the error that a client gets if its request failed while it was computed."""
    if isinstance(error, RefusalError):
        return error
    if str(error) == NO_TOKEN_LEFT:
        return RefusalError(400, str(error))
    return RefusalError(500, f"the model failed: {type(error).__name__}: {str(error)[:500]}", code="model_failed")
