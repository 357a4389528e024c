"""Mistakes outside of the blocks: ids, positions, token embedding, head and logits.

T tokens, C embedding, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.judge.mistakes.mistake import OF_ANY, Mistake, Put, Swaps, mistake

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


def looked_up(look_up: OfPositions) -> Put:
    """Return what looks the position embeddings up in another way."""
    return lambda model, swaps: swaps.set(model, "wpe", Positions(model.wpe, look_up))


positioned = partial(mistake, into=looked_up)


def later(weight: Tensor, position_ids: Tensor, by: int) -> Tensor:
    return weight[(position_ids + by).clamp(max=len(weight) - 1)]


positioned("positions from 1", cure="Write arange(T) in place of arange(1, T + 1).")(partial(later, by=1))
positioned("positions from 2")(partial(later, by=2))


@positioned("no positions")
def none(weight: Tensor, position_ids: Tensor) -> Tensor:
    return torch.zeros_like(weight[position_ids])


@positioned("positions added twice")
def twice(weight: Tensor, position_ids: Tensor) -> Tensor:
    return 2 * weight[position_ids]


@positioned("position 0 for every token")
def all_first(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[torch.zeros_like(position_ids)]


@positioned("positions from -1: the first token has the last one")
def one_less(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[position_ids - 1]


@positioned("the last position for every token", is_causal=False)
def all_last(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[position_ids.amax().expand_as(position_ids)]


@positioned("positions in reverse", is_causal=False)
def backwards(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[position_ids.flip(-1)]


@positioned("position embeddings scaled by sqrt(n_embd)")
def grown(weight: Tensor, position_ids: Tensor) -> Tensor:
    return weight[position_ids] * weight.shape[-1] ** 0.5


@positioned("sines and cosines in place of the learned positions")
def waves(weight: Tensor, position_ids: Tensor) -> Tensor:
    """Return sines and cosines (Vaswani et al. 2017, section 3.5)."""
    width = weight.shape[-1]
    powers = torch.arange(0, width, 2, dtype=weight.dtype, device=weight.device) / width
    angles = position_ids[..., None] * 10_000.0**-powers
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]


# Positions of a text that is written token by token, or beside longer ones


def behind_the_prompt(change: Callable[[Tensor, int], Tensor]) -> Put:
    """Return what gives the tokens behind the prompt other positions."""

    def put(model: Any, swaps: Swaps) -> None:
        def look_up(weight: Tensor, position_ids: Tensor) -> Tensor:
            others = change(position_ids, swaps.new_from).clamp(0, len(weight) - 1)
            return weight[torch.where(position_ids < swaps.new_from, position_ids, others)]

        swaps.set(model, "wpe", Positions(model.wpe, look_up))

    return put


written = partial(mistake, into=behind_the_prompt)
written("position 0 for every token behind the prompt")(lambda positions, length: 0 * positions)
written("the prompt's last position for every token behind it")(lambda positions, length: 0 * positions + length - 1)
written("the prompt's length as the position of every token behind it")(
    lambda positions, length: 0 * positions + length
)
written("positions from 0 again behind the prompt")(lambda positions, length: positions - length)
written("positions behind the prompt one too low")(lambda positions, length: positions - 1)
written("positions behind the prompt one too high")(lambda positions, length: positions + 1)


@mistake("no positions behind the prompt")
def none_behind_the_prompt(model: Any, swaps: Swaps) -> None:
    def look_up(weight: Tensor, position_ids: Tensor) -> Tensor:
        return weight[position_ids] * (position_ids < swaps.new_from)[..., None]

    swaps.set(model, "wpe", Positions(model.wpe, look_up))


@mistake("positions that count the padding before a text, up to the longest one's length")
def after_padding(model: Any, swaps: Swaps) -> None:
    swaps.set(model, "wpe", Positions(model.wpe, partial(later, by=swaps.padding)))


# Token embedding and head


@mistake("the token embedding scaled by sqrt(n_embd)")
def scale_tokens(model: Any, swaps: Swaps) -> None:
    swaps.set(model, "wte", Tokens(model.wte, model.config.n_embd**0.5))


@mistake("token and position embedding scaled by sqrt(n_embd)")
def scale_both(model: Any, swaps: Swaps) -> None:
    swaps.set(model, "drop", Scaled(model.config.n_embd**0.5))


@mistake(
    "a head tied to the token embedding in place of the checkpoint's own",
    when=lambda config: not config.tie_word_embeddings,
)
def tie(model: Any, swaps: Swaps) -> None:
    swaps.set(model, "head", lambda x: F.linear(x, model.wte.weight))


# Ids


def unknown_first(logits: Tensor) -> Tensor:
    """Put a row before others that is not known."""
    return F.pad(logits, (0, 0, 1, 0), value=torch.nan)


def without_first(logits: Tensor) -> Tensor:
    return logits[1:]


def without_last(logits: Tensor) -> Tensor:
    return logits[:-1]


@OF_ANY.add
def wrong_ids(shape: Any) -> Iterator[Mistake]:
    """Yield ids that are off by one, and texts with another token before them."""
    size = shape.vocab_size
    yield Mistake("ids shifted by one: each is one too high", ids=lambda ids: (ids + 1) % size)
    yield Mistake("ids shifted by one: each is one too low", ids=lambda ids: (ids - 1) % size)
    begins = {}
    if shape.eos_token_ids:
        begins["an end-of-text token"] = shape.eos_token_ids[0]
    if shape.bos_token_id not in (None, *begins.values()):
        begins["a BOS token"] = shape.bos_token_id
    if 0 not in begins.values():
        begins["id 0"] = 0
    yield Mistake(
        "a text without its first token", ids=lambda ids: ids[:, 1:] if ids.shape[1] > 1 else ids, logits=unknown_first
    )
    for name, token in begins.items():
        put_before = partial(F.pad, pad=(1, 0), value=token)
        yield Mistake(f"{name} before the text", ids=put_before, logits=without_first)
        shifted = f"a text shifted by one token, with {name} before it"
        yield Mistake(shifted, ids=put_before, logits=without_last)


# Logits


returned = partial(mistake, role="logits", table=OF_ANY)
LOGITS = "Write logits in place of {}(logits)."
returned("log-probabilities in place of logits", cure=LOGITS.format("log_softmax"))(partial(torch.log_softmax, dim=-1))
returned("probabilities in place of logits", cure=LOGITS.format("softmax"))(partial(torch.softmax, dim=-1))
returned("logits shifted by one id: each belongs to the id below")(partial(torch.roll, shifts=1, dims=-1))
returned("logits shifted by one id: each belongs to the id above")(partial(torch.roll, shifts=-1, dims=-1))
returned("logits with the wrong sign")(torch.neg)


@returned("centred logits: their mean is subtracted at each position")
def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


@returned("logits from which the largest is subtracted")
def below_largest(logits: Tensor) -> Tensor:
    return logits - logits.amax(-1, keepdim=True)


@returned("logits shifted by one token: those of the position before")
def late(logits: Tensor) -> Tensor:
    """Return the logits of the token before; the first token's are not known."""
    return torch.cat([torch.full_like(logits[:1], torch.nan), logits[:-1]])


