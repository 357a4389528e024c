"""Perplexity on texts, by windows that overlap so that every token is predicted from a long past."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from minigpt.engine.reader import Reader
from minigpt.errors import GenerationError
from minigpt.files import is_json_lines, read_text
from minigpt.host import host_of
from minigpt.inputs import check_known
from minigpt.model import GPT2
from minigpt.precision import dtype_name
from minigpt.progress import Progress
from minigpt.shape import Shape
from minigpt.tokenizer import Tokenizer

AT_ONCE = 128  # positions whose logits are read together: the logits of 1,024 take 400 MB in float64

Window = tuple[int, int, int]  # start, first token that counts, end
WindowReader = Callable[[list[int], int], Iterable[Tensor]]
"""A function of the ids of a window and of how many of its last tokens count: logits (counted, V) that predict these,
in parts (parts, V)."""


class Scored(NamedTuple):
    """A model's predictions in one window: the tokens that count, and sums over them of loss and entropy, in nats."""

    tokens: int
    loss: float
    entropy: float


@dataclass(frozen=True)
class Perplexity:
    """A perplexity, and the protocol by which it was measured.

    Attributes:
        perplexity: exp of ``loss``.
        loss: the mean negative log-likelihood of a scored token, in nats.
        tokens, scored: the number of tokens in the text, and how many count. Without ``bos``, a window whose first
            token nothing predicts leaves that one out: the text's first window, or all if windows do not overlap.
        windows, window, stride: how many windows, their length in tokens, and the distance of their beginnings.
        bos: whether every window begins with the checkpoint's beginning-of-text token.
        rows: the windows in their order.
    """

    perplexity: float
    loss: float
    tokens: int
    scored: int
    windows: int
    window: int
    stride: int
    bos: bool
    rows: list[Scored]

    @property
    def protocol(self) -> str:
        """The protocol of the measurement, in one line."""
        counts = f"{self.scored:,} of {self.tokens:,} tokens scored"
        windows = f"{self.windows:,} windows of {self.window:,}, stride {self.stride:,}"
        begin = "each after a beginning-of-text token" if self.bos else "no beginning-of-text token"
        return f"{counts} in {windows}, {begin}"


def perplexity(
    model: nn.Module,
    tokenizer: Tokenizer,
    text: str,
    stride: int | None = None,
    bos: bool = False,
    *,
    window: int | None = None,
    progress: Progress | None = None,
) -> float:
    """Return exp of the mean negative log-likelihood of a token of ``text``.

    The text is read in windows, as transformers' page on the perplexity of fixed-length models does it. Each token
    counts once, in the first window that has it. ``minigpt.parity(text=...)`` computes the same with the defaults, and
    ``measure_perplexity`` returns the protocol too.

    Args:
        stride: tokens from the beginning of a window to that of the next; half the window by default. At the whole
            window they do not overlap, and their first tokens do not count.
        bos: begin every window with the checkpoint's beginning-of-text token. The text's first token counts too.
        window: tokens in a window, the beginning-of-text token included; by default the model's context, of another
            architecture than GPT-2 at most 2,048.

    Raises:
        GenerationError: if the text has fewer than two tokens or one that the model has no embedding for, ``window`` or
            ``stride`` is out of range, the checkpoint has no beginning-of-text token, or the model's logits are NaN.
    """
    return measure_perplexity(model, tokenizer, text, stride, bos, window=window, progress=progress).perplexity


def measure_perplexity(
    model: nn.Module,
    tokenizer: Tokenizer,
    text: str,
    stride: int | None = None,
    bos: bool = False,
    *,
    window: int | None = None,
    name: str = "the text",
    progress: Progress | None = None,
) -> Perplexity:
    """Return the perplexity of ``text`` and its protocol; arguments and errors as for ``perplexity``.

    Args:
        name: what an error calls the text.
    """
    shape = Shape.of(model.config)
    ids = tokenizer.encode(text)
    first = beginning_of_text(tokenizer, shape) if bos else None
    if bos and ids[:1] == [first]:  # some tokenizers add it themselves
        del ids[0]
    context = shape.n_positions
    require_predictable(name, ids, context)
    require_within("window", window, 2, context, "the model's context")
    window = window or shape.window
    require_within("stride", stride, 1, window - bos, "a window's tokens of the text")
    rows = window_losses(model, ids, stride, first, window=window, progress=progress)
    require_numbers(name, rows, host_of(model).dtype)
    scored = sum(row.tokens for row in rows)
    total = sum(row.loss for row in rows)
    return Perplexity(
        perplexity=perplexity_of(total, scored),
        loss=total / scored,
        tokens=len(ids),
        scored=scored,
        windows=len(rows),
        window=window,
        stride=stride or window // 2,
        bos=bos,
        rows=rows,
    )


