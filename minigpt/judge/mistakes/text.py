"""Mistakes outside of the blocks: ids, positions, token embedding, head and logits.

T tokens, C embedding, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.judge.mistakes.mistake import Mistake, Swaps

OfPositions = Callable[[Tensor, Tensor], Tensor]  # of the table (n_positions, C) and position ids


class Positions(nn.Module):
    """Position embeddings that are looked up in another way."""

    def __init__(self, table: Any, look_up: OfPositions) -> None:
        super().__init__()
        self.weight, self.look_up = table.weight, look_up

    def forward(self, position_ids: Tensor) -> Tensor:
        return self.look_up(self.weight, position_ids)


class Tokens(nn.Module):
    """Token embeddings that are multiplied by a number; a tied head reads them as they are."""

    def __init__(self, table: Any, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = table.weight, factor

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.factor * self.weight[input_ids]


class Scaled(nn.Module):
    """A stream that is multiplied by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


# Positions


def later(weight: Tensor, position_ids: Tensor, by: int) -> Tensor:
    return weight[(position_ids + by).clamp(max=len(weight) - 1)]


def none(weight: Tensor, position_ids: Tensor) -> Tensor:
    return torch.zeros_like(weight[position_ids])


def twice(weight: Tensor, position_ids: Tensor) -> Tensor:
    return 2 * weight[position_ids]


