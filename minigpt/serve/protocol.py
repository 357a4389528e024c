"""The protocol of clients: the bodies of requests, answers and errors, as OpenAI's completions API has them."""

import asyncio
import codecs
import re
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minigpt.errors import MiniGPTError
from minigpt.generation import GenerationSettings, parse_settings
from minigpt.generation.settings import HTTP, SETTINGS, check_value
from minigpt.tokenizer import Tokenizer
from minigpt.version import __version__

TOKENS_AT_ONCE = 4  # whose log-probabilities are collected before other requests and the computing thread get a turn
REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}  # Row.end -> finish_reason
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}  # by status
NOT_JSON = "the body must be a JSON object in UTF-8, sent with 'Content-Type: application/json'"
MESSAGES = {  # of the framework's errors, by status
    400: NOT_JSON,
    404: "this server does not have this path; POST /v1/completions writes texts",
    405: "this path does not take this method",
}
BODY_MESSAGES = {  # of pydantic's errors, by their type and by the field
    "missing": "is missing",
    "extra_forbidden": "is not a field of this request, or only with the value that changes nothing",
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of such lists",
}


class RefusalError(MiniGPTError):
    """The error that a client gets as the answer to its request.

    Args:
        status: the HTTP status.
        message: what is wrong and what would be right; with ``argument`` the rest of the sentence after its name.
        argument: the field that is wrong.
        code: a word that programs can test for.
    """

    def __init__(self, status: int, message: str, argument: str | None = None, code: str | None = None) -> None:
        super().__init__(message, argument=argument)
        self.status, self.code = status, code

    def encoded(self) -> bytes:
        """Return the error object as JSON."""
        kind = "server_error"
        if self.status < 500:
            kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return to_json({"error": {"message": str(self), "type": kind, "param": self.argument, "code": self.code}})

    def event(self) -> bytes:
        """Return the error object as the last event of a stream."""
        return b"data: %b\n\n" % self.encoded()

    def response(self) -> Response:
        return Response(self.encoded(), self.status, HEADERS.get(self.status), "application/json")


def shutting_down() -> RefusalError:
    return RefusalError(503, "the server is shutting down", code="shutting_down")


def refusal_of(error: BaseException) -> RefusalError:
    """Return the error that a client gets for an error that a check, an endpoint or the model has raised."""
    match error:
        case RefusalError():
            return error
        case MiniGPTError():  # its argument is named as in Python
            field = error.argument
            if field == "max_new_tokens":
                field = "max_tokens"
            return RefusalError(400, error.message, field)
        case RequestValidationError():
            return _refusal_of_body(error)
        case HTTPException():
            return RefusalError(error.status_code, MESSAGES.get(error.status_code, str(error.detail)))
        case asyncio.CancelledError():
            return shutting_down()
        case _:
            return RefusalError(500, f"the server made a mistake: {type(error).__name__}")


def _refusal_of_body(error: RequestValidationError) -> RefusalError:
    """Return the error about the first mistake that pydantic has found in a body."""
    first = error.errors()[0]
    refusal = first.get("ctx", {}).get("error")
    if isinstance(refusal, MiniGPTError):  # of a rule of the settings
        return refusal_of(refusal)
    _, *place = first["loc"]
    if not place:
        return RefusalError(400, NOT_JSON)
    field = place[0]
    if first["type"] == "extra_forbidden":
        field = place[-1]
    if not isinstance(field, str):
        return RefusalError(400, NOT_JSON)
    message = BODY_MESSAGES.get(first["type"]) or BODY_MESSAGES.get(field)
    if message is None:
        needs = re.sub(r"^\w+ should", "must", first["msg"])
        message = f"{needs}, got {first['input']!r:.100}"
    return RefusalError(400, message, field[:64])


