"""What clients send and get: the bodies of requests, answers and errors, as OpenAI's completions API has them."""

import asyncio
import codecs
import json
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, create_model, model_validator
from starlette.responses import Response

from minigpt import __version__
from minigpt.errors import MiniGPTError
from minigpt.generation import GenerationSettings, parse_settings
from minigpt.generation.settings import FLAG, HTTP, IDS, SETTINGS, Rule, integer, is_list
from minigpt.tokenizer import Tokenizer

ENCODED_AT_ONCE = 64  # tokens whose log-probabilities are encoded before other requests get their turn
REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}  # Row.end -> finish_reason
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}  # by status
NOT_JSON = "the body must be a JSON object in UTF-8, sent with 'Content-Type: application/json'"


def encoded(value: object) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


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

    @classmethod
    def of(cls, error: MiniGPTError) -> "RefusalError":
        """Return the refusal of a value, whose error names the argument as Python does."""
        return cls(400, error.message, BODY_NAMES.get(error.argument or "", error.argument))

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
    def is_ids(value: Any) -> bool:
        return is_list(value, lambda id: type(id) is int, 1)

    return isinstance(value, str) or is_ids(value) or is_list(value, STRING.accepts, 1) or is_list(value, is_ids, 1)


def invalid(error: RequestValidationError) -> RefusalError:
    """Return the refusal for the first of the errors in a body."""
    first = error.errors()[0]  # of a check here, or "missing", or of the kinds for a value that is no object
    if isinstance(refusal := first.get("ctx", {}).get("error"), MiniGPTError):
        return refusal if isinstance(refusal, RefusalError) else RefusalError.of(refusal)
    field, is_missing = first["loc"][-1], first["type"] == "missing"
    if len(first["loc"]) < 2 or not isinstance(field, str):
        return RefusalError(400, NOT_JSON)
    return RefusalError(400, "is missing" if is_missing else "must be an object", field)


STRING = Rule(lambda value: isinstance(value, str), "be a string")
BOOLEAN = Rule(FLAG.accepts, "be true or false")
PROMPT = Rule(_is_prompt, "be a string, a list of strings, a list of token ids, or a list of such lists")
PAIR = Rule(lambda value: is_list(value, STRING.accepts, 2, 2), "be a list of two models' ids")
String = Annotated[str, ruled(STRING, str)]
OptionalString = Annotated[str | None, ruled(STRING, str)]
Flag = Annotated[bool, ruled(BOOLEAN, bool)]
Texts = str | list[str] | list[int] | list[list[int]]


class Body(BaseModel):
    """A body of JSON. It has no other fields; those that are null are left out."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name in fields.keys() - cls.model_fields.keys():
            raise RefusalError(400, "is not a field of this request", ascii(name[:64])[1:-1])
        return {name: value for name, value in fields.items() if value is not None}


BODY_NAMES = {"max_new_tokens": "max_tokens"}  # of settings whose field has another name
MOST_TOKENS = SETTINGS["max_new_tokens"].http or SETTINGS["max_new_tokens"].rule
_SETTINGS: dict[str, Any] = {
    BODY_NAMES.get(name, name): (
        Annotated[setting.type | None, ruled(setting.http or setting.rule, setting.type | None)],
        Field(None, description=setting.about),
    )
    for name, setting in SETTINGS.items()
    if HTTP in setting.users
}
Sampling = create_model("Sampling", __base__=Body, **_SETTINGS)


def settings_of(body: Any, max_tokens: int) -> GenerationSettings:
    """Return the settings of a body of ``Sampling``, without those that have no effect at temperature 0.

    Raises:
        GenerationError: if they contradict each other.
    """
    values = {name: getattr(body, BODY_NAMES.get(name, name), None) for name in SETTINGS}
    samples = body.temperature != 0
    settings = {
        name: value
        for name, value in values.items()
        if value is not None and (samples or not SETTINGS[name].shapes_draw)
    }
    return parse_settings(**settings | {"do_sample": samples, "max_new_tokens": max(1, max_tokens)})


class StreamOptions(Body):
    include_usage: Flag = False
    include_obfuscation: Flag = False


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``."""

    model: String
    prompt: Annotated[Texts, ruled(PROMPT, Texts)] = ""
    max_tokens: Annotated[int, ruled(MOST_TOKENS, int)] = Field(
        16, description="Tokens of each text; 0 only reads the prompts."
    )
    n: Annotated[int, ruled(integer(1, 128), int)] = Field(1, description="Texts for each prompt.")
    best_of: Annotated[int | None, ruled(integer(1, 128), int)] = Field(
        None, description="Texts to write for each prompt; the n likeliest are returned."
    )
    stream: Flag = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int | None, ruled(integer(0, 100), int)] = Field(
        None, description="How many of the likeliest tokens to report at each token."
    )
    echo: Flag = Field(False, description="Let the text begin with the prompt.")
    suffix: String = ""
    user: String = ""

    @property
    def copies(self) -> int:
        """Texts to write for each prompt, of which ``n`` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest ids the scheduler reports; None for no log-probabilities."""
        return 0 if self.logprobs is None and self.copies > self.n else self.logprobs

    @property
    def scores_prompts(self) -> bool:
        """True if the answer has the log-probabilities of the prompts' tokens."""
        return self.echo and self.logprobs is not None

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        """Check the fields against each other."""
        for name, is_wrong, message in (
            ("stream_options", self.stream_options and not self.stream, "needs stream to be true"),
            ("suffix", self.suffix, "is not supported: GPT-2 cannot see the text that comes after"),
            ("best_of", self.copies < self.n, f"must be at least n, got {self.copies} and {self.n}"),
            ("best_of", self.stream and self.copies > self.n, "cannot be streamed, since the best text is known last"),
        ):
            if is_wrong:
                raise RefusalError(400, message, name)
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