def all_first(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[torch.zeros_like(position_ids)]


def one_less(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[position_ids - 1]


def backwards(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[position_ids.flip(-1)]


def grown(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[position_ids] * weight.shape[-1] ** 0.5


def waves(weight: Tensor, position_ids: Tensor) -> Tensor:
    """Return sines and cosines (Vaswani et al. 2017, section 3.5)."""
    width = weight.shape[-1]
    powers = torch.arange(0, width, 2, dtype=weight.dtype, device=weight.device) / width
    angles = position_ids[..., None] * 10_000.0**-powers
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]


def positioned(words: str, look_up: OfPositions, *, is_causal: bool = True) -> Mistake:
    """Return a mistake in the position embeddings."""

    def put(model: Any, swaps: Swaps) -> None:
        swaps.set(model, "wpe", Positions(model.wpe, look_up))

    return Mistake(words, put, is_causal=is_causal)


def wrong_positions() -> Iterator[Mistake]:
    """Yield mistakes in the position embeddings."""
    yield positioned("positions from 1", partial(later, by=1))
    yield positioned("positions from 2", partial(later, by=2))
    yield positioned("no positions", none)
    yield positioned("positions added twice", twice)
    yield positioned("position 0 for every token", all_first)
    yield positioned("positions from -1: the first token has the last one", one_less)
    yield positioned("positions in reverse", backwards, is_causal=False)
    yield positioned("position embeddings scaled by sqrt(n_embd)", grown)
    yield positioned("sines and cosines in place of the learned positions", waves)


# Token embedding and head


def wrong_embeddings(config: Any) -> Iterator[Mistake]:
    """Yield mistakes in the token embedding and in the head."""
    root = config.n_embd**0.5

    def scale_tokens(model: Any, swaps: Swaps) -> None:
        swaps.set(model, "wte", Tokens(model.wte, root))

    def scale_both(model: Any, swaps: Swaps) -> None:
        swaps.set(model, "drop", Scaled(root))

    def tie(model: Any, swaps: Swaps) -> None:
        swaps.set(model, "head", lambda x: F.linear(x, model.wte.weight))

    yield Mistake("the token embedding scaled by sqrt(n_embd)", scale_tokens)
    yield Mistake("token and position embedding scaled by sqrt(n_embd)", scale_both)
    if not config.tie_word_embeddings:
        yield Mistake("a head tied to the token embedding in place of the checkpoint's own", tie)


# Ids


def one_id(ids: Tensor, by: int, size: int) -> Tensor:
    return (ids + by) % size


def after(ids: Tensor, token: int) -> Tensor:
    """Put a token before the text."""
    return torch.cat([torch.full_like(ids[:, :1], token), ids], dim=-1)


def without_first(logits: Tensor) -> Tensor:
    return logits[1:]


def without_last(logits: Tensor) -> Tensor:
    return logits[:-1]


def wrong_ids(size: int, begins: dict[str, int]) -> Iterator[Mistake]:
    """Yield mistakes in what the model reads.

    Args:
        size: of the vocabulary.
        begins: tokens that a program may put before a text, by what they are called.
    """
    yield Mistake("ids shifted by one: each is one too high", ids=partial(one_id, by=1, size=size))
    yield Mistake("ids shifted by one: each is one too low", ids=partial(one_id, by=-1, size=size))
    for name, token in begins.items():
        put_before = partial(after, token=token)
        yield Mistake(f"{name} before the text", ids=put_before, logits=without_first)
        shifted = f"a text shifted by one token, with {name} before it"
        yield Mistake(shifted, ids=put_before, logits=without_last)


# Logits


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def below_largest(logits: Tensor) -> Tensor:
    return logits - logits.amax(-1, keepdim=True)


def capped(logits: Tensor, most: float) -> Tensor:
    return most * torch.tanh(logits / most)


def rolled(logits: Tensor, by: int) -> Tensor:
    return logits.roll(by, dims=-1)


def late(logits: Tensor) -> Tensor:
    """Return the logits of the token before; the first token's are not known."""
    return torch.cat([torch.full_like(logits[:1], torch.nan), logits[:-1]])


def early(logits: Tensor) -> Tensor:
    return torch.cat([logits[1:], torch.full_like(logits[:1], torch.nan)])


def last_alone(logits: Tensor) -> Tensor:
    """Repeat the logits of the last token."""
    return logits[-1:].expand_as(logits)


def scaled_logits(logits: Tensor, factor: float) -> Tensor:
    return factor * logits


def wrong_logits(width: int) -> Iterator[Mistake]:
    """Yield mistakes in what is returned.

    Args:
        width: n_embd.
    """
    yield Mistake("log-probabilities in place of logits", logits=partial(torch.log_softmax, dim=-1))
    yield Mistake("probabilities in place of logits", logits=partial(torch.softmax, dim=-1))
    yield Mistake("centred logits: their mean is subtracted at each position", logits=centred)
    yield Mistake("logits from which the largest is subtracted", logits=below_largest)
    yield Mistake("logits shifted by one token: those of the position before", logits=late)
    yield Mistake("logits shifted by one token: those of the position after", logits=early, is_causal=False)
    yield Mistake("the last position's logits at every position", logits=last_alone, is_causal=False)
    yield Mistake("logits shifted by one id: each belongs to the id below", logits=partial(rolled, by=1))
    yield Mistake("logits shifted by one id: each belongs to the id above", logits=partial(rolled, by=-1))
    yield Mistake("logits divided by sqrt(n_embd)", logits=partial(scaled_logits, factor=width**-0.5))
    yield Mistake("logits multiplied by sqrt(n_embd)", logits=partial(scaled_logits, factor=width**0.5))
    yield Mistake("logits capped by tanh at 30", logits=partial(capped, most=30.0))
    yield Mistake("logits with the wrong sign", logits=torch.neg)


# Logits with numbers that only the program knows


def shifted(logits: Tensor, theirs: Tensor) -> Tensor:
    return logits + (theirs - logits).mean(-1, keepdim=True)


def biased(logits: Tensor, theirs: Tensor) -> Tensor:
    """Add the bias of a head that fits best."""
    return logits + (theirs - logits).mean(0)


def best_multiple(logits: Tensor, theirs: Tensor) -> Tensor:
    """Multiply by the number that fits best."""
    return logits * (theirs * logits).sum() / logits.square().sum()


def unknown_logits() -> Iterator[Mistake]:
    """Yield mistakes in what is returned whose numbers are fitted."""
    added = "numbers added to the logits"  # one constant for all is both
    yield Mistake("all logits of a position shifted by one constant", fit=shifted, family=added)
    yield Mistake("a head with a bias", fit=biased, family=added)
    yield Mistake("logits multiplied by a constant", fit=best_multiple)
