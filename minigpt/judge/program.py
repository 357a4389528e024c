"""The outputs of another program: the logits that it wrote to a file, or a model that it runs.

T tokens, V vocabulary, C embedding.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minigpt.engines.engine import Engine
from minigpt.errors import CheckpointError
from minigpt.files import require_file
from minigpt.judge.perplexity import read_losses
from minigpt.judge.reading import Reading, Runner, Sample, Scored
from minigpt.judge.truth import Truth
from minigpt.precision import dtype_name


class FileRunner(Runner):
    """The outputs of another program for the texts of a record: logits, and any of the norms and blocks.

    Where the file holds ``ids.N`` too, they must be the record's.

    Raises:
        CheckpointError: if the file cannot be read, lacks logits or has logits of other ids, or a tensor is unknown or
            has another shape.
    """

    def __init__(self, truth: Truth, file: Path) -> None:
        self.file = file
        self.device = truth.facts.device
        self.tensors = tensors_in(file)
        self.numbers: dict[Sample, int] = {}
        for n, sample in enumerate(truth.samples):
            self.numbers[sample] = n
            if f"logits.{n}" not in self.tensors:
                raise CheckpointError(f"{file} has no logits.{n}, the logits for ids.{n}")
            ids = self.tensors.pop(f"ids.{n}", None)
            if ids is not None:
                require_ids(f"{file}: ids.{n}", ids, sample.ids)
        self._require_shapes(shapes_of(truth))

    def _require_shapes(self, shapes: dict[str, list[tuple[int, ...]]]) -> None:
        for name, x in self.tensors.items():
            if name not in shapes:
                raise CheckpointError(f"{self.file} has {name!r}, which is no key of the record; see docs/parity.md")
            shape = tuple(x.shape)
            if shape not in shapes[name] or not x.is_floating_point():
                raise CheckpointError(
                    f"{self.file}: {name} must have shape {shapes[name][0]} and a floating dtype, got "
                    f"{shape} and {dtype_name(x.dtype)}"
                )

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        number = self.numbers[sample]
        logits = self.tensors[f"logits.{number}"].to(self.device)
        compared = range(*sample.compared.indices(len(sample.ids)))
        if len(logits) == len(compared):
            return logits
        return logits[sample.compared]

    def read(self, sample: Sample) -> Reading:
        end = f".{self.numbers[sample]}"
        outputs: dict[str, Tensor] = {}
        for name, x in self.tensors.items():
            if name.endswith(end) and not name.startswith("logits."):
                outputs[name.removesuffix(end)] = x.to(self.device)
        return Reading(self.logits(sample), outputs)


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


def shapes_of(truth: Truth) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes that each tensor of a program's file may have."""
    vocab, width = truth.facts.shape.vocab_size, truth.facts.shape.n_embd
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for n, sample in enumerate(truth.samples):
        seq = len(sample.ids)
        compared = len(truth.logits(sample))
        shapes[f"logits.{n}"] = [(seq, vocab), (compared, vocab)]
        for place in truth.facts.places:
            shapes[f"{place}.{n}"] = [(seq, width)]
        for site, x in truth.exact[sample].inputs.items():
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

    def __init__(self, truth: Truth, engine: Engine) -> None:
        self.engine = engine
        self.device = truth.facts.device
        self.original = truth.facts.source
        self.vocab_size = truth.facts.shape.vocab_size
        self.window = truth.facts.shape.window
        self._require_vocabulary(engine.vocab_size)
        longest = max(len(sample.ids) for sample in truth.samples)
        context = engine.context
        if context is not None and context < longest:
            raise CheckpointError(
                f"{engine.name} reads {context:,} tokens at most, and the texts of {truth.facts.source} have up to "
                f"{longest:,}; judge it on shorter prompts"
            )

    def _require_vocabulary(self, size: int | None) -> None:
        if size not in (None, self.vocab_size):
            raise CheckpointError(
                f"{self.engine.name} has a vocabulary of {size:,} tokens and {self.original} one of "
                f"{self.vocab_size:,}, so it is another model"
            )

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        rows = self.engine.whole(sample.ids)
        return self._checked(rows)[sample.compared]

    def decode(self, prompts: Sequence[Sample]) -> list[Float[Tensor, "new vocab"]] | None:
        if not any(prompt.written for prompt in prompts):
            return None
        logits: list[Tensor] = []
        for prompt in prompts:
            if not prompt.written:
                logits.append(torch.empty(0, self.vocab_size, device=self.device))
                continue
            rows = self.engine.decode(prompt.ids, prompt.new_from)
            if rows is None:
                return None
            logits.append(self._checked(rows))
        return logits

    def continue_prompt(self, sample: Sample) -> list[int] | None:
        return self.engine.write(sample.prompt, len(sample.written))

    def window_losses(self, ids: list[int]) -> list[Scored] | None:
        return read_losses(self._counted, ids, self.window)

    def _counted(self, ids: list[int], counted: int) -> Iterator[Tensor]:
        """Yield the logits that predict the last tokens of a window."""
        rows = self.engine.whole(ids)
        yield self._checked(rows)[-counted - 1 : -1]

    def _checked(self, rows: Any) -> Float[Tensor, "seq vocab"]:
        """Return logits on the original's device, if they are of its vocabulary."""
        self._require_vocabulary(rows.shape[1])
        return torch.from_numpy(rows).to(self.device)