def beginning_of_text(tokenizer: Tokenizer, shape: Shape) -> int:
    """Return the beginning-of-text token of a tokenizer, else of its model.

    Raises:
        GenerationError: if neither has one.
    """
    token = tokenizer.bos_token_id
    if token is None:
        token = shape.bos_token_id
    if token is None:
        raise GenerationError("needs a checkpoint with a beginning-of-text token", argument="bos")
    return token


def require_within(argument: str, value: int | None, least: int, most: int, about: str) -> None:
    """Raise GenerationError if an argument that was given is out of range.

    Args:
        about: in the message, what ``most`` is.
    """
    if value is not None and not least <= value <= most:
        raise GenerationError(f"must be from {least} to {most:,}, {about}, got {value}", argument=argument)


def require_numbers(name: str, rows: Iterable[Scored], dtype: torch.dtype) -> None:
    """Check that a model's predictions are numbers.

    Args:
        name: what an error calls the text.
        dtype: of the model.

    Raises:
        GenerationError: if the loss of a window is NaN; the message names the window, and a dtype to take.
    """
    for number, row in enumerate(rows):
        if not math.isnan(row.loss):
            continue
        advice = "its weights may hold NaN"
        if dtype == torch.float16:
            advice = "float16 ends at 65,504, so take bfloat16 or float32"
        raise GenerationError(
            f"the model's logits in window {number} of {name} are NaN at {dtype_name(dtype)}; {advice}"
        )


@torch.inference_mode()
def window_losses(
    model: nn.Module,
    ids: list[int],
    stride: int | None = None,
    bos: int | None = None,
    *,
    window: int | None = None,
    progress: Progress | None = None,
) -> list[Scored]:
    """Return what a model says of token ids, a row for each window; nothing of no ids.

    Args:
        stride, window: as ``perplexity`` takes them.
        bos: the token that begins every window, if one does.

    Raises:
        GenerationError: if an id is outside the vocabulary.
    """
    shape = Shape.of(model.config)
    if ids:
        read = ids if bos is None else [bos, *ids]
        check_known(torch.tensor([read]), shape.vocab_size)
    return read_losses(window_reader(model), ids, window or shape.window, stride, bos, progress=progress)


def read_losses(
    read: WindowReader,
    ids: list[int],
    window: int,
    stride: int | None = None,
    bos: int | None = None,
    *,
    progress: Progress | None = None,
) -> list[Scored]:
    """Return what a reader's logits say of token ids, a row for each window; the arguments are those above."""
    rows = list[Scored]()
    for (_, first, end), parts in read_windows(read, ids, window, stride, bos):
        if progress is not None:
            progress(f"token {first:,} of {len(ids):,}", first / len(ids))
        rows.append(scored(end - first, parts))
    return rows


def read_windows(
    read: WindowReader, ids: list[int], context: int, stride: int | None = None, bos: int | None = None
) -> Iterator[tuple[Window, Iterator[tuple[Tensor, Tensor]]]]:
    """Yield each window of a text, and its parts: logits (parts, V) and the tokens (parts,) that they predict."""
    for window in windows_of(len(ids), context, stride, has_bos=bos is not None):
        start, first, end = window
        inside = ids[start:end]
        if bos is not None:
            inside = [bos, *inside]
        logits = read(inside, end - first)
        yield window, with_targets(logits, ids[first:end])


