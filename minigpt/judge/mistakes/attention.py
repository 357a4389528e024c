"""Mistakes in attention: scores, mask, softmax, and how queries, keys, values and heads are split.

B batch, T tokens, C embedding, H heads, D = C / H width of a head.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.judge.mistakes.mistake import Mistake, Swaps, as_given

Heads = Float[Tensor, "batch heads seq head"]
Scores = Float[Tensor, "batch heads seq seq"]
Mixed = Float[Tensor, "batch seq embd"]
Split = tuple[Heads, Heads, Heads]

ORDERS = ("qvk", "kqv", "kvq", "vqk", "vkq")
PLACE = {"q": 0, "k": 1, "v": 2}


class Attention(nn.Module):
    """Attention in steps. A mistake replaces one of them, and a second mistake another one.

    Args:
        attention: the module whose projections, heads and scale it takes, and whose steps if it has some.
        steps: split, score, hide, weigh, finish, hold or merge, by name.
    """

    def __init__(self, attention: Any, **steps: Callable[..., Any]) -> None:
        super().__init__()
        self.c_attn, self.c_proj = attention.c_attn, attention.c_proj
        self.n_head, self.scale = attention.n_head, attention.scale
        self.steps: dict[str, Callable[..., Any]] = {**getattr(attention, "steps", STEPS), **steps}

    def forward(self, x: Mixed, mask: Tensor | None = None, cache: object = None) -> Mixed:
        """Return what each token gathers from the tokens it sees, of a whole text."""
        steps = self.steps
        q, k, v = steps["split"](self.c_attn(x), self.n_head)
        scores = steps["score"](q, steps["hold"](k), self.scale)
        weights = steps["finish"](steps["weigh"](steps["hide"](scores)))
        return self.c_proj(steps["merge"](weights.to(v.dtype) @ steps["hold"](v)))


# The steps as they are right


def split(qkv: Tensor, heads: int) -> Split:
    """(B, T, 3C) -> 3 x (B, H, T, D)."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def score(q: Heads, k: Heads, scale: float) -> Scores:
    return q @ k.mT * scale


def below(scores: Scores, diagonal: int = 0) -> Tensor:
    """Return True (T, T) where a query sees a key: up to so many positions after itself."""
    square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return square.tril(diagonal)


def hide(scores: Scores, diagonal: int = 0) -> Scores:
    return scores.masked_fill(~below(scores, diagonal), -math.inf)


def merge(y: Heads) -> Mixed:
    """(B, H, T, D) -> (B, T, C)."""
    return y.transpose(1, 2).flatten(2)


STEPS: dict[str, Callable[..., Any]] = {
    "split": split,
    "hold": as_given,
    "score": score,
    "hide": hide,
    "weigh": partial(torch.softmax, dim=-1),
    "finish": as_given,
    "merge": merge,
}

# The steps as people get them wrong


def in_order(order: str, qkv: Tensor, heads: int) -> Split:
    """Read the thirds in another order."""
    thirds = split(qkv, heads)
    first, second, third = (thirds[PLACE[name]] for name in order)
    return first, second, third


def by_head(qkv: Tensor, heads: int) -> Split:
    """Read queries, keys and values side by side for each head."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, heads, 3, -1).permute(3, 0, 2, 1, 4).unbind()
    return q, k, v


def by_number(qkv: Tensor, heads: int) -> Split:
    """Read queries, keys and values one number each in turn."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, heads, -1, 3).permute(4, 0, 2, 1, 3).unbind()
    return q, k, v


