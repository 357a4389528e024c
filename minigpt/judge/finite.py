"""A reference that is not finite: transformers itself overflows at the dtype, so there is nothing to judge by.

T tokens, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minigpt.errors import MiniGPTError, listing
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.reading import Sample
from minigpt.judge.reference import Reference
from minigpt.precision import dtype_name

# Dtypes with a wider range than float16, in the order in which they are tried.
WIDER = {
    torch.float16: (torch.bfloat16, torch.float32),
    torch.bfloat16: (torch.float32,),
    torch.float32: (torch.float64,),
    torch.float64: (),
}


@dataclass(frozen=True)
class Overflow:
    """A part of what transformers computes that holds NaN or infinity.

    Attributes:
        what: its name, e.g. "the logits of prompt 0".
        texts: the tokens that were read: of one text, or of all whose gradients were computed.
        is_gradient: whether it is gradients, and not an output.
    """

    what: str
    texts: Sequence[list[int]]
    is_gradient: bool = False


class NotFiniteError(MiniGPTError):
    """transformers computes NaN or infinity at the dtype of a judgement."""

    def __init__(self, overflow: Overflow) -> None:
        super().__init__(f"transformers is not finite: {overflow.what} hold NaN or infinity")
        self.overflow = overflow


def require_finite(what: str, ids: list[int], tensors: Iterable[Tensor]) -> None:
    """Check what transformers computes of a text.

    Raises:
        NotFiniteError: if a tensor holds NaN or infinity.
    """
    if not all_finite(tensors):
        raise NotFiniteError(Overflow(what, [ids]))


def require_finite_gradients(gradients: Mapping[str, Tensor], texts: Sequence[list[int]]) -> None:
    """Check the gradients that transformers computes of texts.

    Raises:
        NotFiniteError: if one holds NaN or infinity.
    """
    wrong = []
    for name, gradient in gradients.items():
        if not all_finite([gradient]):
            wrong.append(name)
    if wrong:
        raise NotFiniteError(Overflow(f"the gradients of {listing(wrong)}", texts, is_gradient=True))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether tensors hold neither NaN nor infinity."""
    return all(map(is_finite_tensor, tensors))


def is_finite_tensor(x: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity."""
    if x.numel() == 0:
        return True
    least, largest = x.amin(), x.amax()  # a NaN is both
    return bool(least.isfinite() and largest.isfinite())


def explain(overflow: Overflow, facts: CheckpointFacts) -> MiniGPTError:
    """Return an error that says where transformers is not finite, and which dtype to take instead.

    It reads the texts again with one model after the other, so no other model should be in memory.

    Args:
        facts: of the original.
    """
    sentence = f"transformers itself is not finite at {dtype_name(facts.dtype)}: {overflow.what} hold NaN or infinity"
    if not overflow.is_gradient:
        reference = Reference.of(facts)
        first = first_not_finite(outputs_of(reference, overflow.texts[0]))
        del reference
        if first is not None:
            sentence += f", and the first output that does is {first}"
    tried: list[str] = []
    for wider in WIDER[facts.dtype]:
        reference = Reference.of(replace(facts, dtype=wider))
        broken = broken_weights(reference)
        if broken:
            return MiniGPTError(f"{sentence}; the checkpoint's own weights do too: {listing(broken)}")
        if overflow.is_gradient:
            computed = reference.gradients(overflow.texts)
        else:
            computed = outputs_of(reference, overflow.texts[0])
        if all_finite(computed.values()):
            return MiniGPTError(f"{sentence}; take {dtype_name(wider)}, at which all of it is finite")
        tried.append(dtype_name(wider))
        del reference
    return MiniGPTError(f"{sentence}; {' and '.join(tried) or 'a wider dtype'} cannot hold it either")


def outputs_of(reference: Reference, ids: list[int]) -> dict[str, Tensor]:
    """Return what norms and blocks compute of a text, in the order of the data, and the logits (T, V) last.

    Each is named as a sentence names it.
    """
    reading = reference.read(Sample.whole(ids))
    outputs = {f"that of {place}": output for place, output in reading.outputs.items()}
    return outputs | {"the logits": reading.logits}


def first_not_finite(outputs: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first output that holds NaN or infinity."""
    for place, output in outputs.items():
        if not all_finite([output]):
            return place
    return None


def broken_weights(reference: Reference) -> list[str]:
    """Return the names of the Parameters that hold NaN or infinity."""
    broken = []
    for name, parameter in reference.model.named_parameters():
        is_here = not parameter.is_meta  # one that stays in its file is not looked at
        if is_here and not all_finite([parameter]):
            broken.append(name)
    return broken
