"""Turns the scheduler's events into answers of OpenAI's completions API."""

import codecs
import secrets
import statistics
import time
from typing import Any

import minigpt
from minigpt.serve.job import REASONS, Token, Written
from minigpt.serve.protocol import CompletionRequest
from minigpt.serve.service import Service


class _Choice:
    """One text, as far as it is known."""

    def __init__(self) -> None:
        self.total = 0  # tokens
        self.logprobs: list[float] = []  # of the new tokens
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def offset(self, data: bytes) -> int:
        """Return where a token begins, in characters. Call this once for each token, in order."""
        at = self._offset
        self._offset += len(self._characters.decode(data))
        return at


class Answer:
    """The answer to one request, for the events so far.

    Args:
        prompts: the ids of each prompt.
        scored: the tokens of each prompt with their log-probabilities, if the request wants them.
    """

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: list[list[int]], scored: dict[int, list[Token]]
    ) -> None:
        self.service, self.body, self.prompts, self.scored = service, body, prompts, scored
        self.choices = [_Choice() for _ in range(len(prompts) * body.copies)]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}", "object": "text_completion", "created": int(time.time()),
            "model": body.model, "system_fingerprint": f"minigpt-{minigpt.__version__}",
        }  # fmt: skip

    def chunks(self, events: list[Written]) -> list[dict[str, Any]]:
        """Return what to stream after these events."""
        usage = {"usage": None} if self.body.includes_usage else {}
        added = map(self._added, events)
        return [{**self._head, "choices": [self._choice(new.number, new)], **usage} for new in added]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return what ends a stream."""
        return [{**self._head, "choices": [], "usage": self._usage()}] if self.body.includes_usage else []

    def whole(self, events: list[Written]) -> dict[str, Any]:
        """Return the answer to a request that is not streamed, for all of its events, one for each text."""
        texts, copies = sorted(map(self._added, events)), self.body.copies
        best: list[Written] = []
        for first in range(0, len(texts), copies):
            own = texts[first : first + copies]
            if copies > self.body.choices:
                own.sort(key=lambda text: statistics.fmean(self.choices[text.number].logprobs or [0.0]), reverse=True)
            best += own[: self.body.choices]
        return {
            **self._head, "choices": [self._choice(place, text) for place, text in enumerate(best)],
            "usage": self._usage(),
        }  # fmt: skip

    def _added(self, new: Written) -> Written:
        """Return what an event adds to a text. The first addition starts with the prompt if this is to be echoed."""
        choice, prompt = self.choices[new.number], new.number // self.body.copies
        choice.logprobs += [token.logprob for token in new.tokens if token.logprob is not None]
        is_first, choice.total = choice.total == 0, new.total
        if is_first and self.body.echo:
            given = self.body.prompt if isinstance(self.body.prompt, str) else self.body.prompt[prompt]
            echo = given if isinstance(given, str) else self.service.tokenizer.decode(self.prompts[prompt])
            return new._replace(text=echo + new.text, tokens=self.scored.get(prompt, []) + new.tokens)
        return new

    def _choice(self, place: int, new: Written) -> dict[str, Any]:
        logprobs = None if self.body.logprobs is None else self._logprobs(self.choices[new.number], new.tokens)
        return {"index": place, "text": new.text, "logprobs": logprobs, "finish_reason": REASONS[new.end]}

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
        prompt, new = sum(map(len, self.prompts)), sum(choice.total for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
