"""Texts that the models read: the prompts, and longer texts in windows of the context."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch

from minigpt.errors import CheckpointError, GenerationError
from minigpt.generation import prompt_ids
from minigpt.inputs import check_rows
from minigpt.judge.perplexity import file_ids, windows_of
from minigpt.judge.reading import Sample
from minigpt.shape import Shape
from minigpt.tokenizer import Tokenizer

# Like the demo's training text, but not from it, so the model is unsure and a change shows. Any GPT-2 can read them.
BUILT_IN_PROMPTS = (
    "Once upon a time there was a young gardener named Tom, who found a silver coin in the forest. His sister laughed.",
    "The old shepherd gave the lantern to the gardener, and the gardener gave it to Mara.",
    "Then Mara came to Tom.",
    "One Sunday, a silver coin",
)
PEOPLE = ("Tom", "Mara", "the old shepherd", "the young gardener", "his sister", "the miller")
DEEDS = ("gave the lantern to", "found the silver coin before", "laughed at", "went into the forest with", "waited for")

BUILT_IN = f"{len(BUILT_IN_PROMPTS)} built-in texts"
MOST_LONG = 1024  # tokens of the built-in text that fills the context
MOST_LONG_WORK = 2e11  # its tokens times the model's weights: float64 reads 100 to 200 of these a nanosecond
MOST_WALK_WORK = 4e9  # the same for a walk over a whole vocabulary
MOST_PROMPT = 2**29  # numbers of a prompt's true logits, 4 GiB: 3,533 tokens of Qwen's vocabulary
MOST_LOGITS = 2**27  # numbers of a text's true logits that are kept: 2,670 tokens of GPT-2, 131,072 of the demo

Prompts = Sequence[str] | Sequence[Sequence[int]]


class TextsToRead(NamedTuple):
    """Texts to read: prompts, and a longer text in windows.

    Attributes:
        ids: the tokens of the prompts.
        described: the prompts in words.
        tokenizer: the checkpoint's, if it has one.
        windows: of the text file, or of the built-in texts; empty if prompts alone were given.
        file, file_ids: the text file, and its tokens; None and empty without one.
        why_random: why the prompts are random ids; None if they are not.
    """

    ids: list[list[int]]
    described: str
    tokenizer: Tokenizer | None
    windows: list[Sample]
    file: str | None
    file_ids: list[int]
    why_random: str | None


class Chosen(NamedTuple):
    """Prompts.

    Attributes:
        ids: their tokens.
        described: in words.
        tokenizer: the checkpoint's, if it has one.
        prose: the tokens of the built-in long text, if the model can read it.
        why_random: why they are random ids; None if they are not.
    """

    ids: list[list[int]]
    described: str
    tokenizer: Tokenizer | None
    prose: Sequence[int] = ()
    why_random: str | None = None


def read_texts(
    place: Path, config: Shape, weights: int, prompts: Prompts | None = None, text: str | Path | None = None
) -> TextsToRead:
    """Return the texts that the models read: those that are given, else the built-in ones.

    Args:
        weights: how many numbers the model has.
        text: a file.

    Raises:
        CheckpointError, GenerationError: as ``choose_prompts`` and ``file_ids``.
    """
    chosen = default_prompts(place, config) if prompts is None else choose_prompts(place, prompts, config)
    file = None
    ids: list[int] = []
    windows: list[Sample] = []
    if text is not None:
        file = str(text)
        ids = file_ids(text, chosen.tokenizer, config)
        windows = file_windows(ids, config)
    elif prompts is None:
        windows = built_in_windows(chosen, config, weights)
    return TextsToRead(chosen.ids, chosen.described, chosen.tokenizer, windows, file, ids, chosen.why_random)


def choose_prompts(place: Path, prompts: Prompts, config: Shape) -> Chosen:
    """Return the token ids of prompts. An empty text is end-of-text, with which a document starts.

    Raises:
        CheckpointError: if prompts are texts and there is no tokenizer for them.
        GenerationError: if there is no prompt, or one is an empty list, too long, or outside the vocabulary.
    """
    if isinstance(prompts, str) or len(prompts) == 0:
        raise GenerationError(f"prompts must be a list of texts, or of lists of token ids, got {prompts!r}")
    if isinstance(prompts[0], str):
        tokenizer = Tokenizer.from_pretrained(place)
        ids = [prompt_ids(tokenizer, text) for text in cast("Sequence[str]", prompts)]
        described = "1 text" if len(ids) == 1 else f"{len(ids)} texts"
    else:
        tokenizer = _tokenizer(place)
        ids = [list(prompt) for prompt in cast("Sequence[Sequence[int]]", prompts)]
        described = "1 list of ids" if len(ids) == 1 else f"{len(ids)} lists of ids"
    most = MOST_PROMPT // config.vocab_size
    for i, prompt in enumerate(ids):
        try:
            rows = torch.tensor([prompt], dtype=torch.long)
            check_rows(rows, config.vocab_size, config.n_positions)
        except GenerationError as error:
            raise GenerationError(f"prompt {i}: {error}") from error
        if len(prompt) > most:
            raise GenerationError(
                f"prompt {i} has {len(prompt):,} tokens, and with {config.vocab_size:,} logits each the judge keeps at "
                f"most {most:,}; it reads a longer text in windows, as --text"
            )
    return Chosen(ids, described, tokenizer)


def default_prompts(place: Path, config: Shape) -> Chosen:
    """Return the built-in texts, or random ids if the model cannot read those."""
    try:
        chosen = choose_prompts(place, BUILT_IN_PROMPTS, config)
        tokenizer = cast("Tokenizer", chosen.tokenizer)
        prose = tokenizer.encode(long_text())
        return chosen._replace(described=BUILT_IN, prose=prose)
    except CheckpointError as error:
        why = str(error)
    except GenerationError:
        why = "the default texts do not fit it"
    length = min(24, max(1, config.n_positions // 2))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (4, length), generator=generator).tolist()
    return Chosen(ids, "4 sequences of random ids", _tokenizer(place), why_random=why)


def _tokenizer(place: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_pretrained(place)
    except CheckpointError:
        return None


def long_text() -> str:
    """Return the built-in text of which the first tokens are read."""
    sentences: list[str] = []
    for who, did, whom in itertools.product(PEOPLE, DEEDS, PEOPLE):
        if who != whom:
            subject = who[0].upper() + who[1:]
            sentences.append(f"{subject} {did} {whom}.")
    return " ".join(sentences)


def built_in_windows(prompts: Chosen, config: Shape, weights: int) -> list[Sample]:
    """Return a text that fills the context, half prose and half a walk over tokens that no other text has.

    The vocabulary of a small model is walked whole, in more windows.

    Args:
        weights: how many numbers the model has.
    """
    length = min(config.n_positions, MOST_LONG, max(2, int(MOST_LONG_WORK / weights)))
    if length < 2:
        return []
    prose = list(prompts.prose[: length // 2])
    read = {*prose, *itertools.chain.from_iterable(prompts.ids)}
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(config.vocab_size, generator=generator).tolist()
    walk = [token for token in shuffled if token not in read]
    tokens = prose + walk or shuffled
    first = list(itertools.islice(itertools.cycle(tokens), length))
    windows = [Sample.whole(first)]
    rest = walk[length - len(prose) :]
    if len(rest) * weights <= MOST_WALK_WORK:
        for start in range(0, len(rest), length):
            windows.append(Sample.whole(rest[start : start + length]))
    return windows


def file_windows(ids: list[int], config: Shape) -> list[Sample]:
    """Return the windows of a text, as many as there is room for their logits.

    Each compares the logits of its new part. The last of them predicts a token of the next window, so the distribution
    does not count it.
    """
    windows: list[Sample] = []
    room = MOST_LOGITS // config.vocab_size
    for start, first, end in windows_of(len(ids), config.window):
        counted = end - first
        room -= counted
        if room < 0 and windows:
            break
        length = end - start
        compared = slice(first - 1 - start, length)
        windows.append(Sample(ids[start:end], length, compared, counted, start))
    return windows
