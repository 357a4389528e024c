"""The sizes of a language model, of any architecture."""

import contextlib
from dataclasses import dataclass
from typing import Any

from minigpt.choices import GPT2_TYPES

MOST_WINDOW = 2048  # tokens of a text that another architecture reads at once: logits of a large vocabulary take 1 GB
MOST_CONTEXT = 1024  # tokens that are read at once by a model without a limit


@dataclass(frozen=True)
class Shape:
    """The sizes of a language model, in GPT-2's names.

    Attributes:
        n_positions: the most tokens that it reads at once.
        window: how many tokens of a longer text are read at once: all of these, of another architecture than GPT-2 at
            most 2,048.
        eos_token_ids: the tokens that end a text.
        bos_token_id: the token that begins one; None if the vocabulary has none.
    """

    vocab_size: int
    n_positions: int
    window: int
    n_embd: int
    n_layer: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def weights(self) -> int:
        """About how many numbers a model has: embeddings, and 12 matrices of the width a block."""
        return self.n_embd * (self.vocab_size + 12 * self.n_layer * self.n_embd)

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Return the sizes that a config of minigpt or of transformers says."""
        text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocab_size = value_in(text, "vocab_size", default=0)
        bos = getattr(text, "bos_token_id", None)
        if bos is not None and bos >= vocab_size:  # a config may have kept the id of a larger vocabulary
            bos = None
        n_positions = value_in(text, "n_positions", "max_position_embeddings", default=MOST_CONTEXT)
        window = n_positions
        if getattr(text, "model_type", "gpt2") not in GPT2_TYPES:
            window = min(window, MOST_WINDOW)
        return cls(
            vocab_size=vocab_size,
            n_positions=n_positions,
            window=window,
            n_embd=value_in(text, "n_embd", "hidden_size", default=0),
            n_layer=value_in(text, "n_layer", "num_hidden_layers", default=0),
            eos_token_ids=_ends_of_text(text, vocab_size),
            bos_token_id=bos,
        )


def value_in(config: Any, *names: str, default: Any = None) -> Any:
    """Return the value under the first of its names that a config has, for all layers."""
    for name in names:
        with contextlib.suppress(RuntimeError):  # each layer has its own, as the width of a head in Gemma 4
            value = getattr(config, name, None)
            if value is not None:
                return value
    return default


def _ends_of_text(config: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text, as far as they are in the vocabulary."""
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return ()
    if not isinstance(ends, list | tuple):
        ends = [ends]
    return tuple(token for token in ends if token < vocab_size)
