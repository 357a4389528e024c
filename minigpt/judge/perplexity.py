"""Perplexity on a text, by windows that overlap so that every token is predicted from a long past."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.device import Progress
from minigpt.engine.kernel import step_of
from minigpt.errors import GenerationError
from minigpt.files import read_text
from minigpt.generation.batch import read_piece
from minigpt.judge.measures import AT_ONCE, perplexity_of
from minigpt.model import GPT2
from minigpt.model.checks import check_known
from minigpt.tokenizer import Tokenizer


def perplexity(model: GPT2, tokenizer: Tokenizer, text: str, *, progress: Progress | None = None) -> float:
    """Return exp of the mean negative log-likelihood of a token of ``text``.

    The text is read in windows as long as the model's context, which overlap by half. Each token but the first counts
    once, and is predicted from at least half a context where the text has one. ``minigpt.parity(text=...)`` computes
    the same.

    Raises:
        GenerationError: if the text has fewer than two tokens or one that the model has no embedding for, or the
            model's context is one token.
    """
    ids = tokenizer.encode(text)
    require_predictable("the text", ids, model.config.n_positions)
    return perplexity_of_ids(model, ids, progress)


def perplexity_of_ids(model: GPT2, ids: list[int], progress: Progress | None = None) -> float:
    """Return the perplexity of the tokens of a text."""
    losses = window_losses(model, ids, progress)
    return perplexity_of(sum(loss for _, loss in losses), len(ids) - 1)


def window_losses(model: GPT2, ids: list[int], progress: Progress | None = None) -> list[tuple[int, float]]:
    """Return of each window how many tokens it counts, and their loss in nats; nothing of an empty text."""
    losses = []
    if ids:
        check_known(torch.tensor([ids]), model.config.vocab_size)
    for start, first, end in windows_of(len(ids), model.config.n_positions):
        if progress is not None:
            progress(f"token {first:,} of {len(ids):,}", first / len(ids))
        losses.append((end - first, window_loss(model, ids, start, first, end)))
    return losses


@torch.inference_mode()
def window_loss(model: GPT2, ids: list[int], start: int, first: int, end: int) -> float:
    """Return the loss in nats of tokens ``first`` to ``end``, when the model reads tokens ``start`` to ``end``."""
    loss = 0.0
    for logits, wanted in predictions(model, ids, start, first, end):
        loss += float(F.cross_entropy(logits.double(), wanted, reduction="sum"))
    return loss


def predictions(model: GPT2, ids: list[int], start: int, first: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits (AT_ONCE, V) and the tokens (AT_ONCE) that they predict, for ``window_loss``'s tokens."""
    kernel, device = step_of(model), model.wte.weight.device
    text, wanted = torch.tensor([ids[start:end]], device=device), torch.tensor(ids[first:end], device=device)  # (1, T)
    parts = wanted.split(AT_ONCE)
    if kernel is None:
        hidden = model.hidden_states(text)[:, first - 1 - start : -1]  # (1, counted, C)
        yield from ((model.head(part)[0], few) for part, few in zip(hidden.split(AT_ONCE, dim=1), parts, strict=True))
        return
    cache = model.new_cache(1, end - start)
    read_piece(model, kernel, ids[start : first - 1], cache, 0)
    for few in parts:
        place = start + cache.length
        yield read_piece(model, kernel, ids[place : place + len(few)], cache, len(few)), few


def windows_of(tokens: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first, end): read tokens start to end, count the loss of tokens first to end. Each counts once."""
    first = 1  # nothing predicts the first token
    while first < tokens:
        end = min(tokens, context if first == 1 else first + max(1, context // 2))
        yield max(0, end - context), first, end
        first = end


def file_ids(file: str | Path, tokenizer: Tokenizer | None, config: GPT2Config) -> list[int]:
    """Read the tokens of a text file.

    Raises:
        GenerationError: if the file cannot be read, has fewer than two tokens or one that the model has no embedding
            for, the checkpoint has no tokenizer, or the model's context is one token.
    """
    if tokenizer is None:
        raise GenerationError(f"{file} needs a tokenizer, and the checkpoint has none")
    ids = tokenizer.encode(read_text(Path(file), GenerationError))
    require_predictable(str(file), ids, config.n_positions)
    check_known(torch.tensor([ids], dtype=torch.long), config.vocab_size)
    return ids


def require_predictable(name: str, ids: list[int], context: int) -> None:
    """Raise GenerationError if no token of a text can be predicted."""
    if len(ids) < 2:
        raise GenerationError(f"{name} must have at least 2 tokens, got {len(ids)}")
    if context < 2:
        raise GenerationError(f"the model's context must have at least 2 tokens, got {context}")
