"""What clients send and get: the bodies of requests, answers and errors, as OpenAI's completions API has them."""

import asyncio
import codecs
import json
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, create_model, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minigpt.errors import MiniGPTError
from minigpt.generation import GenerationSettings, parse_settings
from minigpt.generation.settings import FLAG, HTTP, IDS, SETTINGS, Rule, integer, is_list
from minigpt.tokenizer import Tokenizer
from minigpt.version import __version__

PARTS_AT_ONCE = 256  # of JSON, that are encoded before other requests and the computing thread get their turn
TOKENS_AT_ONCE = 4  # with log-probabilities, that are collected before that
REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}  # Row.end -> finish_reason
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}  # by status
NOT_JSON = "the body must be a JSON object in UTF-8, sent with 'Content-Type: application/json'"
MESSAGES = {  # of the framework's errors, by status
    400: NOT_JSON,
    404: "this server does not have this path; POST /v1/completions writes texts",
    405: "this path does not take this method",
}


JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encoded(value: object) -> bytes:
    """Return a value as JSON."""
    return JSON.encode(value).encode()


async def encoded_in_turns(value: object) -> bytes:
    """Return a large value as JSON. Other requests get their turn while it is encoded."""
    data, parts = bytearray(), list[str]()
    for part in JSON.iterencode(value):
        parts.append(part)
        if len(parts) == PARTS_AT_ONCE:
            data += "".join(parts).encode()
            parts.clear()
            await asyncio.sleep(0)
    return bytes(data + "".join(parts).encode())


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
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return encoded({"error": {"message": str(self), "type": kind, "param": self.argument, "code": self.code}})

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
            return RefusalError(400, error.message, BODY_NAMES.get(error.argument or "", error.argument))
        case RequestValidationError():
            return _refusal_of_body(error)
        case HTTPException():
            return RefusalError(error.status_code, MESSAGES.get(error.status_code, str(error.detail)))
        case asyncio.CancelledError():
            return shutting_down()
        case _:
            return RefusalError(500, f"the server made a mistake: {type(error).__name__}")


def _refusal_of_body(error: RequestValidationError) -> RefusalError:
    first = error.errors()[0]  # of a check here, or "missing", or of the kinds for a value that is no object
    if isinstance(refusal := first.get("ctx", {}).get("error"), MiniGPTError):
        return refusal_of(refusal)
    field, is_missing = first["loc"][-1], first["type"] == "missing"
    if len(first["loc"]) < 2 or not isinstance(field, str):
        return RefusalError(400, NOT_JSON)
    return RefusalError(400, "is missing" if is_missing else "must be an object", field)


def ruled(rule: Rule, kind: Any) -> PlainValidator:
    """Return the check of a field of this kind: its values must obey a rule, whose words an error has."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict):  # of logit_bias; JSON's keys are strings
            value = {int(key) if key.isdecimal() and len(key) < 20 else key: number for key, number in value.items()}
        if not rule.accepts(value):
            raise RefusalError(400, f"must {rule.requirement}, got {json.dumps(value):.100}", info.field_name)
        return value

    return PlainValidator(check, json_schema_input_type=kind)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    return kinds in ({str}, {int}) or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in value))


STRING = Rule(lambda value: isinstance(value, str), "be a string")
BOOLEAN = Rule(FLAG.accepts, "be true or false")
PROMPT = Rule(_is_prompt, "be a string, a list of strings, a list of token ids, or a list of such lists")
PAIR = Rule(lambda value: is_list(value, STRING.accepts, 2, 2), "be a list of two models' ids")
String = Annotated[str, ruled(STRING, str)]
OptionalString = Annotated[str | None, ruled(STRING, str)]
Flag = Annotated[bool, ruled(BOOLEAN, bool)]
Texts = str | list[str] | list[int] | list[list[int]]


# Fields of OpenAI's and vLLM's completions that this server does not have, with the values that ask for what it does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (-1, 0),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "priority": (0,),
}


class Body(BaseModel):
    """A body of JSON. It has no other fields. Those that are null or NEUTRAL are left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        neutral = NEUTRAL | {"best_of": (fields.get("n") or 1, 1)}
        fields = {
            name: value for name, value in fields.items() if value is not None and value not in neutral.get(name, ())
        }
        for name in fields.keys() - cls.model_fields.keys():
            message = "is not a field of this request"
            if name in neutral:
                message = f"can only be {json.dumps(neutral[name][0])}"
            raise RefusalError(400, message, ascii(name[:64])[1:-1])
        return fields


BODY_NAMES = {"max_new_tokens": "max_tokens"}  # of settings whose field has another name
MAX_TOKENS = SETTINGS["max_new_tokens"].http or SETTINGS["max_new_tokens"].rule
_SETTINGS: dict[str, Any] = {
    BODY_NAMES.get(name, name): (
        Annotated[setting.type | None, ruled(setting.http or setting.rule, setting.type | None)],
        Field(None, description=setting.about),
    )
    for name, setting in SETTINGS.items()
    if HTTP in setting.users
}
_SETTINGS["min_tokens"] = _SETTINGS["min_new_tokens"]  # vLLM's name
_SETTINGS["ignore_eos"] = (Flag, Field(False, description="Let no eos_token_id end a text."))
Sampling = create_model("Sampling", __base__=Body, **_SETTINGS)


