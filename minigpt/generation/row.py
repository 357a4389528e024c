"""One text that is being written: its tokens, and its characters as they become ready."""

import codecs
import copy
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.generation.settings import GenerationSettings

NUMBERS_AT_ONCE = 1024  # random numbers to draw at once; most texts end earlier


class TextCodec(Protocol):
    """The methods of a tokenizer that generation calls. An empty prompt also needs ``end_of_text_id``."""

    def encode(self, text: str) -> list[int]: ...

    def decode_bytes(self, ids: list[int]) -> bytes: ...


def require_codec(tokenizer: object) -> None:
    """Check that a tokenizer has the methods of minigpt.Tokenizer; transformers' cannot return a token's bytes.

    Raises:
        GenerationError: if it does not.
    """
    is_codec = hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode_bytes")
    if not is_codec:
        raise GenerationError(f"must be a minigpt.Tokenizer, got {type(tokenizer).__name__}", argument="tokenizer")


def prompt_ids(tokenizer: TextCodec, prompt: str) -> list[int]:
    """Return the ids of a prompt; for an empty one end-of-text, which starts a new document.

    Raises:
        GenerationError: if the prompt is empty and the vocabulary has no end-of-text, or the tokenizer is not a
            minigpt.Tokenizer.
    """
    require_codec(tokenizer)
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    end = getattr(tokenizer, "end_of_text_id", None)
    if end is None:
        raise GenerationError("the prompt is empty, and the tokenizer has no end-of-text token to start from")
    return [end]


@dataclasses.dataclass(eq=False)
class Row:
    """A prompt and the tokens added to it.

    Attributes:
        ids: the prompt's tokens and the new ones.
        settings: how its tokens are chosen, and what ends its text.
        end_ids: the tokens that end it.
        tokenizer: None if its text is not needed.
        prompt: number of the prompt.
        number: number of this text among the texts of the prompt.
        seed: seed of its random numbers; None takes one from the system.
        prompt_length: number of tokens of the prompt.
        end: the reason why it is finished: "eos", "stop" or "length"; None before.
        may_draft: whether several tokens may be added in a step.
        scores_prompt: whether the logits after every token of the prompt are needed.
        drafted, accepted: number of tokens that were drafted, and of those that were right.
        scores, logprobs: of each new token, (V,) and a number, if the settings ask for them.
    """

    ids: list[int]
    settings: GenerationSettings
    end_ids: tuple[int, ...] = ()
    tokenizer: TextCodec | None = None
    prompt: int = 0
    number: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        self.end: str | None = None
        self.may_draft, self.scores_prompt = True, False
        self.drafted = self.accepted = 0
        self.scores: list[Tensor] = []  # each (V,)
        self.logprobs: list[float] = []
        self._text = TextAssembler(self.settings.stop)
        self._unread = ""
        self._random = RandomNumbers(self.seed)
        self._prompt: Int[Tensor, "1 prompt"] | None = None

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def left(self) -> int:
        """Number of tokens that may still be added."""
        return self.settings.max_new_tokens - (len(self.ids) - self.prompt_length)

    def ids_on(self, device: torch.device) -> Int[Tensor, "1 seq"]:
        """Return its ids as a tensor. The prompt's are moved to the device once."""
        if self._prompt is None:
            self._prompt = torch.tensor([self.ids[: self.prompt_length]], device=device)
        new = torch.tensor([self.new_ids], dtype=torch.long, device=device)
        return torch.cat((self._prompt, new), dim=1)

    def chances(self, count: int) -> Float[Tensor, " count"]:
        """Return the random numbers of its next ``count`` tokens, uniform in [0, 1).

        They depend on its seed alone. The CPU draws them, so a seed gives the same numbers for every device. They stay
        below 1 after any rounding.
        """
        return self._random.get(len(self.ids) - self.prompt_length, count)

    def ahead(self) -> "Row":
        """Return a copy to draft tokens on: they are its own, and its random numbers are this row's."""
        copied = copy.copy(self)
        copied.ids = list(self.ids)
        return copied

    def push(self, token: int) -> None:
        """Add a token, and set ``end`` if it ends the row."""
        self.ids.append(token)
        if token in self.end_ids:
            self.end = "eos"
        elif self.tokenizer is not None:
            self._unread += self._text.add(self.tokenizer.decode_bytes([token]))
            self.end = "stop" if self._text.stopped else None
        if self.end or not self.left:
            self.finish(self.end or "length")

    def finish(self, reason: str) -> None:
        """End the text."""
        self.end = reason
        self._unread += self._text.add(b"", final=True)

    def fail(self, error: Exception) -> None:
        """Take an error that concerns this text alone. Here it is raised; a server tells the text's client."""
        raise error

    def take_text(self) -> str:
        """Return the text that became ready since the last call: whole characters, no part of a stop string."""
        piece, self._unread = self._unread, ""
        return piece


class RandomNumbers:
    """A sequence of random numbers, uniform in [0, 1), by the places in it.

    Args:
        seed: None takes one from the system, when the first number is drawn.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.drawn: list[float] = []

    @cached_property
    def generator(self) -> torch.Generator:
        generator = torch.Generator("cpu")
        seed = generator.seed() if self.seed is None else int(self.seed)
        return generator.manual_seed(seed)

    def get(self, first: int, count: int) -> Float[Tensor, " count"]:
        """Return ``count`` numbers from place ``first`` on."""
        end = first + count
        while len(self.drawn) < end:
            more = torch.rand(NUMBERS_AT_ONCE, dtype=torch.float64, device="cpu", generator=self.generator)
            self.drawn += more.clamp_(max=1 - 2**-50).tolist()
        return torch.tensor(self.drawn[first:end], dtype=torch.float64, device="cpu")


class TextAssembler:
    """Turns a growing sequence of bytes into pieces of text.

    A piece never ends in half a character. Text that could still become a stop string is held back until that is
    decided. The stop string and the text after it are never returned.
    """

    def __init__(self, stop_texts: Sequence[str] = ()) -> None:
        self.stop_texts = tuple(stop_texts)
        self.stopped = False
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, data: bytes, final: bool = False) -> str:
        """Return the text that is ready; with ``final``, also the text that was held back."""
        if self.stopped:
            return ""
        text = self._held + self._characters.decode(data, final)
        begin = self._stop_in(text)
        if begin is not None:
            self.stopped, self._held = True, ""
            return text[:begin]
        undecided = 0
        if not final:
            undecided = max((_overlap(text, stop) for stop in self.stop_texts), default=0)
        shown = len(text) - undecided
        self._held = text[shown:]
        return text[:shown]

    def _stop_in(self, text: str) -> int | None:
        """Return where a stop string begins, or None.

        It is the one that is complete first, so that the pieces in which the text arrives do not matter.
        """
        places = []
        for stop in self.stop_texts:
            begin = text.find(stop)
            if begin >= 0:
                places.append((begin + len(stop), begin))
        if not places:
            return None
        _, begin = min(places)
        return begin


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    for length in range(longest, 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
