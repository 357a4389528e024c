"""The outputs of transformers for a checkpoint, as plain data.

B batch, T tokens, V vocabulary, C embedding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.measured import Floor
from minigpt.judge.measures import Distance
from minigpt.judge.reading import Reading, Sample, as_batch, gradient_texts
from minigpt.norms.formulas import TrueNorm
from minigpt.tokenizer import Tokenizer


@dataclass(eq=False)
class Truth:
    """The outputs of transformers for a checkpoint.

    Attributes:
        facts: what was read, and how.
        versions: of what read it.
        described: the prompts in words.
        why_random: why they are random ids; None if they are not.
        tokenizer: the checkpoint's, if it has one.
        prompts: the prompts and what transformers writes after them.
        windows: of the text file, or the built-in texts; empty if prompts alone were given.
        text_file, text_ids: the text file and its tokens; None and empty without one.
        losses: tokens and loss of each window of the whole text file, by minigpt in reference arithmetic; of another
            architecture, and of a model that does not fit, by transformers.
        exact: by text, what transformers computes in float64: the logits of the compared positions (T, V), and the
            true input (T, C) of each norm and output of each block; these are empty if there is no room.
        norms: the norms that transformers computes, by site.
        floor: how far transformers at the dtype is from its float64 self: the noise floor.
        precisions: the RMS error of transformers' logits in float32, float16 and bfloat16, on the prompts.
        bitwise_error: how far minigpt in reference arithmetic is from transformers.
        gradients: by Parameter, made in float64 and kept in float32 below it; None if the caller did not ask for them.
    """

    facts: CheckpointFacts
    described: str
    why_random: str | None
    tokenizer: Tokenizer | None
    prompts: list[Sample]
    windows: list[Sample]
    text_file: str | None
    text_ids: list[int]
    versions: dict[str, Any]
    exact: Mapping[Sample, Reading]
    norms: dict[str, TrueNorm]
    floor: Floor
    bitwise_error: Distance = field(default_factory=Distance)
    losses: list[Sequence[float]] = field(default_factory=list)
    precisions: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] | None = None

    @property
    def samples(self) -> list[Sample]:
        """The prompts, then the windows."""
        return [*self.prompts, *self.windows]

    @property
    def longest(self) -> Sample:
        """The longest prompt with what transformers writes after it."""
        return max(self.prompts, key=lambda prompt: len(prompt.ids))

    @property
    def gradient_texts(self) -> list[list[int]]:
        """The texts whose loss has its gradients compared."""
        return gradient_texts(self.prompts, self.windows)

    def tensor(self, ids: list[int]) -> Int[Tensor, "1 seq"]:
        """Return token ids as a batch of one on the original's device."""
        return as_batch(ids, self.facts.device)

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        """Return the true logits at the compared positions of a text."""
        return self.exact[sample].logits

    def text(self, ids: list[int]) -> str | None:
        """Return the text of tokens; None without a tokenizer, or if one of them is padding of the vocabulary."""
        if self.tokenizer is None or max(ids, default=0) >= self.tokenizer.id_count:
            return None
        return self.tokenizer.decode(ids)

    def true_outputs(self, sample: Sample) -> dict[str, Float[Tensor, "seq *rows"]]:
        """Return the true output of every norm, and the residual stream after every block."""
        reading = self.exact[sample]
        outputs: dict[str, Tensor] = {}
        for site, x in reading.inputs.items():
            if site in self.norms:
                outputs[site] = self.norms[site](x)
        return outputs | dict(reading.outputs)

    def readings(self, *, places: bool) -> Iterator[Reading]:
        """Yield what is true of each text.

        Args:
            places: whether to compute the outputs of norms too.
        """
        for sample in self.samples:
            reading = self.exact[sample]
            yield Reading(reading.logits, self.true_outputs(sample) if places else {}, reading.inputs)