@returned("logits shifted by one token: those of the position after", is_causal=False)
def early(logits: Tensor) -> Tensor:
    return torch.cat([logits[1:], torch.full_like(logits[:1], torch.nan)])


@returned("the last position's logits at every position", is_causal=False)
def last_alone(logits: Tensor) -> Tensor:
    """Repeat the logits of the last token."""
    return logits[-1:].expand_as(logits)


@returned("logits capped by tanh at 30")
def capped(logits: Tensor) -> Tensor:
    return 30.0 * torch.tanh(logits / 30.0)


@OF_ANY.add
def scaled_logits(shape: Any) -> Iterator[Mistake]:
    """Yield logits times a power of the width."""
    root = shape.n_embd**0.5
    yield Mistake("logits divided by sqrt(n_embd)", logits=lambda logits: logits / root)
    yield Mistake("logits multiplied by sqrt(n_embd)", logits=lambda logits: logits * root)


# Logits with numbers that only the program knows


fitted = partial(mistake, role="fit", table=OF_ANY)


@fitted("all logits of a position shifted by one constant", family="numbers added to the logits")
def shifted(logits: Tensor, theirs: Tensor) -> Tensor:
    return logits + (theirs - logits).mean(-1, keepdim=True)


@fitted("a head with a bias", family="numbers added to the logits", rank=1)  # one constant for all is both
def biased(logits: Tensor, theirs: Tensor) -> Tensor:
    """Add the bias of a head that fits best."""
    return logits + (theirs - logits).mean(0)


@fitted("logits multiplied by a constant")
def best_multiple(logits: Tensor, theirs: Tensor) -> Tensor:
    """Multiply by the number that fits best."""
    return logits * (theirs * logits).sum() / logits.square().sum()
