"""A GPT-2 of minigpt reads and writes as ``generate`` does.

B batch, T tokens, V vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from minigpt.engine.reader import Reader
from minigpt.generation import generate
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.reading import Sample
from minigpt.judge.runners import ModuleRunner, Naming
from minigpt.model import GPT2


class OurRunner(ModuleRunner):
    """A ``minigpt.GPT2``, which reads and writes as ``generate`` does."""

    pads = True

    def __init__(self, model: GPT2, facts: CheckpointFacts, naming: Naming = contextlib.nullcontext) -> None:
        super().__init__(model, facts, naming)
        self.model = model

    @property
    def reads_tokens(self) -> bool:
        return True

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        ids = self.tensor(sample.ids)
        with self.naming():
            hidden = self.model.hidden_states(ids)  # (1, T, C)
            return self.model.head(hidden[:, sample.compared])[0]

    def gradients(self, texts: Sequence[list[int]]) -> dict[str, Tensor] | None:
        if self.model.quantize is not None:
            return None
        return super().gradients(texts)

    def _decoded(self, samples: list[Sample]) -> Iterator[Float[Tensor, "batch vocab"]]:
        longest = max(len(sample.ids) for sample in samples)
        reader = Reader(self.model, len(samples), longest)
        prompts = [sample.prompt for sample in samples]
        yield reader.read(dict(enumerate(prompts)))
        for step in range(len(samples[0].written) - 1):
            tokens = [sample.written[step : step + 1] for sample in samples]
            yield reader.read(dict(enumerate(tokens)))

    def continue_prompt(self, sample: Sample) -> list[int] | None:
        ids = self.tensor(sample.prompt)
        with self.naming():
            written = generate(self.model, ids, max_new_tokens=len(sample.written))
        return written[0, len(sample.prompt) :].tolist()
