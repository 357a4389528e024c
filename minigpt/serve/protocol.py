"""The bodies of requests, judged: OpenAI's fields for completions, and our own beside them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from minigpt.errors import GenerationError
from minigpt.generation import parse_settings
from minigpt.generation.processors import PROCESSORS
from minigpt.generation.settings import GenerationSettings
from minigpt.serve.refusal import RefusalError

MOST_NEW = 65536  # tokens of one text, which a sliding window could write without end
NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}  # of our settings, as the API calls them


def _prompt(given: Any) -> Any:
    """Check a prompt by hand, since the error for a union of types names them all."""
    is_ids = isinstance(given, list) and all(type(id) is int for id in given)
    several = isinstance(given, list) and (
        all(isinstance(text, str) for text in given)
        or all(isinstance(ids, list) and ids and all(type(id) is int for id in ids) for ids in given)
    )
    if not (isinstance(given, str) or (given and (is_ids or several))):
        raise ValueError("prompt must be a string, a list of strings, a list of token ids, or a list of such lists")
    return given


def _shapes_draw(name: str) -> bool:
    return name in PROCESSORS and PROCESSORS[name].shapes_draw


def _unicode(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("must be valid Unicode, got a lone surrogate")
    return text


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_prompt)]
Text = Annotated[str, AfterValidator(_unicode)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class Sampling(BaseModel):
    """The settings of generation that every request may have."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=0, le=MOST_NEW)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None

    # Ours, in the names of GenerationSettings.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    suppress_tokens: list[int] | None = None
    eos_token_id: int | list[int] | None = None
    overflow: Literal["refuse", "slide"] | None = None
    slide_stride: int | None = None

    default_max_tokens: ClassVar[int] = 16
    OURS: ClassVar[tuple[str, ...]] = (
        "top_p", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p", "typical_p", "min_new_tokens",
        "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "eos_token_id", "overflow",
        "slide_stride",
    )  # fmt: skip

    @property
    def new_tokens(self) -> int:
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens

    def settings(self) -> GenerationSettings:
        """Return the settings of generation.

        Raises:
            RefusalError: if they contradict each other or are out of range.
        """
        given = {name: value for name in self.OURS if (value := getattr(self, name)) is not None}
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0:  # the likeliest token, whatever would have shaped a draw
            given = {name: value for name, value in given.items() if not _shapes_draw(name)}
        else:
            given |= {"do_sample": True, "temperature": temperature}
        if self.stop not in (None, []):
            given["stop_strings"] = self.stop
        if self.logit_bias:
            given["logit_bias"] = self._bias(self.logit_bias)
        try:
            return parse_settings(max_new_tokens=max(1, self.new_tokens), **given)
        except GenerationError as error:
            said = str(error)
            for ours, theirs in NAMES.items():
                said = said.replace(ours, theirs)
            param = next((name for name in type(self).model_fields if said.startswith(f"{name} ")), None)
            raise RefusalError(400, said, param) from error

    def _bias(self, bias: dict[str, float]) -> dict[int, float]:
        if wrong := [id for id in bias if not (id.isascii() and id.isdecimal())]:
            raise RefusalError(400, f"the keys of logit_bias must be token ids, got {wrong[0]!r:.50}", "logit_bias")
        return {int(id): value for id, value in bias.items()}


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

    def check(self) -> None:
        """Check the fields against each other.

        Raises:
            RefusalError: if they contradict each other.
        """
        if self.suffix:
            raise RefusalError(400, "suffix is not supported: GPT-2 cannot see the text that comes after", "suffix")
        if self.best_of is not None and self.best_of < self.choices:
            said = f"best_of must not be less than n, got {self.best_of} and {self.choices}"
            raise RefusalError(400, said, "best_of")
        if self.stream and self.copies > self.choices:
            raise RefusalError(400, "best_of cannot be streamed: the best text is known when all are over", "best_of")
        if self.stream_options is not None and not self.stream:
            raise RefusalError(400, "stream_options needs stream to be true", "stream_options")


class CompareRequest(Sampling):
    """The body of ``POST /compare``: two models write on from one prompt."""

    models: Annotated[list[str], Field(min_length=2, max_length=2)]
    prompt: Text = ""
    alternatives: int = Field(5, ge=1, le=20)
    default_max_tokens: ClassVar[int] = 64


class TokenizeRequest(BaseModel):
    """The body of ``POST /tokenize``."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    prompt: Text


class DetokenizeRequest(BaseModel):
    """The body of ``POST /detokenize``."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    tokens: list[int]
