"""Mistakes in attention: scores, mask, softmax, and how queries, keys, values and heads are split.

B batch, T tokens, C embedding, H heads, D = C / H width of a head.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.judge.mistakes.mistake import OF_GPT2, Mistake, MistakePart, Put, Swaps, as_given, mistake

Heads = Float[Tensor, "batch heads seq head"]
Scores = Float[Tensor, "batch heads seq seq"]
Mixed = Float[Tensor, "batch seq embd"]
Split = tuple[Heads, Heads, Heads]
Step = Callable[..., Any]

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
        if all(
            steps[name] is STEPS[name] for name in BEHIND_SPLIT
        ):  # in one call, in which a program's rounding is put
            y = F.scaled_dot_product_attention(q, steps["hold"](k), steps["hold"](v), is_causal=True, scale=self.scale)
            return self.c_proj(steps["merge"](y))
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

BEHIND_SPLIT = ("score", "hide", "weigh", "finish")

# The steps as people get them wrong


def in_attention(**steps: Step) -> Put:
    """Return what replaces steps of attention in every block."""

    def put(model: Any, swaps: Swaps) -> None:
        for block in model.h:
            swaps.set(block, "attn", Attention(block.attn, **steps))

    return put


OF_SCORES: list[tuple[str, dict[str, Step], dict[str, Any]]] = []  # words, steps, and what else is known of a mistake


def step(
    name: str, words: str, *, is_causal: bool = True, cure: str = "", **others: Callable[..., Any]
) -> Callable[[Step], Step]:
    """Decorate a function in place of a step of attention.

    Args:
        others: steps that are replaced too.
    """
    about = {
        "family": words,
        "is_causal": is_causal,
        "cure": cure,
        "part": MistakePart.MASK if name == "hide" else None,
    }

    def add(function: Step) -> Step:
        steps = {name: function, **others}
        if steps.keys() <= {"hide", "weigh", "finish"}:
            OF_SCORES.append((words, steps, about))
        return mistake(words, into=lambda function: in_attention(**{name: function}, **others), **about)(function)

    return add


# How queries, keys, values and heads are split and merged


@mistake("no attn.c_proj")
def no_projection(model: Any, swaps: Swaps) -> None:
    for block in model.h:
        swaps.set(block.attn, "c_proj", nn.Identity())


SPLIT_BY_RESHAPE = "heads split by a reshape without a transposition"
STRIDED = "heads split the other way: number d of head h at d * H + h"


@step("merge", "heads merged the other way: number d of head h to d * H + h")
def merge_strided(y: Heads) -> Mixed:
    return y.permute(0, 2, 3, 1).flatten(2)


@step("merge", "heads merged by a reshape without a transposition", is_causal=False)
def merge_untransposed(y: Heads) -> Mixed:
    batch, heads, seq, size = y.shape
    return y.reshape(batch, seq, heads * size)


def in_order(order: str, qkv: Tensor, heads: int) -> Split:
    """Read the thirds in another order."""
    thirds = split(qkv, heads)
    first, second, third = (thirds[PLACE[name]] for name in order)
    return first, second, third


ORDERS = ("qvk", "kqv", "kvq", "vqk", "vkq")
EXCHANGED = {"qvk": " (k and v exchanged)", "kqv": " (q and k exchanged)"}
for order in ORDERS:
    words = "q, k and v read in the order {}, {}, {}".format(*order) + EXCHANGED.get(order, "")
    step("split", words)(partial(in_order, order))
step("split", "the keys read as values too")(partial(in_order, "qkk"))
step("split", "the values read as keys too")(partial(in_order, "qvv"))
step("split", "the queries read as keys too")(partial(in_order, "qqv"))


@step("split", "q, k and v interleaved per head, as Megatron and BLOOM store them")
def by_head(qkv: Tensor, heads: int) -> Split:
    """Read queries, keys and values side by side for each head."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, heads, 3, -1).permute(3, 0, 2, 1, 4).unbind()
    return q, k, v


