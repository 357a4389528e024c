"""Perplexity on a text file, by windows that overlap so that every token is predicted from a long past."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.judge.contest import Contest
from minigpt.judge.measures import perplexity
from minigpt.judge.parity_report import TextPerplexity
from minigpt.text_file import read_text
from minigpt.tokenizer import Tokenizer

AT_ONCE = 128  # positions whose logits are held together: of a window of 1,024, they are 400 MB


def text_perplexity(contest: Contest, file: str | Path, ids: list[int], begin: Callable[[str], None]) -> TextPerplexity:
    """Perplexity of a file's tokens with the model's own norms and weights, and with those in question."""
    window = contest.config.n_positions
    stride = max(1, window // 2)
    perplexities = []
    for name, model in (("the model as it was", contest.plain), ("the candidate", contest.candidate)):
        begin(f"perplexity of {file} with {name}")
        perplexities.append(perplexity(_loss(model, ids, window, stride), len(ids) - 1))
    return TextPerplexity(str(file), len(ids), window, stride, *perplexities)


def windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, first, end): read tokens start to end, count the loss of tokens first to end; each counts once."""
    first = 1  # nothing predicts the first token
    while first < tokens:
        end = min(tokens, window) if first == 1 else min(tokens, first + stride)
        yield max(0, end - window), first, end
        first = end


def _loss(model: GPT2, ids: list[int], window: int, stride: int) -> float:
    """Summed loss in nats of every token but the first."""
    total = 0.0
    for start, first, end in windows(len(ids), window, stride):
        text = torch.tensor([ids[start:end]], device=model.wte.weight.device)  # (1, T)
        hidden = model.hidden_states(text)[:, first - 1 - start : -1]  # (1, counted, C)
        targets = text[0, first - start :]  # (counted)
        for part, wanted in zip(hidden.split(AT_ONCE, dim=1), targets.split(AT_ONCE), strict=True):
            logits = model.head(part)[0].double()  # (AT_ONCE, V)
            total += float(F.cross_entropy(logits, wanted, reduction="sum"))
    return total


def file_ids(file: str | Path, tokenizer: Tokenizer | None, context: int) -> list[int]:
    """The tokens of a text file.

    Raises:
        GenerationError: the file cannot be read, or has fewer than two tokens, there is no tokenizer for it, or the
            model's ``context`` has no room for a token and the next.
    """
    if context < 2:
        raise GenerationError(f"{file} cannot be read by a model whose context is {context} token: it predicts none")
    if tokenizer is None:
        raise GenerationError(f"{file} cannot be read without a tokenizer, and the checkpoint has none")
    ids = tokenizer.encode(read_text(Path(file), GenerationError))
    if len(ids) < 2:
        raise GenerationError(f"{file} has {len(ids)} tokens; at least 2 are needed")
    return ids
