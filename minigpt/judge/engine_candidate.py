"""A model in another program's file as a candidate.

T tokens, V vocabulary.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engines.engine import Engine
from minigpt.errors import CheckpointError
from minigpt.judge.candidate import Candidate
from minigpt.judge.perplexity import Scored, read_losses
from minigpt.judge.truth import Sample, Truth


class EngineCandidate(Candidate):
    """A model in another program's file, which decodes with a cache of its own if it has one.

    Raises:
        CheckpointError: if it has another vocabulary than the original, or a shorter context than its texts.
    """

    def __init__(self, truth: Truth, engine: Engine) -> None:
        super().__init__(truth, engine, engine.name)
        self.engine = engine
        self.notes.append(engine.note)
        self._require_vocabulary(engine.vocab_size)
        longest = max(len(sample.ids) for sample in truth.samples)
        if engine.context is not None and engine.context < longest:
            raise CheckpointError(
                f"{self.name} reads {engine.context:,} tokens at most, and the texts of {truth.source} have up to "
                f"{longest:,}; judge it on shorter prompts"
            )

    def _require_vocabulary(self, size: int | None) -> None:
        expected = self.truth.config.vocab_size
        if size not in (None, expected):
            raise CheckpointError(
                f"{self.name} has a vocabulary of {size:,} tokens and {self.truth.source} one of {expected:,}, so it "
                "is another model"
            )

    def naming(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the engine names itself

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        return self._checked(self.engine.whole(sample.ids))[sample.compared]

    def decode(self) -> list[Float[Tensor, "new vocab"]] | None:
        logits = []
        for prompt in self.truth.prompts:
            if not prompt.written:
                logits.append(prompt.truth[:0])
                continue
            rows = self.engine.decode(prompt.ids, prompt.new_from)
            if rows is None:
                return None
            logits.append(self._checked(rows))
        return logits if any(map(len, logits)) else None

    def continue_prompt(self, sample: Sample) -> list[int] | None:
        return self.engine.write(sample.prompt, len(sample.written))

    def window_losses(self) -> list[Scored] | None:
        return read_losses(self._counted, self.truth.text_ids, self.truth.config.window)

    def _counted(self, ids: list[int], counted: int) -> Iterator[Tensor]:
        """Yield the logits that predict the last tokens of a window."""
        yield self._checked(self.engine.whole(ids))[-counted - 1 : -1]

    def _checked(self, rows: Any) -> Float[Tensor, "seq vocab"]:
        """Return logits on the original's device, if they are of its vocabulary."""
        self._require_vocabulary(rows.shape[1])
        return torch.from_numpy(rows).to(self.truth.device)
