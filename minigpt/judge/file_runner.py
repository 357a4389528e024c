"""The outputs of another program: the logits that it wrote to a file, or a model that it runs.

T tokens, V vocabulary, C embedding.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minigpt.engines.engine import Engine, TextLogits
from minigpt.errors import CheckpointError
from minigpt.files import require_file
from minigpt.judge.original_data import OriginalData
from minigpt.judge.reading import Reading, Text
from minigpt.judge.runners import Runner, Step, shape_advice
from minigpt.precision import dtype_name
from minigpt.scoring import Scored, read_losses


class FileRunner(Runner):
    """The outputs of another program for the texts of a record: logits, and any of the norms and blocks.

    Where the file holds ``ids.N`` too, they must be the record's.

    Raises:
        CheckpointError: if the file cannot be read, lacks logits or has logits of other ids, or a tensor is unknown or
            has another shape.
    """

    def __init__(self, original: OriginalData, file: Path) -> None:
        super().__init__(original.facts)
        self.file = file
        self.tensors = tensors_in(file)
        self.numbers: dict[Text, int] = {}
        for n, text in enumerate(original.texts.all):
            self.numbers[text] = n
            if f"logits.{n}" not in self.tensors:
                raise CheckpointError(f"{file} has no logits.{n}, the logits for ids.{n}")
            ids = self.tensors.pop(f"ids.{n}", None)
            if ids is not None:
                require_ids(f"{file}: ids.{n}", ids, text.ids)
        self._require_shapes(shapes_of(original))

    def _require_shapes(self, shapes: dict[str, list[tuple[int, ...]]]) -> None:
        for name, x in self.tensors.items():
            if name not in shapes:
                raise CheckpointError(f"{self.file} has {name!r}, which is no key of the record; see docs/parity.md")
            shape = tuple(x.shape)
            if shape not in shapes[name] or not x.is_floating_point():
                raise CheckpointError(
                    f"{self.file}: {name} must have shape {shapes[name][0]} and a floating dtype, got "
                    f"{shape} and {dtype_name(x.dtype)}{shape_advice(shape, shapes[name][0])}"
                )

    def read(self, texts: Iterable[Text], *, places: bool = True) -> Iterator[Reading]:
        for text in texts:
            end = f".{self.numbers[text]}"
            outputs: dict[str, Tensor] = {}
            for name, x in self.tensors.items():
                if name.endswith(end):
                    outputs[name.removesuffix(end)] = x.to(self.facts.device)
            logits = outputs.pop("logits")
            if len(logits) > len(text.ids) - text.first:
                logits = logits[text.compared]
            yield Reading(logits, outputs)


def tensors_in(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: if it cannot be read.
    """
    require_file(file, CheckpointError)
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                tensors[name] = stored.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    return tensors


def shapes_of(original: OriginalData) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes that each tensor of a program's file may have."""
    vocab, width = original.facts.shape.vocab_size, original.facts.shape.n_embd
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for n, text in enumerate(original.texts.all):
        seq = len(text.ids)
        compared = len(original.logits(text))
        shapes[f"logits.{n}"] = [(seq, vocab), (compared, vocab)]
        for place in original.facts.places:
            shapes[f"{place}.{n}"] = [(seq, width)]
        for site, x in original.exact[text].inputs.items():
            shapes[f"{site}.{n}"] = [tuple(x.shape)]
    return shapes


def require_ids(name: str, x: Tensor, expected: list[int]) -> None:
    """Check that logits were written for the record's ids.

    Args:
        name: of the ids, in an error.

    Raises:
        CheckpointError: if they are others.
    """
    ids = x.flatten().tolist()
    if len(ids) != len(expected):
        raise CheckpointError(f"{name} must be the record's {len(expected):,} ids, got {len(ids):,}")
    for position, (actual, right) in enumerate(zip(ids, expected, strict=True)):
        if actual != right:
            raise CheckpointError(
                f"{name} must be the record's, but at position {position} it has {actual} in place of {right}, so "
                "its logits answer other ids"
            )


class EngineRunner(Runner):
    """A model in another program's file, which decodes with a cache of its own if it has one.

    Raises:
        CheckpointError: if it has another vocabulary than the original, or a shorter context than its texts.
    """

    batch = 1

    def __init__(self, original: OriginalData, engine: Engine) -> None:
        super().__init__(original.facts)
        self.engine = engine
        self.source = original.facts.source
        self._require_vocabulary(engine.vocab_size)
        longest = max(len(text.ids) for text in original.texts.all)
        context = engine.context
        if context is not None and context < longest:
            raise CheckpointError(
                f"{engine.name} reads {context:,} tokens at most, and the texts of {original.facts.source} have up to "
                f"{longest:,}; judge it on shorter prompts"
            )

    def _require_vocabulary(self, size: int | None) -> None:
        known = self.facts.shape.vocab_size
        if size not in (None, known):
            raise CheckpointError(
                f"{self.engine.name} has a vocabulary of {size:,} tokens and {self.source} one of {known:,}, so it "
                "is another model"
            )

    def read(self, texts: Iterable[Text], *, places: bool = True) -> Iterator[Reading]:
        for text in texts:
            yield Reading(self._checked(self.engine.whole(text.ids))[text.compared])

    def start(self, texts: list[list[int]], room: int) -> Step | None:
        (ids,) = texts
        read = self.engine.start(ids)
        if read is None:
            return None

        def step(pieces: list[list[int]]) -> Tensor:
            return self._checked(read(pieces[0]))

        return step

    def window_losses(self, ids: list[int]) -> list[Scored]:
        def read(window: list[int], counted: int) -> Iterator[Tensor]:
            yield self._checked(self.engine.whole(window))[-counted - 1 : -1]

        return read_losses(read, ids, self.facts.shape.window)

    def _checked(self, rows: TextLogits) -> Float[Tensor, "seq vocab"]:
        """Return logits on the original's device, if they are of its vocabulary."""
        self._require_vocabulary(rows.shape[1])
        return torch.from_numpy(rows).to(self.facts.device)
