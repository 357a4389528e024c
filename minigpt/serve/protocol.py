"""The bodies of requests, and error objects: those of OpenAI's completions API, and our own."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse

from minigpt.errors import GenerationError
from minigpt.generation import parse_settings
from minigpt.generation.settings import SETTINGS, GenerationSettings

MOST_NEW = 65536  # tokens of one text; with a sliding window there is no other limit
FIELDS = {"max_new_tokens": "max_tokens"}  # of settings whose field has another name
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RefusalError(Exception):
    """The error that a client gets as the answer to its request.

    Args:
        status: the HTTP status.
        message: one sentence: what is wrong and what would be right.
        param: the field that is wrong.
        code: a word that programs can test for.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """Return the error object."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def of(cls, error: GenerationError) -> "RefusalError":
        """Return the refusal of a setting."""
        message = error.spelled(lambda name: FIELDS.get(name, name))
        return cls(400, message, error.argument and FIELDS.get(error.argument, error.argument))

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(self.status)
        return JSONResponse(self.to_dict(), self.status, headers)


def _prompt(given: Any) -> Any:
    """Check a prompt. The type checker's own error for a union of types would be unreadable."""
    is_ids = isinstance(given, list) and all(type(id) is int for id in given)
    several = isinstance(given, list) and (
        all(isinstance(text, str) for text in given)
        or all(isinstance(ids, list) and ids and all(type(id) is int for id in ids) for ids in given)
    )
    if not (isinstance(given, str) or (given and (is_ids or several))):
        raise ValueError("prompt must be a string, a list of strings, a list of token ids, or a list of such lists")
    return given


def _is_for_draws(setting: str) -> bool:
    return SETTINGS[setting].shapes_draw


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_prompt)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False


class Sampling(Body):
    """The settings of generation that every request may have."""

    max_tokens: int | None = Field(None, ge=0, le=MOST_NEW)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None

    # Not OpenAI's: as in GenerationSettings.
    top_k: int | None = None
    min_p: float | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    suppress_tokens: list[int] | None = None
    eos_token_id: int | list[int] | None = None
    overflow: Literal["refuse", "slide"] | None = None
    slide_stride: int | None = None

    default_max_tokens: ClassVar[int] = 16

    @property
    def new_tokens(self) -> int:
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens

    def settings(self) -> GenerationSettings:
        """Return the settings of generation.

        Raises:
            GenerationError: if they contradict each other or are out of range.
        """
        given = {name: value for name in SETTINGS if (value := getattr(self, name, None)) is not None}
        given["do_sample"] = self.temperature != 0
        if not given["do_sample"]:  # clients send settings of draws here too; they have no effect
            given = {name: value for name, value in given.items() if not _is_for_draws(name)}
        return parse_settings(max_new_tokens=max(1, self.new_tokens), **given)


class CompletionRequest(Sampling):
    """The body of ``POST /v1/completions``."""

    model: str
    prompt: Prompt = ""
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=100)
    echo: bool | None = None
    suffix: str | None = None
    user: str | None = None

    @property
    def copies(self) -> int:
        """Texts to write for each prompt, of which ``choices`` are returned."""
        return self.best_of or self.choices

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest ids to report at each token; None for no log-probabilities."""
        return 0 if self.logprobs is None and self.copies > self.choices else self.logprobs

    @property
    def scores_prompts(self) -> bool:
        """True if the answer has the log-probabilities of the prompts' tokens."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        """Check the fields against each other."""
        if self.suffix:
            raise ValueError("suffix is not supported: GPT-2 cannot see the text that comes after")
        if self.copies < self.choices:
            raise ValueError(f"best_of must not be less than n, got {self.best_of} and {self.choices}")
        if self.stream and self.copies > self.choices:
            raise ValueError("best_of cannot be streamed: the best text is only known when all texts are over")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


class CompareRequest(Sampling):
    """The body of ``POST /compare``: two models write on from one prompt."""

    models: Annotated[list[str], Field(min_length=2, max_length=2)]
    prompt: str = ""
    alternatives: int = Field(5, ge=1, le=20)
    default_max_tokens: ClassVar[int] = 64


class TokenizeRequest(Body):
    """The body of ``POST /tokenize``."""

    model: str | None = None
    prompt: str


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