class Written(NamedTuple):
    """The event that a text has grown.

    Attributes:
        number: the text's number among those of the request.
        text: the characters that can be shown since the last event.
        total: how many tokens it has now.
        tokens: the tokens since the last event, if the request wants log-probabilities.
        end: why the text is over: "eos", "stop" or "length"; None while it is not.
    """

    number: int
    text: str
    total: int
    tokens: list[Token]
    end: str | None


class _Progress:
    """What is known of one text: its number of tokens, their log-probabilities, and how many characters they have."""

    def __init__(self) -> None:
        self.total, self.logprobs = 0, list[float]()
        self._characters, self._offset = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0

    def offset(self, data: bytes) -> int:
        """Return where a token begins, in characters. Call this once for each token, in order."""
        offset = self._offset
        self._offset += len(self._characters.decode(data))
        return offset


class Answer:
    """The answer to one request, for the events so far.

    Args:
        prompts: the ids of each prompt.
        scored: the tokens of each prompt with their log-probabilities, if the request wants them.
        token_text: returns the text of a token.
    """

    def __init__(
        self, body: CompletionRequest, prompts: list[list[int]], scored: dict[int, list[Token]], tokenizer: Tokenizer,
        token_text: Callable[[int], str],
    ) -> None:  # fmt: skip
        self.body, self.prompts, self.scored = body, prompts, scored
        self.tokenizer, self.token_text = tokenizer, token_text
        self.texts = [_Progress() for _ in range(len(prompts) * body.copies)]
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(16)}", "object": "text_completion", "created": int(time.time()),
            "model": body.model, "system_fingerprint": f"minigpt-{__version__}",
        }  # fmt: skip

    async def chunk(self, event: Written) -> bytes:
        """Return the chunk of a stream that says what an event adds."""
        choice = await self._choice(event.number, self._with_prompt(event))
        return self._object([choice], {"usage": None} if self.body.includes_usage else {})

    def last_chunk(self) -> bytes:
        """Return the chunk with the usage."""
        return self._object([], {"usage": self._usage()})

    async def whole(self, events: list[Written]) -> bytes:
        """Return the answer to a request that is not streamed, for all of its events, one for each text."""
        texts, copies, n = sorted(map(self._with_prompt, events)), self.body.copies, self.body.n
        best: list[Written] = []
        for first in range(0, len(texts), copies):
            of_prompt = texts[first : first + copies]
            if copies > n:
                of_prompt.sort(key=lambda text: -statistics.fmean(self.texts[text.number].logprobs or [0.0]))
            best += of_prompt[:n]
        choices = [await self._choice(place, text) for place, text in enumerate(best)]
        return self._object(choices, {"usage": self._usage()})

    def _with_prompt(self, event: Written) -> Written:
        """Return the event, the first of a text with the prompt in front if that is to be echoed."""
        text, prompt = self.texts[event.number], event.number // self.body.copies
        text.logprobs += [token.logprob for token in event.tokens if token.logprob is not None]
        is_first, text.total = text.total == 0, event.total
        if not (is_first and self.body.echo):
            return event
        sent = self.body.prompt if isinstance(self.body.prompt, str) else self.body.prompt[prompt]
        echo = sent if isinstance(sent, str) else self.tokenizer.decode(self.prompts[prompt])
        return event._replace(text=echo + event.text, tokens=self.scored.get(prompt, []) + event.tokens)

    def _object(self, choices: list[bytes], more: dict[str, Any]) -> bytes:
        return encoded(self._head | more)[:-1] + b',"choices":[' + b",".join(choices) + b"]}"

    async def _choice(self, place: int, event: Written) -> bytes:
        fields = {"index": place, "text": event.text, "finish_reason": REASONS[event.end]}
        logprobs = b"null" if self.body.logprobs is None else await self._logprobs(event)
        return encoded(fields)[:-1] + b',"logprobs":' + logprobs + b"}"

    async def _logprobs(self, event: Written) -> bytes:
        """Return the log-probabilities of a text's tokens. Other requests get their turn between two pieces."""
        columns: dict[str, list[bytes]] = {}
        for first in range(0, max(1, len(event.tokens)), ENCODED_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            piece = event.tokens[first : first + ENCODED_AT_ONCE]
            for name, values in self._columns(self.texts[event.number], piece).items():
                columns.setdefault(name, []).append(encoded(values)[1:-1])
        return b"{" + b",".join(b'"%b":[%b]' % (name.encode(), b",".join(columns[name])) for name in columns) + b"}"

    def _columns(self, progress: _Progress, tokens: list[Token]) -> dict[str, list[Any]]:
        text, most = self.token_text, self.body.logprobs

        def top(token: Token) -> dict[str, float] | None:
            if token.logprob is None:
                return None
            likeliest = {text(id): logprob for id, logprob in token.top[:most]}
            return likeliest | {text(token.id): token.logprob} if most else likeliest

        return {
            "tokens": [text(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [top(token) for token in tokens],
            "text_offset": [progress.offset(self.tokenizer.decode_bytes([token.id])) for token in tokens],
        }

    def _usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self.prompts)), sum(text.total for text in self.texts)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
