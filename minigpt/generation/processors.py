"""Logits processors: what a setting of generation does to the logits of the next token.

A function here has a setting's name. It takes the setting's value and returns the processor, so that what depends only
on the value is computed once. The names, the order and the values are transformers' own.

B batch, T tokens so far, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Logits = Float[Tensor, "batch vocab"]


class TextSoFar(NamedTuple):
    """The input of a processor in addition to the logits."""

    ids: Int[Tensor, "batch seq"]  # the text so far
    prompt_length: int
    end_ids: tuple[int, ...]

    @property
    def added(self) -> Int[Tensor, "batch new"]:
        return self.ids[:, self.prompt_length :]


Process = Callable[[Logits, TextSoFar], Logits]


def logit_bias(bias: Mapping[int, float]) -> Process:
    """Add numbers to the logits of some ids, as OpenAI's API does."""
    ids = torch.tensor(list(bias), device="cpu")
    numbers = torch.tensor([*bias.values()], dtype=torch.float64, device="cpu")

    def process(logits: Logits, _: TextSoFar) -> Logits:
        added = numbers.to(logits).expand(len(logits), -1)
        return logits.index_add(1, ids.to(logits.device), added)

    return process


def repetition_penalty(penalty: float) -> Process:
    """Make tokens of the text less likely, for logits of either sign (Keskar et al. 2019, arXiv 1909.05858)."""

    def process(logits: Logits, text: TextSoFar) -> Logits:
        present = logits.gather(1, text.ids)  # (B, T)
        penalized = torch.where(present < 0, present * float(penalty), present / float(penalty))
        return logits.scatter(1, text.ids, penalized)

    return process


def frequency_penalty(penalty: float) -> Process:
    """Subtract the penalty for each time that a token has been added, as OpenAI's API does."""

    def process(logits: Logits, text: TextSoFar) -> Logits:
        subtracted = torch.full_like(text.added, -float(penalty), dtype=logits.dtype)
        return logits.scatter_add(1, text.added, subtracted)

    return process


def presence_penalty(penalty: float) -> Process:
    """Subtract the penalty where a token has been added, however often, as OpenAI's API does."""

    def process(logits: Logits, text: TextSoFar) -> Logits:
        lowered = logits.gather(1, text.added) - float(penalty)
        return logits.scatter(1, text.added, lowered)

    return process


def no_repeat_ngram_size(size: int) -> Process:
    """Exclude tokens that would complete a run of ``size`` tokens that the text already has (arXiv 1705.04304)."""

    def process(logits: Logits, text: TextSoFar) -> Logits:
        if text.ids.shape[1] < size:
            return logits
        row, place = _repeats(text.ids, size - 1).nonzero(as_tuple=True)
        banned = torch.zeros_like(logits, dtype=torch.bool)
        banned[row, text.ids[row, place + size - 1]] = True
        return logits.masked_fill(banned, -torch.inf)

    return process


def bad_words_ids(runs: Sequence[Sequence[int]]) -> Process:
    """Exclude tokens that would complete one of the runs. A run that is an end token alone stays allowed."""
    last_of: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for *begun, last in runs:
        last_of[tuple(begun)].add(last)
    lasts = {begun: _ids(tokens) for begun, tokens in last_of.items()}
    always = lasts.pop((), _ids([]))
    lengths = sorted({len(begun) for begun in lasts})

    def process(logits: Logits, text: TextSoFar) -> Logits:
        banned = torch.zeros_like(logits, dtype=torch.bool)
        banned[:, always.to(logits.device)] = True
        banned[:, [end for end in text.end_ids if 0 <= end < logits.shape[1]]] = False
        if not lengths:
            return logits.masked_fill(banned, -torch.inf)
        for row, ids in enumerate(text.ids[:, -lengths[-1] :].tolist()):
            for length in lengths:
                if length > len(ids):
                    break
                tokens = lasts.get(tuple(ids[-length:]))
                if tokens is not None:
                    banned[row, tokens.to(logits.device)] = True
        return logits.masked_fill(banned, -torch.inf)

    return process


def min_new_tokens(least: int) -> Process:
    """Exclude end tokens until the text has ``least`` new tokens."""

    def process(logits: Logits, text: TextSoFar) -> Logits:
        if text.added.shape[1] >= least:
            return logits
        return _without(logits, _ids(text.end_ids))

    return process


def suppress_tokens(tokens: Sequence[int]) -> Process:
    """Exclude these tokens."""
    excluded = _ids(tokens)
    return lambda logits, _: _without(logits, excluded)


def temperature(value: float) -> Process:
    """Divide the logits: below 1 likely tokens become likelier, above 1 less likely."""
    return lambda logits, _: logits / float(value)


def top_k(k: int) -> Process:
    """Keep the k highest logits and those equal to the lowest of them (Fan et al. 2018, arXiv 1805.04833)."""

    def process(logits: Logits, _: TextSoFar) -> Logits:
        lowest_kept = logits.topk(min(k, logits.shape[-1])).values[..., -1:]  # (B, 1)
        return logits.masked_fill(logits < lowest_kept, -torch.inf)

    return process


def top_p(p: float) -> Process:
    """Keep the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2019, arXiv 1904.09751)."""

    def process(logits: Logits, _: TextSoFar) -> Logits:
        ascending, order = logits.sort()  # both (B, V)
        in_the_tail = ascending.softmax(-1).cumsum(-1) <= 1 - float(p)
        in_the_tail[..., -1].fill_(False)
        return logits.masked_fill(in_the_tail.scatter(1, order, in_the_tail), -torch.inf)

    return process


def min_p(p: float) -> Process:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)."""

    def process(logits: Logits, _: TextSoFar) -> Logits:
        probabilities = logits.softmax(-1)  # (B, V)
        unlikely = probabilities < float(p) * probabilities.amax(-1, keepdim=True)
        likeliest = probabilities.topk(1).indices  # (B, 1)
        return logits.masked_fill(unlikely.scatter(-1, likeliest, False), -torch.inf)

    return process


PROCESSORS: dict[str, Callable[[Any], Process]] = {  # in the order in which they run
    make.__name__: make
    for make in (
        logit_bias, repetition_penalty, frequency_penalty, presence_penalty, no_repeat_ngram_size, bad_words_ids,
        min_new_tokens, suppress_tokens, temperature, top_k, top_p, min_p,
    )
}  # fmt: skip


def _ids(tokens: Iterable[int]) -> Int[Tensor, " ids"]:
    return torch.tensor(sorted({*tokens}), dtype=torch.long, device="cpu")


def _without(logits: Logits, tokens: Int[Tensor, " ids"]) -> Logits:
    known = tokens[(tokens >= 0) & (tokens < logits.shape[-1])].to(logits.device)
    return logits.index_fill(1, known, -torch.inf)


def _repeats(ids: Int[Tensor, "batch seq"], size: int) -> Bool[Tensor, "batch places"]:
    """Return where the last ``size`` ids occur earlier: True at i if ids i to i + size equal them.

    Runs of a length are numbered: equal runs have one number. The numbers of two runs that overlap or touch give the
    number of the longer run that they cover, up to twice as long (Karp, Miller and Rosenberg, STOC 1972).
    """
    if not size:
        return torch.ones_like(ids, dtype=torch.bool)
    numbers, length = ids, 1
    while length < size:
        step = min(length, size - length)
        pairs = (numbers[:, :-step] << 31) + numbers[:, step:]
        numbers = torch.unique(pairs, return_inverse=True)[1]
        length += step
    return numbers[:, :-1] == numbers[:, -1:]
