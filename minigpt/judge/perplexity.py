"""Perplexity on a text, by windows that overlap so that every token is predicted from a long past."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.device import Progress
from minigpt.engine.kernel import StepKernel, step_of
from minigpt.errors import GenerationError
from minigpt.files import read_text
from minigpt.generation.batch import read_piece
from minigpt.judge.measures import AT_ONCE, perplexity_of
from minigpt.model import GPT2
from minigpt.model.checks import check_known
from minigpt.tokenizer import Tokenizer

Window = tuple[int, int, int]  # start, first token that counts, end


@dataclass(frozen=True)
class Perplexity:
    """A perplexity, and the protocol by which it was measured.

    Attributes:
        perplexity: exp of ``loss``.
        loss: the mean negative log-likelihood of a scored token, in nats.
        tokens, scored: of the text, and those of them that count. Without ``bos``, a window whose first token nothing
            predicts leaves that one out: of the text's first window, or of all if windows do not overlap.
        windows, window, stride: how many windows, their length in tokens, and the distance of their beginnings.
        bos: whether every window begins with the checkpoint's beginning-of-text token.
    """

    perplexity: float
    loss: float
    tokens: int
    scored: int
    windows: int
    window: int
    stride: int
    bos: bool

    @property
    def protocol(self) -> str:
        """How it was measured, in one line."""
        begin = "each after a beginning-of-text token" if self.bos else "no beginning-of-text token"
        return (
            f"{self.scored:,} of {self.tokens:,} tokens scored in {self.windows:,} windows of {self.window:,}, "
            f"stride {self.stride:,}, {begin}"
        )


def perplexity(
    model: GPT2,
    tokenizer: Tokenizer,
    text: str,
    stride: int | None = None,
    bos: bool = False,
    *,
    progress: Progress | None = None,
) -> float:
    """Return exp of the mean negative log-likelihood of a token of ``text``.

    The text is read in windows as long as the model's context, as transformers' page on the perplexity of fixed-length
    models does it. Each token counts once, in the first window that has it. ``minigpt.parity(text=...)`` computes the
    same with the defaults, and ``measure`` returns the protocol too.

    Args:
        stride: tokens from the beginning of a window to that of the next; half the context by default. At the whole
            context windows do not overlap, and their first tokens do not count.
        bos: begin every window with the checkpoint's beginning-of-text token. The text's first token counts too.

    Raises:
        GenerationError: if the text has fewer than two tokens or one that the model has no embedding for, the
            model's context is one token, ``stride`` is out of range, or the checkpoint has no beginning-of-text token.
    """
    return measure(model, tokenizer, text, stride, bos, progress=progress).perplexity


def measure(
    model: GPT2,
    tokenizer: Tokenizer,
    text: str,
    stride: int | None = None,
    bos: bool = False,
    *,
    progress: Progress | None = None,
) -> Perplexity:
    """Return the perplexity of ``text`` and its protocol; arguments and errors are those of ``perplexity``."""
    ids, context, first = tokenizer.encode(text), model.config.n_positions, None
    if bos:
        first = model.config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if first is None:
            raise GenerationError("needs a checkpoint with a beginning-of-text token", argument="bos")
        if ids[:1] == [first]:  # some tokenizers add it themselves
            del ids[0]
    require_predictable("the text", ids, context)
    most = context - bos
    if stride is not None and not 1 <= stride <= most:
        raise GenerationError(
            f"must be from 1 to {most:,}, a window's tokens of the text, got {stride}", argument="stride"
        )
    losses = window_losses(model, ids, progress, stride, first)
    scored, total = sum(count for count, _ in losses), sum(loss for _, loss in losses)
    return Perplexity(
        perplexity_of(total, scored), total / scored, len(ids), scored, len(losses), context,
        stride or context // 2, bos,
    )  # fmt: skip


@torch.inference_mode()
def window_losses(
    model: GPT2,
    ids: list[int],
    progress: Progress | None = None,
    stride: int | None = None,
    bos: int | None = None,
) -> list[tuple[int, float]]:
    """Return of each window how many tokens it counts, and their loss in nats; nothing of an empty text."""
    losses = []
    if ids:
        check_known(torch.tensor([ids if bos is None else [bos, *ids]]), model.config.vocab_size)
    for (_, first, end), parts in predictions(model, ids, stride, bos):
        if progress is not None:
            progress(f"token {first:,} of {len(ids):,}", first / len(ids))
        loss = sum(float(F.cross_entropy(logits.double(), few, reduction="sum")) for logits, few in parts)
        losses.append((end - first, loss))
    return losses


def predictions(
    model: GPT2, ids: list[int], stride: int | None = None, bos: int | None = None
) -> Iterator[tuple[Window, Iterator[tuple[Tensor, Tensor]]]]:
    """Yield each window of a text, and its parts: logits (AT_ONCE, V) and the tokens (AT_ONCE) that they predict."""
    kernel = step_of(model)
    for window in windows_of(len(ids), model.config.n_positions, stride, has_bos=bos is not None):
        yield window, _parts(model, kernel, ids, window, bos)


def _parts(
    model: GPT2, kernel: StepKernel | None, ids: list[int], window: Window, bos: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    start, first, end = window
    ids = ids[start:end] if bos is None else [bos, *ids[start:end]]
    past = len(ids) - (end - first)  # tokens that do not count
    text = torch.tensor([ids], device=model.wte.weight.device)  # (1, T)
    parts = text[0, past:].split(AT_ONCE)
    if kernel is None:
        hidden = model.hidden_states(text)[:, past - 1 : -1]  # (1, counted, C)
        yield from ((model.head(part)[0], few) for part, few in zip(hidden.split(AT_ONCE, dim=1), parts, strict=True))
        return
    cache = model.new_cache(1, len(ids))
    read_piece(model, kernel, ids[: past - 1], cache, 0)
    for few in parts:
        piece = ids[cache.length : cache.length + len(few)]
        yield read_piece(model, kernel, piece, cache, len(few)), few


def windows_of(tokens: int, context: int, stride: int | None = None, *, has_bos: bool = False) -> Iterator[Window]:
    """Yield windows (start, first, end): read tokens start to end, count the loss of tokens first to end.

    Args:
        tokens: of the text.
        context: tokens that the model reads at once.
        stride: tokens from a start to the next; half the context by default.
        has_bos: whether a token that is not of the text begins each window, and predicts the first one.
    """
    end = 0
    for start in range(0, tokens, stride or max(1, context // 2)):
        first = max(end, start if has_bos else start + 1)
        end = min(tokens, start + context - has_bos)
        if first < end:
            yield start, first, end
        if end == tokens:
            return


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