@step("split", "q, k and v interleaved number by number")
def by_number(qkv: Tensor, heads: int) -> Split:
    """Read queries, keys and values one number each in turn."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, heads, -1, 3).permute(4, 0, 2, 1, 3).unbind()
    return q, k, v


@step("split", STRIDED)
@step("split", STRIDED, merge=merge_strided)
def strided(qkv: Tensor, heads: int) -> Split:
    """Read number d of head h at d * H + h."""
    batch, seq, _ = qkv.shape
    q, k, v = qkv.view(batch, seq, 3, -1, heads).permute(2, 0, 4, 1, 3).unbind()
    return q, k, v


@step("split", SPLIT_BY_RESHAPE, is_causal=False)
@step("split", SPLIT_BY_RESHAPE, is_causal=False, merge=merge_untransposed)
def untransposed(qkv: Tensor, heads: int) -> Split:
    """Read (B, T, C) as (B, H, T, D)."""
    batch, seq, _ = qkv.shape
    q, k, v = (part.reshape(batch, heads, seq, -1) for part in qkv.chunk(3, dim=-1))
    return q, k, v


@OF_GPT2.add
def wrong_numbers_of_heads(config: Any) -> Iterator[Mistake]:
    """Yield mistakes in the number of heads, with the scale of their width."""
    right = config.n_head
    for heads in {1, right // 2, 2 * right} - {0, right}:
        if config.n_embd % heads:
            continue

        def put(model: Any, swaps: Swaps, heads: int = heads) -> None:
            for block in model.h:
                swaps.set(block.attn, "n_head", heads)
                swaps.set(block.attn, "scale", block.attn.scale * math.sqrt(heads / right))

        yield Mistake(f"{'one head' if heads == 1 else f'{heads} heads'} in place of {right}", put)


# Scores


def scaling(words: str, factor: Callable[[int], float], **about: Any) -> Mistake:
    """Return a mistake that multiplies the right scale of the scores by a factor of each layer.

    Args:
        about: further attributes of ``Mistake``.
    """

    def put(model: Any, swaps: Swaps) -> None:
        for layer, block in enumerate(model.h):
            swaps.set(block.attn, "scale", block.attn.scale * factor(layer))

    return Mistake(words, put, part=MistakePart.SCALE, **about)


@OF_GPT2.add
def wrong_scales(config: Any) -> Iterator[Mistake]:
    """Yield mistakes in the factor of the scores."""
    heads, width = config.n_head, config.n_embd
    size = width // heads
    if config.scale_attn_weights:
        cure = "Write q @ k.T / sqrt(head_size) in place of q @ k.T."
        yield scaling("scores that are not scaled", lambda layer: size**0.5, cure=cure)
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


@mistake("softmax before the scores are scaled")
def scale_late(model: Any, swaps: Swaps) -> None:
    for block in model.h:
        scale = block.attn.scale
        late = Attention(
            block.attn, score=lambda q, k, _: q @ k.mT, finish=lambda weights, scale=scale: weights * scale
        )
        swaps.set(block, "attn", late)


ROTARY = "rotary positions in q and k too"


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


@step("score", ROTARY)
def score_rotated_pairs(q: Heads, k: Heads, scale: float) -> Scores:
    return score(rotated(q, pairs=True), rotated(k, pairs=True), scale)


@step("score", ROTARY)
def score_rotated_halves(q: Heads, k: Heads, scale: float) -> Scores:
    return score(rotated(q, pairs=False), rotated(k, pairs=False), scale)


# The mask

NOT_ITSELF = "a mask off by one: no token sees itself"
step("hide", "a mask off by one: each token sees the next one too", is_causal=False)(partial(hide, diagonal=1))
step("hide", "a mask off by two: each token sees the next two", is_causal=False)(partial(hide, diagonal=2))


@step("hide", "no causal mask", is_causal=False)
def see_all(scores: Scores) -> Scores:
    return scores


@step("hide", "a mask the wrong way round: each token sees itself and later ones", is_causal=False)
def see_later(scores: Scores) -> Scores:
    """Hide what is before a token, in place of what is after it."""
    return scores.masked_fill(below(scores, -1), -math.inf)


@step("hide", "a mask the wrong way round: each token sees later ones alone", is_causal=False)
def see_later_alone(scores: Scores) -> Scores:
    """Hide a token and what is before it by a low number, so that the last one sees all."""
    return scores.masked_fill(below(scores), torch.finfo(scores.dtype).min)


@step("hide", NOT_ITSELF, is_causal=False)
def hide_finitely(scores: Scores) -> Scores:
    """Hide a token from itself by a low number, so that the first one sees all."""
    return scores.masked_fill(~below(scores, -1), torch.finfo(scores.dtype).min)


@step("hide", NOT_ITSELF)
def hide_but_first(scores: Scores) -> Scores:
    """Hide a token from itself, but the first one."""
    seen = below(scores, -1)
    seen[0, 0] = True
    return scores.masked_fill(~seen, -math.inf)


@step("weigh", NOT_ITSELF, hide=partial(hide, diagonal=-1))
def weigh_somehow(scores: Scores) -> Scores:
    """Let a token that sees nothing gather nothing."""
    return torch.softmax(scores, dim=-1).nan_to_num(0.0)


@step("hide", "0 in place of -inf where the mask hides a score", is_causal=False)
@step("finish", "the causal mask after the softmax, so that weights do not add up to 1", is_causal=False, hide=see_all)
def zero(scores: Scores) -> Scores:
    """Multiply the scores, or the weights, by the mask."""
    return scores * below(scores)


def lower(scores: Scores, by: float) -> Scores:
    """Add a number to the scores of later tokens."""
    return scores + (~below(scores)).to(scores.dtype) * by


def filled(scores: Scores, by: float) -> Scores:
    """Put a number in place of the scores of later tokens."""
    return scores.masked_fill(~below(scores), by)


for by in (-1.0, -math.e, -10.0, -100.0):
    for fill in (lower, filled):
        step("hide", f"{by:g} in place of -inf where the mask hides a score", is_causal=False)(partial(fill, by=by))
step("hide", "the mask of ones and zeros added to the scores", is_causal=False)(partial(lower, by=1.0))


# The softmax

OVER_KEYS = "Write softmax(scores, -1), over the keys, in place of softmax(scores, -2)."
OVER_QUERIES = "softmax over the queries in place of the keys"
step("weigh", OVER_QUERIES, is_causal=False, cure=OVER_KEYS)(partial(torch.softmax, dim=-2))


@step("weigh", "softmax over the heads in place of the keys")
def over_heads(scores: Scores) -> Scores:
    return torch.softmax(scores, dim=1).nan_to_num(0.0)


@step("weigh", "softmax over all queries and keys together", is_causal=False)
def over_all(scores: Scores) -> Scores:
    """Normalize over all queries and keys of a head together."""
    return scores.flatten(2).softmax(dim=-1).view_as(scores)


@step("weigh", "a softmax that does not divide by its sum")
def sum_of_exp(scores: Scores) -> Scores:
    """Leave out the division of the softmax."""
    return scores.exp()
