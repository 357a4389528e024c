"""The outputs of transformers for a checkpoint, as plain data.

B batch, T tokens, V vocabulary, C embedding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import MiniGPTError
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.measures import Floor
from minigpt.judge.reading import Reading, Text
from minigpt.judge.texts import Texts
from minigpt.norms.formulas import TrueNorm
from minigpt.precision import dtype_name
from minigpt.report.numerals import brief

# A reference whose own noise is a larger share of the logits' scale computes something else than its float64 truth.
MOST_FLOOR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


@dataclass(eq=False)
class OriginalData:
    """The outputs of transformers for a checkpoint.

    Attributes:
        facts: what was read, and how.
        texts: those that every model reads.
        floor: how far transformers at the dtype is from its float64 self: the noise floor.
        exact: by text, what transformers computes in float64: the logits of the compared positions (T, V), and the
            true input (T, C) of each norm and output of each block; these are empty if there is no room.
        norms: the norms that transformers computes, by site.
        gradients: by Parameter, made in float64 and kept in float32 below it; None if the caller did not ask for them.
    """

    facts: CheckpointFacts
    texts: Texts
    floor: Floor
    exact: Mapping[Text, Reading]
    norms: dict[str, TrueNorm]
    gradients: dict[str, Tensor] | None = None

    def logits(self, text: Text) -> Float[Tensor, "seq vocab"]:
        """Return the true logits at the compared positions of a text."""
        return self.exact[text].logits

    def true_outputs(self, text: Text) -> dict[str, Float[Tensor, "seq *rows"]]:
        """Return the true output of every norm, and the residual stream after every block."""
        reading = self.exact[text]
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
        for text in self.texts.all:
            reading = self.exact[text]
            yield Reading(reading.logits, self.true_outputs(text) if places else {}, reading.inputs)

    def require_low_floors(self) -> None:
        """Check that transformers at the dtype is near enough to its float64 self.

        Raises:
            MiniGPTError: if it is not, or the distance is not finite.
        """
        dtype = self.facts.dtype
        for floor, way in ((self.floor.prompts, ""), (self.floor.decoded, ", token by token,")):
            most = MOST_FLOOR[dtype] * floor.scale
            if not floor.rms <= most:  # written so that NaN is refused
                raise MiniGPTError(
                    f"transformers at {dtype_name(dtype)}{way} is {brief(floor.rms)} from itself in float64, on "
                    f"logits of scale {brief(floor.scale)}, so it cannot be the reference; update transformers, or try "
                    "another --attention or --dtype"
                )
