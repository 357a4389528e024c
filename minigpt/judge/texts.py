"""Texts that the models read: the prompts, and longer texts in windows of the context."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from minigpt.errors import CheckpointError, GenerationError, MiniGPTError
from minigpt.generation.row import prompt_ids
from minigpt.inputs import check_rows
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.reading import Text
from minigpt.scoring import file_ids, windows_of
from minigpt.shape import Shape, value_in
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
MOST_GRADIENT = 512  # tokens of a longer text: a backward in float64 keeps all attention weights
MOST_PROMPT = 2**29  # numbers of a prompt's true logits, 4 GiB: 3,533 tokens of Qwen's vocabulary
MOST_LOGITS = 2**27  # numbers of a text's true logits that are kept: 2,670 tokens of GPT-2, 131,072 of the demo

Prompts = Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts that every model reads: prompts, and a longer text in windows.

    Attributes:
        prompts: once transformers has read them, with what it writes after them.
        described: the prompts in words.
        why_random: why they are random ids; None if they are not.
        windows: of the text file, or of the built-in texts; empty if prompts alone were given.
        file, file_ids: the text file, and its tokens; None and empty without one.
        tokenizer: the checkpoint's, if it has one.
    """

    prompts: list[Text]
    described: str
    why_random: str | None = None
    windows: list[Text] = field(default_factory=list)
    file: str | None = None
    file_ids: list[int] = field(default_factory=list)
    tokenizer: Tokenizer | None = None

    @property
    def all(self) -> list[Text]:
        """The prompts, then the windows."""
        return [*self.prompts, *self.windows]

    @property
    def of_gradients(self) -> list[list[int]]:
        """The texts whose loss has its gradients compared: the prompts, and the beginning of a longer text."""
        texts = [prompt.ids for prompt in self.prompts]
        if self.windows:
            texts.append(self.windows[0].ids[:MOST_GRADIENT])
        return texts

    def decode(self, ids: list[int]) -> str | None:
        """Return the text of tokens; None without a tokenizer, or if one of them is padding of the vocabulary."""
        if self.tokenizer is None or max(ids, default=0) >= self.tokenizer.id_count:
            return None
        return self.tokenizer.decode(ids)


def read_texts(facts: CheckpointFacts, prompts: Prompts | None = None, text: str | Path | None = None) -> Texts:
    """Return the texts that the models read: those that are given, else the built-in ones.

    Args:
        text: a file.

    Raises:
        CheckpointError, GenerationError: as ``chosen_prompts`` and ``file_ids``.
    """
    texts = default_prompts(facts) if prompts is None else chosen_prompts(facts, prompts)
    if text is not None:
        ids = file_ids(text, texts.tokenizer, facts.shape)
        return replace(texts, file=str(text), file_ids=ids, windows=file_windows(ids, facts.shape))
    if prompts is None:
        return replace(texts, windows=built_in_windows(texts, facts))
    return texts


def chosen_prompts(facts: CheckpointFacts, prompts: Prompts) -> Texts:
    """Return prompts as the models read them. An empty text is end-of-text, with which a document starts.

    Raises:
        CheckpointError: if prompts are texts and there is no tokenizer for them.
        GenerationError: if there is no prompt, or one is an empty list, too long, or outside the vocabulary.
    """
    if isinstance(prompts, str) or len(prompts) == 0:
        raise GenerationError(f"prompts must be a list of texts, or of lists of token ids, got {prompts!r}")
    if isinstance(prompts[0], str):
        tokenizer = Tokenizer.from_pretrained(facts.place)
        ids = [prompt_ids(tokenizer, text) for text in cast("Sequence[str]", prompts)]
        described = "1 text" if len(ids) == 1 else f"{len(ids)} texts"
    else:
        tokenizer = tokenizer_at(facts.place)
        ids = [list(prompt) for prompt in cast("Sequence[Sequence[int]]", prompts)]
        described = "1 list of ids" if len(ids) == 1 else f"{len(ids)} lists of ids"
    shape = facts.shape
    most = MOST_PROMPT // shape.vocab_size
    for i, prompt in enumerate(ids):
        try:
            rows = torch.tensor([prompt], dtype=torch.long)
            check_rows(rows, shape.vocab_size, shape.n_positions)
        except GenerationError as error:
            raise GenerationError(f"prompt {i}: {error}") from error
        if len(prompt) > most:
            raise GenerationError(
                f"prompt {i} has {len(prompt):,} tokens, and with {shape.vocab_size:,} logits each the judge keeps at "
                f"most {most:,}; it reads a longer text in windows, as --text"
            )
    return Texts([*map(Text.whole, ids)], described, tokenizer=tokenizer)


