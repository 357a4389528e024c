"""Events of the scheduler -> the choices and chunks of OpenAI's completions API."""

import codecs
import statistics
import time
import uuid
from typing import Any

import minigpt
from minigpt.generation.batch import NO_TOKEN_LEFT
from minigpt.serve.job import Event, Failed, PromptRead
from minigpt.serve.logprobs import Token
from minigpt.serve.protocol import CompletionRequest
from minigpt.serve.refusal import RefusalError
from minigpt.serve.scheduler import StoppedError
from minigpt.serve.service import Service

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class _Choice:
    """One text, as far as it is known."""

    def __init__(self) -> None:
        self.text, self.count, self.begun = "", 0, False
        self.end: str | None = None
        self.logprobs: list[float] = []  # of its own tokens, the prompt's not among them
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def offset(self, data: bytes) -> int:
        """Return where a token begins, in characters; each is given in turn."""
        at = self._offset
        self._offset += len(self._characters.decode(data))
        return at


class Answer:
    """The answer to one request, for the events so far."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[list[int]]) -> None:
        self.service, self.body, self.prompts = service, body, prompts
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.choices = [_Choice() for _ in range(len(prompts) * body.copies)]
        self.scored: dict[int, list[Token]] = {}

    def chunks(self, events: list[Event]) -> list[dict[str, Any]]:
        """Return what to stream after these events.

        Raises:
            RefusalError: if the request has failed.
        """
        found = []
        for event in events:
            for index, text, tokens, end in self._grown(event):
                reason = None if end is None else REASONS[end]
                chunk = self._head([self._choice(index, text, self._logprobs(index, tokens), reason)])
                found.append(chunk | ({"usage": None} if self._includes_usage else {}))
        return found

    @property
    def _includes_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return what ends a stream."""
        return [self._head([]) | {"usage": self._usage()}] if self._includes_usage else []

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """Return the answer to a request that is not streamed.

        Raises:
            RefusalError: if the request has failed.
        """
        logprobs: dict[int, list[Token]] = {index: [] for index in range(len(self.choices))}
        for event in events:
            for index, text, tokens, end in self._grown(event):
                choice = self.choices[index]
                choice.text += text
                choice.end = end or choice.end
                logprobs[index] += tokens
        copies, wanted = self.body.copies, self.body.choices
        found = []
        for prompt in range(len(self.prompts)):
            own = range(prompt * copies, (prompt + 1) * copies)
            best = sorted(own, key=self._likelihood, reverse=True)[:wanted] if copies > wanted else own
            found += [
                self._choice(
                    len(found) + place, self.choices[index].text, self._logprobs(index, logprobs[index]),
                    REASONS[self.choices[index].end or "length"],
                )
                for place, index in enumerate(best)
            ]  # fmt: skip
        return self._head(found) | {"usage": self._usage()}

    def _grown(self, event: Event) -> list[tuple[int, str, list[Token], str | None]]:
        """Return (index, text, tokens, end) of each text that an event adds to, the echo of its prompt included."""
        if isinstance(event, Failed):
            raise failure(event.error)
        if isinstance(event, PromptRead):
            self.scored[event.prompt] = event.tokens
            return []
        choice, text, tokens = self.choices[event.index], event.text, event.tokens
        prompt = event.index // self.body.copies
        choice.logprobs += [token.logprob for token in tokens if token.logprob is not None]
        if self.body.echo and not choice.begun:
            text, tokens = self._echo(prompt) + text, self.scored.get(prompt, []) + tokens
        choice.begun, choice.count = True, event.count
        return [(event.index, text, tokens, event.end)]

    def _echo(self, prompt: int) -> str:
        given = self.body.prompt
        if isinstance(given, str):
            return given
        text = given[prompt]
        return text if isinstance(text, str) else self.service.decode(self.prompts[prompt])

    def _likelihood(self, index: int) -> float:
        return statistics.fmean(self.choices[index].logprobs or [0.0])

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        choice, name = self.choices[index], self.service.token_text
        tops = []
        for token in tokens:
            if token.logprob is None:
                tops.append(None)
                continue
            top = {name(id): logprob for id, logprob in token.top[: self.body.logprobs]}
            tops.append(top | {name(token.id): token.logprob} if self.body.logprobs else top)
        return {
            "tokens": [name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": [choice.offset(self.service.token_bytes(token.id)) for token in tokens],
        }

    @staticmethod
    def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self.prompts)), sum(choice.count for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.body.model,
            "system_fingerprint": f"minigpt-{minigpt.__version__}", "choices": choices,
        }  # fmt: skip


def failure(error: BaseException) -> RefusalError:
    """Return how a client is told that its request failed while it was computed."""
    if isinstance(error, StoppedError):
        return RefusalError(503, str(error), code="shutting_down")
    if str(error) == NO_TOKEN_LEFT:
        return RefusalError(400, str(error))
    return RefusalError(500, f"the model failed: {type(error).__name__}: {str(error)[:500]}", code="model_failed")
