"""Whose precision an error is like: transformers' own in float32, float16 and bfloat16, on the same prompts.

T tokens, V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import MiniGPTError
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.measures import Distance
from minigpt.judge.reading import Reading, Sample
from minigpt.judge.reference import Reference
from minigpt.precision import WideProducts, dtype_name
from minigpt.report.fields import Precision

OTHER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORK = 1e10  # weights times tokens that are read, but for the first prompt
MOST_WORK = 1e11  # of the first prompt, if that is read without being asked


def read_in_other_dtypes(
    open_in: Callable[[torch.dtype], AbstractContextManager[Reference]],
    facts: CheckpointFacts,
    prompts: Sequence[Sample],
) -> dict[str, list[Float[Tensor, "seq vocab"]]]:
    """Return transformers' logits of the first prompts in other dtypes than the original's, by their names.

    transformers computes in the other dtype on the weights as the original's dtype rounds them, which it rounds further
    if that dtype is narrower. Of a large model there are none.

    Args:
        open_in: gives transformers' model in a dtype for a block.
        facts: of the original.
    """
    logits: dict[str, list[Tensor]] = {}
    if facts.weights * len(prompts[0].ids) > MOST_WORK:
        return logits
    for other in OTHER_DTYPES:
        if other == facts.dtype:
            continue
        with contextlib.suppress(MiniGPTError, RuntimeError):  # a device or a model may not know the dtype
            with open_in(other) as reference, products_in(other, facts.device):
                readings = [*reference.read(first_of(prompts, facts.weights, WORK), places=False)]
            del reference  # before the next one is opened
            logits[dtype_name(other)] = [reading.logits for reading in readings]
    return logits


def products_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which products at a dtype are computed quickly."""
    if dtype == torch.float16 and device.type == "cpu":
        return WideProducts()
    return contextlib.nullcontext()


def first_of(prompts: Sequence[Sample], weights: int, work: float) -> list[Sample]:
    """Return the first prompts: one at least, and as many as take ``work``, weights times tokens."""
    first, tokens = list[Sample](), 0
    for prompt in prompts:
        tokens += len(prompt.ids)
        if first and tokens * weights > work:
            break
        first.append(prompt)
    return first


def errors_of(
    logits: Mapping[str, Sequence[Tensor]], prompts: Sequence[Sample], exact: Mapping[Sample, Reading]
) -> dict[str, float]:
    """Return the RMS error of logits of the first prompts in each dtype, by its name."""
    errors: dict[str, float] = {}
    for name, of_prompts in logits.items():
        distance = Distance()
        for prompt, value in zip(prompts, of_prompts, strict=False):
            distance.add(value, exact[prompt].logits)
        errors[name] = distance.rms
    return errors


def precision_of(error: float, errors: Mapping[str, float]) -> Precision | None:
    """Return the dtype whose error is nearest to one, by their quotient; None if there is none to compare with."""
    nearest, quotient = None, math.inf
    for name, own in errors.items():
        if not (0 < own < math.inf and 0 < error < math.inf):
            continue
        apart = abs(math.log(error / own))
        if apart < quotient:
            nearest, quotient = Precision(name, error / own), apart
    return nearest