def rule_first(name: str) -> BeforeValidator:
    """Return the check of a setting of generation by its rule for HTTP, before pydantic checks the type.

    The rule limits how much there is to check, and its message says what a value needs.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict):  # of logit_bias
            value = _with_ids(value)
        check_value(name, value, HTTP)
        return value

    return BeforeValidator(check)


def _with_ids(biases: dict[str, Any]) -> dict[str | int, Any]:
    """Return a map whose keys are numbers where they say one: in JSON all keys are strings."""
    numbered: dict[str | int, Any] = {}
    for key, number in biases.items():
        is_id = key.isdecimal() and len(key) < 20
        numbered[int(key) if is_id else key] = number
    return numbered


# Fields of OpenAI's and vLLM's completions that this server does not have, with the values that ask for what it does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "top_k": (-1,), "use_beam_search": (False,), "length_penalty": (1,), "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,), "add_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "return_token_strs": (False,),
    "response_format": ({"type": "text"},), "bad_words": ([],), "detokenize": (True,), "priority": (0,),
}  # fmt: skip


class Body(BaseModel):
    """A body of JSON. It has no other fields. Those that are null or NEUTRAL are left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            if value is not None and value not in NEUTRAL.get(name, ()):
                kept[name] = value
        if kept.get("best_of") == kept.get("n", 1):  # the best n of n texts are all of them
            kept.pop("best_of", None)
        return kept


_SETTINGS: dict[str, Any] = {}
for _name, _setting in SETTINGS.items():
    if HTTP in _setting.users and _name != "max_new_tokens":  # max_tokens, with a default for each path
        _kind = Annotated[_setting.type, rule_first(_name)]
        _SETTINGS[_name] = (_kind, Field(None, description=_setting.about))
_SETTINGS["min_tokens"] = _SETTINGS["min_new_tokens"]  # vLLM's name
_SETTINGS["ignore_eos"] = (bool, Field(False, description="Let no eos_token_id end a text."))
Sampling = create_model("Sampling", __base__=Body, **_SETTINGS)


def settings_of(body: Any) -> GenerationSettings:
    """Return the settings of a body of ``Sampling``, without those that have no effect at temperature 0.

    Raises:
        MiniGPTError: if they contradict each other.
    """
    samples = body.temperature != 0
    settings: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value = getattr(body, name, None)
        has_effect = samples or not setting.shapes_draw
        if value is not None and has_effect:
            settings[name] = value
    if body.min_tokens is not None:
        if body.min_tokens > body.max_tokens:
            message = f"must be at most {body.max_tokens}, as max_tokens, got {body.min_tokens}"
            raise RefusalError(400, message, "min_tokens")
        settings["min_new_tokens"] = body.min_tokens
    if body.ignore_eos:
        settings["eos_token_id"] = []
    settings["do_sample"] = samples
    settings["max_new_tokens"] = max(1, body.max_tokens)
    valid: GenerationSettings = parse_settings(**settings)
    return valid.with_new_tokens(body.max_tokens)  # 0: the prompt is read, and nothing is added


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


Several = Field(min_length=1, fail_fast=True)
SeveralPrompts = Annotated[list[str], Several] | Annotated[list[int], Several] | Annotated[list[list[int]], Several]


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``."""

    model: str
    prompt: str | SeveralPrompts = ""
    max_tokens: Annotated[int, rule_first("max_new_tokens")] = Field(
        16, description="Tokens of each text; 0 only reads the prompts."
    )
    n: int = Field(1, ge=1, le=128, description="Texts for each prompt.")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: int | None = Field(
        None, ge=0, le=100, description="How many of the likeliest tokens to report at each token."
    )
    echo: bool = Field(False, description="Let the text begin with the prompt.")
    skip_special_tokens: bool = Field(False, description="Leave special tokens out of texts, as <|endoftext|>.")
    user: str = ""


class CompareRequest(Sampling):
    """The body of ``POST /compare``: two models write on from one prompt."""

    models: list[str] = Field(min_length=2, max_length=2)
    prompt: str = ""
    max_tokens: int = Field(64, ge=1, le=65536, description="Tokens of each text.")
    alternatives: int = Field(5, ge=1, le=20, description="How many of each model's likeliest tokens to report.")


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``."""

    model: str | None = None
    prompt: str


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


class Token(NamedTuple):
    """A token of a prompt or of a completion, with the model's own log-probabilities.

    Attributes:
        logprob: natural logarithm of its probability; None for the first token of a prompt, which has no context.
        top: the likeliest ids at its position with their log-probabilities, the likeliest first.
    """

    id: int
    logprob: float | None
    top: list[tuple[int, float]]