def default_prompts(facts: CheckpointFacts) -> Texts:
    """Return the built-in texts, or random ids if the model cannot read those."""
    try:
        return replace(chosen_prompts(facts, BUILT_IN_PROMPTS), described=BUILT_IN)
    except CheckpointError as error:
        why = str(error)
    except GenerationError:
        why = "the default texts do not fit it"
    shape = facts.shape
    length = min(24, max(1, shape.n_positions // 2))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (4, length), generator=generator).tolist()
    prompts = [*map(Text.whole, ids)]
    return Texts(prompts, "4 sequences of random ids", why, tokenizer=tokenizer_at(facts.place))


def tokenizer_at(place: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint on this machine; None if there is none."""
    with contextlib.suppress(MiniGPTError):
        return Tokenizer.from_pretrained(place, local_files_only=True)
    return None


def built_in_windows(texts: Texts, facts: CheckpointFacts) -> list[Text]:
    """Return a text that fills the context, half prose and half a walk over tokens that no other text has.

    The vocabulary of a small model is walked whole, in more windows.
    """
    length = min(facts.shape.n_positions, MOST_LONG, max(2, int(MOST_LONG_WORK / facts.weights)))
    if length < 2:
        return []
    prose = list[int]()
    if texts.tokenizer is not None and texts.why_random is None:
        sentences: list[str] = []
        for who, did, whom in itertools.product(PEOPLE, DEEDS, PEOPLE):
            if who != whom:
                subject = who[0].upper() + who[1:]
                sentences.append(f"{subject} {did} {whom}.")
        prose = texts.tokenizer.encode(" ".join(sentences))[: length // 2]
    read = {*prose}.union(*(prompt.ids for prompt in texts.prompts))
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(facts.shape.vocab_size, generator=generator).tolist()
    walk = [token for token in shuffled if token not in read]
    tokens = prose + walk or shuffled
    first = list(itertools.islice(itertools.cycle(tokens), length))
    windows = [Text.whole(first)]
    rest = walk[length - len(prose) :]
    if len(rest) * facts.weights <= MOST_WALK_WORK:
        for start in range(0, len(rest), length):
            windows.append(Text.whole(rest[start : start + length]))
    return windows


def notes_on_length(config: Any, texts: Texts, shape: Shape) -> list[str]:
    """Return what the texts are too short to show: windows of attention, and scaled rotary positions.

    Args:
        config: of transformers.
    """
    longest = max(len(text.ids) for text in texts.all)
    notes = []
    for part, length in lengths_of(config.get_text_config()).items():
        if longest > length or length > shape.n_positions:
            continue
        way = "no text that the judge reads is longer"
        if length < shape.window:
            way = "--text FILE with more tokens shows it"
        elif length < min(shape.n_positions, MOST_PROMPT // shape.vocab_size):
            way = "--prompts FILE with a longer prompt shows it"
        notes.append(
            f"This model has {part}, and the texts have {longest:,} positions at most, so a fault beyond is not "
            f"judged; {way}."
        )
    return notes


def lengths_of(config: Any) -> dict[str, int]:
    """Return the lengths of text beyond which a model of transformers computes something else, by their words."""
    lengths: dict[str, int] = {}
    types = value_in(config, "layer_types", "attention_layers")
    layers = " ".join(types or ["sliding", "chunked"])
    for kind, name in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size"), ("local", "window_size")):
        window = value_in(config, name)
        if window and kind in layers and getattr(config, "use_sliding_window", True):
            lengths[f"a window of {window:,} positions"] = window
    rope = value_in(config, "rope_parameters", "rope_scaling", default={})
    for scaling in [rope, *rope.values()]:  # some have one for each type of layer
        if not isinstance(scaling, dict):
            continue
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in ("dynamic", "yarn", "longrope", "su", "llama3"):
            length = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
            lengths[f"rope scaling ({kind}) for more than {length:,} positions"] = int(length)
    return lengths


def file_windows(ids: list[int], config: Shape) -> list[Text]:
    """Return the windows of a text, as many as there is room for their logits.

    Each compares the logits of its new part. The last of them predicts a token of the next window, so the distribution
    does not count it.
    """
    windows: list[Text] = []
    room = MOST_LOGITS // config.vocab_size
    for start, first, end in windows_of(len(ids), config.window):
        counted = end - first
        room -= counted
        if room < 0 and windows:
            break
        length = end - start
        windows.append(Text(ids[start:end], length, first - 1 - start, counted, start))
    return windows


def first_of(prompts: Sequence[Text], weights: int, work: float) -> list[Text]:
    """Return the first prompts: one at least, and as many as take ``work``, weights times tokens."""
    first, tokens = list[Text](), 0
    for prompt in prompts:
        tokens += len(prompt.ids)
        if first and tokens * weights > work:
            break
        first.append(prompt)
    return first