def with_targets(logits: Iterable[Tensor], targets: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each part of logits (parts, V) with the tokens (parts,) that it predicts."""
    start = 0
    for part in logits:
        end = start + len(part)
        yield part, torch.tensor(targets[start:end], device=part.device)
        start = end


def scored(tokens: int, parts: Iterable[tuple[Tensor, Tensor]]) -> Scored:
    """Return the sums over a window's parts, computed in float64."""
    loss = entropy = 0.0
    for logits, targets in parts:
        log_p = logits.double().log_softmax(-1)  # (parts, V)
        loss -= float(log_p.gather(1, targets[:, None]).sum())
        entropy += float(torch.special.entr(log_p.exp()).sum())
    return Scored(tokens, loss, entropy)


def window_reader(model: nn.Module) -> WindowReader:
    """Return a function that reads windows with a model: a GPT-2 of minigpt as ``generate`` reads, another whole."""
    host = host_of(model)

    def read(ids: list[int], counted: int) -> Iterator[Tensor]:
        texts = Reader(cast("GPT2", model), 1, len(ids))
        end = len(ids) - 1  # the last token predicts none of them
        texts.read({0: ids[: end - counted]}, last=0)
        for start in range(end - counted, end, AT_ONCE):
            piece = ids[start : min(start + AT_ONCE, end)]
            yield texts.read({0: piece}, last=len(piece))

    def read_whole(ids: list[int], counted: int) -> Iterator[Tensor]:
        logits = host.logits(torch.tensor([ids], device=host.device))[0]  # (T, V)
        predictions = logits[-counted - 1 : -1]  # (counted, V)
        yield from predictions.split(AT_ONCE)

    return read if isinstance(model, GPT2) else read_whole


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


def texts_in(file: Path) -> Iterator[str]:
    """Yield the text of a file; of JSON lines the "text" of each. Raises as ``named_texts``."""
    for _, text in named_texts(file):
        yield text


def named_texts(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of a file; of JSON lines the "text" of each, with its number in the name.

    Raises:
        GenerationError: if the file cannot be read, or a line is no JSON object with a string "text".
    """
    content = read_text(file, GenerationError)
    if not is_json_lines(file, content):
        yield str(file), content
        return
    count = 0
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise GenerationError(f'{file}, line {number} must be a JSON object with a string "text"')
        count += 1
        yield f"{file}:{count}", text


def join_texts(texts: Iterable[str], tokenizer: Tokenizer, config: Shape) -> list[int]:
    """Return the tokens of texts, one after another with an end of text between."""
    end_of_text = config.eos_token_ids[:1]
    ids: list[int] = []
    for text in texts:
        if ids:
            ids += end_of_text
        ids += tokenizer.encode(text)
    return ids


def file_ids(file: str | Path, tokenizer: Tokenizer | None, config: Shape) -> list[int]:
    """Read the tokens of a file, as ``texts_in`` and ``join_texts`` do.

    Raises:
        GenerationError: if the file cannot be read, has fewer than two tokens or one that the model has no embedding
            for, the checkpoint has no tokenizer, or the model's context is one token.
    """
    if tokenizer is None:
        raise GenerationError(f"{file} needs a tokenizer, and the checkpoint has none")
    ids = join_texts(texts_in(Path(file)), tokenizer, config)
    require_predictable(str(file), ids, config.n_positions)
    check_known(torch.tensor([ids], dtype=torch.long), config.vocab_size)
    return ids


def require_predictable(name: str, ids: list[int], context: int) -> None:
    """Raise GenerationError if no token of a text can be predicted."""
    if len(ids) < 2:
        raise GenerationError(f"{name} must have at least 2 tokens, got {len(ids)}")
    if context < 2:
        raise GenerationError(f"the model's context must have at least 2 tokens, got {context}")


def mean_perplexities(results: list[Perplexity]) -> dict[str, float]:
    """Return means over several texts: ``perplexity`` counts each token once, ``perplexity_by_text`` each text once.

    Both are exp of a mean loss in nats: of ``loss`` over all scored tokens, and of ``loss_by_text`` over the texts'
    own losses.
    """
    losses: list[float] = []
    for result in results:
        losses += [row.loss for row in result.rows]
    scored = sum(result.scored for result in results)
    loss = sum(losses) / scored
    by_text = sum(result.loss for result in results) / len(results)
    return {
        "perplexity": perplexity_of(loss, 1),
        "loss": loss,
        "perplexity_by_text": perplexity_of(by_text, 1),
        "loss_by_text": by_text,
        "scored": scored,
    }


def perplexity_of(loss: float, targets: int) -> float:
    """exp of the mean loss in nats; NaN if there was nothing to predict, infinite if it overflows."""
    total = torch.tensor(loss, dtype=torch.float64)
    return (total / targets).exp().item()