class TextEvent(NamedTuple):
    """A text has grown.

    Attributes:
        number: the text's number in the request.
        text: the characters that can be shown since the last event.
        total: the number of new tokens so far.
        tokens: the tokens since the last event, if the request wants log-probabilities; the first event of a text may
            begin with the prompt's.
        end: why the text is over: "eos", "stop" or "length"; None while it is not.
    """

    number: int
    text: str
    total: int
    tokens: list[Token]
    end: str | None


class Answer:
    """The answer to one request.

    Args:
        prompts: the ids of each prompt.
        token_text: returns the text of a token.
    """

    def __init__(
        self, body: CompletionRequest, prompts: list[list[int]], tokenizer: Tokenizer, token_text: Callable[[int], str]
    ) -> None:
        self.body = body
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.token_text = token_text
        first = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
        self._is_of_ids = not isinstance(first, str)
        self.totals = [0] * (len(prompts) * body.n)  # new tokens of each text
        self._offsets = [0] * len(self.totals)  # where the next token of each text begins, in characters
        self._characters = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in self.totals]
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(16)}", "object": "text_completion", "created": int(time.time()),
            "model": body.model, "system_fingerprint": f"minigpt-{__version__}",
        }  # fmt: skip

    async def chunk(self, event: TextEvent) -> bytes:
        """Return the chunk of a stream for an event."""
        fields: dict[str, Any] = {"choices": [await self._choice(event)]}
        if self.body.stream_options.continuous_usage_stats:
            fields["usage"] = self._usage()
        elif self.body.stream_options.include_usage:
            fields["usage"] = None
        return to_json(self._head | fields)

    def last_chunk(self) -> bytes:
        """Return the chunk with the usage."""
        return to_json(self._head | {"choices": [], "usage": self._usage()})

    async def whole(self, events: list[TextEvent]) -> bytes:
        """Return the answer to a request that is not streamed, from an event for each text."""
        choices = [await self._choice(event) for event in sorted(events)]
        return to_json(self._head | {"choices": choices, "usage": self._usage()})

    async def _choice(self, event: TextEvent) -> dict[str, Any]:
        is_first = not self.totals[event.number]
        self.totals[event.number] = event.total
        text = event.text
        offsets: list[int] = []
        if self.body.echo and is_first:
            prompt = self._prompt_of(event.number)
            text = prompt + text
            if self.body.logprobs is not None and not self._is_of_ids:
                offsets = self.tokenizer.offsets(prompt) or [0]  # of the token that stands for an empty text
                self._offsets[event.number] = len(prompt)
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = await self._logprobs(event, offsets)
        return {"index": event.number, "text": text, "finish_reason": REASONS[event.end], "logprobs": logprobs}

    def _prompt_of(self, number: int) -> str:
        """Return the prompt of the text of this number: as it came, or the text of its ids."""
        prompt: Any = self.body.prompt
        if isinstance(prompt, str):
            return prompt
        if self._is_of_ids:
            ids = self.prompts[number // self.body.n]
            return self.tokenizer.decode(ids, skip_special_tokens=self.body.skip_special_tokens)
        return prompt[number // self.body.n]

    async def _logprobs(self, event: TextEvent, offsets: list[int]) -> dict[str, list[Any]]:
        """Return the log-probabilities of an event's tokens. Other requests get their turn meanwhile.

        Args:
            offsets: where the event's first tokens begin in the text; those after them begin where the text ends.
        """
        texts: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        characters = self._characters[event.number]
        known = len(offsets)
        for number, token in enumerate(event.tokens):
            if number % TOKENS_AT_ONCE == TOKENS_AT_ONCE - 1:
                await asyncio.sleep(0)
            texts.append(self.token_text(token.id))
            logprobs.append(token.logprob)
            tops.append(self._top(token))
            if number >= known:
                offsets.append(self._offsets[event.number])
                data = self.tokenizer.decode_bytes([token.id], skip_special_tokens=self.body.skip_special_tokens)
                self._offsets[event.number] += len(characters.decode(data))
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: Token) -> dict[str, float] | None:
        """Return the likeliest tokens by their texts; of two with one text the likelier."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for id, logprob in token.top[: self.body.logprobs]:
            top.setdefault(self.token_text(id), logprob)
        if self.body.logprobs:
            top.setdefault(self.token_text(token.id), token.logprob)
        return top

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        new = sum(self.totals)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