def strided(qkv: Tensor, heads: int) -> Split:
    """Read number d of head h at d * H + h."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, 3, -1, heads).permute(2, 0, 4, 1, 3).unbind()
    return q, k, v


def untransposed(qkv: Tensor, heads: int) -> Split:
    """Read (B, T, C) as (B, H, T, D)."""
    batch, seq, _ = qkv.shape
    q, k, v = (part.reshape(batch, heads, seq, -1) for part in qkv.chunk(3, dim=-1))
    return q, k, v


def merge_strided(y: Heads) -> Mixed:
    return y.permute(0, 2, 3, 1).flatten(2)


def merge_untransposed(y: Heads) -> Mixed:
    batch, heads, seq, size = y.shape
    return y.reshape(batch, seq, heads * size)


def rotated(x: Heads, *, pairs: bool) -> Heads:
    """Turn queries or keys by their position (arXiv 2104.09864): pairs side by side, or halves."""
    seq, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(half, dtype=x.dtype, device=x.device) / half
    turns = torch.arange(seq, dtype=x.dtype, device=x.device)[:, None] * 10_000.0**-angles  # (T, D / 2)
    first, second = x[..., :half], x[..., half : 2 * half]
    if pairs:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    turned = (first * turns.cos() - second * turns.sin(), second * turns.cos() + first * turns.sin())
    return torch.stack(turned, dim=-1).flatten(-2) if pairs else torch.cat(turned, dim=-1)


def score_rotated(q: Heads, k: Heads, scale: float, *, pairs: bool) -> Scores:
    return score(rotated(q, pairs=pairs), rotated(k, pairs=pairs), scale)


def see_all(scores: Scores) -> Scores:
    return scores


def see_later(scores: Scores) -> Scores:
    """Hide what is before a token, in place of what is after it."""
    return scores.masked_fill(below(scores, -1), -math.inf)


def hide_finitely(scores: Scores) -> Scores:
    """Hide a token from itself by a low number, so that the first one sees all."""
    return scores.masked_fill(~below(scores, -1), torch.finfo(scores.dtype).min)


def hide_but_first(scores: Scores) -> Scores:
    """Hide a token from itself, but the first one."""
    seen = below(scores, -1)
    seen[0, 0] = True
    return scores.masked_fill(~seen, -math.inf)


def zero(scores: Scores) -> Scores:
    """Multiply the scores by the mask."""
    return scores * below(scores)


def lower(scores: Scores, by: float) -> Scores:
    """Add a number to the scores of later tokens."""
    return scores + (~below(scores)).to(scores.dtype) * by


def weigh_somehow(scores: Scores) -> Scores:
    """Let a token that sees nothing gather nothing."""
    return torch.softmax(scores, dim=-1).nan_to_num(0.0)


def over_heads(scores: Scores) -> Scores:
    return torch.softmax(scores, dim=1).nan_to_num(0.0)


def over_all(scores: Scores) -> Scores:
    """Normalize over all queries and keys of a head together."""
    return scores.flatten(2).softmax(dim=-1).view_as(scores)


def sum_of_exp(scores: Scores) -> Scores:
    """Leave out the division of the softmax."""
    return scores.exp()


# The table


def attending(
    words: str, *, is_causal: bool = True, error: float = 0.0, family: str = "", **steps: Callable[..., Any]
) -> Mistake:
    """Return a mistake that replaces steps of attention in every block."""

    def put(model: Any, swaps: Swaps) -> None:
        for block in model.h:
            swaps.set(block, "attn", Attention(block.attn, **steps))

    return Mistake(words, put, is_causal=is_causal, error=error, family=family)


def scaling(words: str, factor: Callable[[int], float]) -> Mistake:
    """Return a mistake that multiplies the right scale of the scores by a factor of each layer."""

    def put(model: Any, swaps: Swaps) -> None:
        for layer, block in enumerate(model.h):
            swaps.set(block.attn, "scale", block.attn.scale * factor(layer))

    return Mistake(words, put)


def heads_of(words: str, heads: int, before: int) -> Mistake:
    """Return a mistake in the number of heads, with the scale of their width."""

    def put(model: Any, swaps: Swaps) -> None:
        for block in model.h:
            swaps.set(block.attn, "n_head", heads)
            swaps.set(block.attn, "scale", block.attn.scale * math.sqrt(heads / before))

    return Mistake(words, put)


def wrong_scales(config: Any) -> Iterator[Mistake]:
    """Yield mistakes in the factor of the scores."""
    heads, width = config.n_head, config.n_embd
    size = width // heads
    if config.scale_attn_weights:
        yield scaling("scores that are not scaled", lambda layer: size**0.5)
        yield scaling("scores scaled twice: by 1 / D in place of 1 / sqrt(D)", lambda layer: size**-0.5)
        yield scaling("scores scaled by 1 / sqrt(n_embd) in place of 1 / sqrt(head size)", lambda layer: heads**-0.5)
        yield scaling("scores scaled by 1 / n_embd", lambda layer: size**0.5 / width)
        yield scaling("scores multiplied by sqrt(D), not divided by it", lambda layer: size)
        yield scaling("scores scaled by 1 / sqrt(n_head)", lambda layer: (size / heads) ** 0.5)
        yield scaling("scores scaled by 1 / sqrt(2 D)", lambda layer: 0.5**0.5)
    else:
        yield scaling("scores scaled by 1 / sqrt(D), which the config does not ask for", lambda layer: size**-0.5)
    if config.scale_attn_by_inverse_layer_idx:
        yield scaling("scores not divided by the layer's number, as the config asks", lambda layer: layer + 1)
    else:
        yield scaling("scores divided by the layer's number too", lambda layer: 1 / (layer + 1))
        yield scaling("scores multiplied by the layer's number too", lambda layer: layer + 1)


def wrong_masks() -> Iterator[Mistake]:
    """Yield mistakes in which tokens see which."""
    yield attending("no causal mask", hide=see_all, is_causal=False)
    one_later, two_later = partial(hide, diagonal=1), partial(hide, diagonal=2)
    yield attending("a mask off by one: each token sees the next one too", hide=one_later, is_causal=False)
    yield attending("a mask off by two: each token sees the next two", hide=two_later, is_causal=False)
    unseen = "a mask off by one: no token sees itself"
    yield attending(unseen, hide=hide_finitely, is_causal=False, family=unseen)
    yield attending(unseen, hide=partial(hide, diagonal=-1), weigh=weigh_somehow, family=unseen)
    yield attending(unseen, hide=hide_but_first, family=unseen)
    turned = "a mask the wrong way round: each token sees itself and later ones"
    yield attending(turned, hide=see_later, is_causal=False)
    yield attending("0 in place of -inf where the mask hides a score", hide=zero, is_causal=False)
    for by in (-1.0, -10.0, -100.0):
        words = f"{by:g} in place of -inf where the mask hides a score"
        yield attending(words, hide=partial(lower, by=by), is_causal=False)
    yield attending("the mask of ones and zeros added to the scores", hide=partial(lower, by=1.0), is_causal=False)
    after = "the causal mask after the softmax, so that weights do not add up to 1"
    yield attending(after, hide=see_all, finish=zero, is_causal=False)


def wrong_softmaxes() -> Iterator[Mistake]:
    """Yield mistakes in how scores become weights."""
    by_query = partial(torch.softmax, dim=-2)
    yield attending("softmax over the queries in place of the keys", weigh=by_query, is_causal=False)
    yield attending("softmax over the heads in place of the keys", weigh=over_heads)
    yield attending("softmax over all queries and keys together", weigh=over_all, is_causal=False)
    yield attending("a softmax that does not divide by its sum", weigh=sum_of_exp)


def late_scale(scale: float) -> Mistake:
    """Return the mistake of a softmax before the scale."""

    def unscaled(q: Heads, k: Heads, _: float) -> Scores:
        return q @ k.mT

    def scaled(weights: Scores) -> Scores:
        return weights * scale

    return attending("softmax before the scores are scaled", score=unscaled, finish=scaled)


def wrong_splits(config: Any) -> Iterator[Mistake]:
    """Yield mistakes in how queries, keys, values and heads are read from c_attn's output."""
    for order in ORDERS:
        words = "q, k and v read in the order {}, {}, {}".format(*order)
        if order == "qvk":
            words += " (k and v exchanged)"
        if order == "kqv":
            words += " (q and k exchanged)"
        yield attending(words, split=partial(in_order, order))
    yield attending("the keys read as values too", split=partial(in_order, "qkk"))
    yield attending("the values read as keys too", split=partial(in_order, "qvv"))
    yield attending("the queries read as keys too", split=partial(in_order, "qqv"))
    yield attending("q, k and v interleaved per head, as Megatron and BLOOM store them", split=by_head)
    yield attending("q, k and v interleaved number by number", split=by_number)
    strided_words = "heads split the other way: number d of head h at d * H + h"
    yield attending(strided_words, split=strided, family=strided_words)
    yield attending(strided_words, split=strided, merge=merge_strided, family=strided_words)
    yield attending("heads merged the other way: number d of head h to d * H + h", merge=merge_strided)
    reshaped = "heads split by a reshape without a transposition"
    yield attending(reshaped, split=untransposed, is_causal=False, family=reshaped)
    yield attending(reshaped, split=untransposed, merge=merge_untransposed, is_causal=False, family=reshaped)
    yield attending("heads merged by a reshape without a transposition", merge=merge_untransposed, is_causal=False)
    heads = config.n_head
    if heads > 1:
        yield heads_of(f"one head in place of {heads}", 1, heads)
    if heads > 2 and heads % 2 == 0:
        yield heads_of(f"{heads // 2} heads in place of {heads}", heads // 2, heads)
    if config.n_embd % (2 * heads) == 0:
        yield heads_of(f"{2 * heads} heads in place of {heads}", 2 * heads, heads)


def wrong_attention(config: Any) -> Iterator[Mistake]:
    """Yield the mistakes in attention, the most usual first."""
    yield from wrong_scales(config)
    yield from wrong_masks()
    yield from wrong_softmaxes()
    yield late_scale((config.n_embd // config.n_head) ** -0.5)
    yield from wrong_splits(config)
    words = "rotary positions in q and k too"
    yield attending(words, score=partial(score_rotated, pairs=False), family=words)
    yield attending(words, score=partial(score_rotated, pairs=True), family=words)
