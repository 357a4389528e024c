"""Texts that are read together, where every reading brings a model's weights from its files.

The texts are padded on the right. A causal model computes nothing else for the tokens before the padding, unless its
rotary angles depend on the longest text: such a model reads each text alone.

B batch, T tokens, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.judge.reading import Sample

MOST_LOGITS = 2**26  # numbers of the logits of texts that are read together: 512 MB in float64
MOST_TOKENS = 4096  # of texts that are read together: eager attention keeps scores of every pair
BY_LENGTH = {"longrope", "dynamic"}  # rotary embeddings whose angles depend on the longest text
MOST_PADDING = 64  # tokens; to compute more takes longer than to bring the weights once more


def reads_apart(model: nn.Module) -> bool:
    """Return whether each text must be read alone.

    It must where padding changes a text, and where a block's output is not one row a text, as in Gemma 3n.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return False
    fields = config.to_dict()
    if "altup_num_inputs" in fields or "altup_num_inputs" in fields.get("text_config", {}):
        return True
    return not BY_LENGTH.isdisjoint(_rope_types(fields))


def _rope_types(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of rotary embeddings that a config names, of single layer types too."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif name in ("rope_type", "type") and isinstance(value, str):
            yield value


def groups_of(samples: Iterable[Sample], vocab_size: int) -> Iterator[list[Sample]]:
    """Yield texts in their order, as many together as there is room for, and none with much padding."""
    group: list[Sample] = []
    for sample in samples:
        grown = [*group, sample]
        longest = max(len(member.ids) for member in grown)
        tokens = len(grown) * longest
        padding = tokens - sum(len(member.ids) for member in grown)
        is_large = tokens > MOST_TOKENS or tokens * vocab_size > MOST_LOGITS
        if group and (padding > MOST_PADDING or is_large):
            yield group
            grown = [sample]
        group = grown
    if group:
        yield group


def right_padded(samples: Sequence[Sample], most: int, device: torch.device) -> Int[Tensor, "batch seq"]:
    """Return the ids of texts (B, T).

    T is odd where it may be, as numbers of heads are not, so that a dimension of tokens is not taken for one of heads.

    Args:
        most: tokens that the model can read.
    """
    longest = max(len(sample.ids) for sample in samples)
    if len(samples) > 1:
        longest = min(longest | 1, most)
    rows = []
    for sample in samples:
        rows.append(sample.ids + [0] * (longest - len(sample.ids)))
    return torch.tensor(rows, device=device)


def has_tokens(y: Tensor, batch: Int[Tensor, "batch seq"]) -> bool:
    """Return whether ``of_text`` finds the tokens of a text in an output."""
    return len(y) == batch.numel() or batch.shape[1] in y.shape[1:-1]


def of_text(y: Tensor, row: int, batch: Int[Tensor, "batch seq"], length: int) -> Tensor:
    """Return the part of an output that is of one text, without its padding.

    Args:
        y: (B, T, ...), or (B, heads, T, ...), or (B x T, ...).
    """
    rows, tokens = batch.shape
    if rows == 1 and y.ndim == 2:
        return y
    if len(y) != rows and len(y) == rows * tokens:
        y = y.view(rows, tokens, *y.shape[1:])
    y = y[row]
    for dimension in range(y.ndim - 1):
        if y.shape[dimension] == tokens:
            return y.narrow(dimension, 0, length)
    return y