def settings_of(body: Any, max_tokens: int) -> GenerationSettings:
    """Return the settings of a body of ``Sampling``, without those that have no effect at temperature 0.

    Raises:
        MiniGPTError: if they contradict each other.
    """
    values = {name: getattr(body, BODY_NAMES.get(name, name), None) for name in SETTINGS}
    if body.min_tokens is not None:
        if body.min_tokens > max_tokens:
            raise RefusalError(400, f"must be at most {max_tokens}, as max_tokens, got {body.min_tokens}", "min_tokens")
        values["min_new_tokens"] = body.min_tokens
    if body.ignore_eos:
        if body.eos_token_id:
            raise RefusalError(400, "contradicts eos_token_id", "ignore_eos")
        values["eos_token_id"] = []
    samples = body.temperature != 0
    settings = {
        name: value
        for name, value in values.items()
        if value is not None and (samples or not SETTINGS[name].shapes_draw)
    }
    valid = parse_settings(**settings | {"do_sample": samples, "max_new_tokens": max(1, max_tokens)})
    valid.max_new_tokens = max_tokens  # 0: the prompt is read, and nothing is added
    return valid


class StreamOptions(Body):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``."""

    model: String
    prompt: Annotated[Texts, ruled(PROMPT, Texts)] = ""
    max_tokens: Annotated[int, ruled(MAX_TOKENS, int)] = Field(
        16, description="Tokens of each text; 0 only reads the prompts."
    )
    n: Annotated[int, ruled(integer(1, 128), int)] = Field(1, description="Texts for each prompt.")
    stream: Flag = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int | None, ruled(integer(0, 100), int)] = Field(
        None, description="How many of the likeliest tokens to report at each token."
    )
    echo: Flag = Field(False, description="Let the text begin with the prompt.")
    suffix: String = ""
    user: String = ""

    @property
    def scores_prompts(self) -> bool:
        """True if the answer has the log-probabilities of the prompts' tokens."""
        return self.echo and self.logprobs is not None

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        if self.stream_options is not None and not self.stream:
            raise RefusalError(400, "needs stream to be true", "stream_options")
        if self.suffix:
            raise RefusalError(400, "is not supported: GPT-2 cannot see the text that comes after", "suffix")
        return self


class CompareRequest(Sampling):
    """The body of ``POST /compare``: two models write on from one prompt."""

    models: Annotated[list[str], ruled(PAIR, list[str])]
    prompt: String = ""
    max_tokens: Annotated[int, ruled(integer(1, 65536), int)] = Field(64, description="Tokens of each text.")
    alternatives: Annotated[int, ruled(integer(1, 20), int)] = Field(
        5, description="How many of each model's likeliest tokens to report."
    )


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``."""

    model: OptionalString = None
    prompt: String


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: OptionalString = None
    tokens: Annotated[list[int], ruled(IDS, list[int])]


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
        number: the text's number among those of the request.
        text: the characters that can be shown since the last event.
        total: the number of new tokens so far.
        tokens: the tokens since the last event, if the request wants log-probabilities; the first event of a text may
            begin with those of the prompt.
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
        self.body, self.prompts, self.tokenizer, self.token_text = body, prompts, tokenizer, token_text
        self.options = body.stream_options or StreamOptions()
        self.totals = [0] * (len(prompts) * body.n)  # new tokens of each text
        self._offsets = [_Offsets() for _ in self.totals]
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(16)}", "object": "text_completion", "created": int(time.time()),
            "model": body.model, "system_fingerprint": f"minigpt-{__version__}",
        }  # fmt: skip

    async def chunk(self, event: TextEvent) -> bytes:
        """Return the chunk of a stream for an event."""
        fields: dict[str, Any] = {"choices": [await self._choice(event)]}
        if self.options.continuous_usage_stats:
            fields["usage"] = self._usage()
        elif self.options.include_usage:
            fields["usage"] = None
        return await self._encoded(fields)

    async def last_chunk(self) -> bytes:
        """Return the chunk with the usage."""
        return await self._encoded({"choices": [], "usage": self._usage()})

    async def whole(self, events: list[TextEvent]) -> bytes:
        """Return the answer to a request that is not streamed, from an event for each text."""
        choices = [await self._choice(event) for event in sorted(events)]
        return await self._encoded({"choices": choices, "usage": self._usage()})

    async def _encoded(self, fields: dict[str, Any]) -> bytes:
        value = self._head | fields
        return encoded(value) if self.body.logprobs is None else await encoded_in_turns(value)

    async def _choice(self, event: TextEvent) -> dict[str, Any]:
        echo = (
            self._prompt_text(event.number // self.body.n) if self.body.echo and not self.totals[event.number] else ""
        )
        self.totals[event.number] = event.total
        logprobs = None if self.body.logprobs is None else await self._logprobs(event)
        return {
            "index": event.number, "text": echo + event.text, "logprobs": logprobs, "finish_reason": REASONS[event.end],
        }  # fmt: skip

    def _prompt_text(self, number: int) -> str:
        prompt = self.body.prompt if isinstance(self.body.prompt, str) else self.body.prompt[number]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(self.prompts[number])

    async def _logprobs(self, event: TextEvent) -> dict[str, list[Any]]:
        """Return the log-probabilities of an event's tokens. Other requests get their turn meanwhile."""
        columns: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for number, token in enumerate(event.tokens):
            if number % TOKENS_AT_ONCE == TOKENS_AT_ONCE - 1:
                await asyncio.sleep(0)
            columns["tokens"].append(self.token_text(token.id))
            columns["token_logprobs"].append(token.logprob)
            columns["top_logprobs"].append(self._top(token))
            columns["text_offset"].append(self._offsets[event.number].next(self.tokenizer.decode_bytes([token.id])))
        return columns

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
        prompt, new = sum(map(len, self.prompts)), sum(self.totals)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class _Offsets:
    """Counts the characters of one text."""

    def __init__(self) -> None:
        self._characters, self._offset = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0

    def next(self, token: bytes) -> int:
        """Return where the next token begins, in characters."""
        offset = self._offset
        self._offset += len(self._characters.decode(token))
        return offset
