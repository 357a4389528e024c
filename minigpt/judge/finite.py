"""A reference that is not finite: transformers itself overflows at the dtype, so there is nothing to judge by.

T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.errors import MiniGPTError, listing
from minigpt.judge.reference import Recorder, Reference
from minigpt.judge.truth import Truth
from minigpt.precision import dtype_name

# Dtypes with a wider range than float16, in the order in which they are tried.
WIDER = {
    torch.float16: (torch.bfloat16, torch.float32),
    torch.bfloat16: (torch.float32,),
    torch.float32: (torch.float64,),
    torch.float64: (),
}

GradientsOf = Callable[[Reference], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Overflow:
    """A part of what transformers computes that holds NaN or infinity.

    Attributes:
        what: its name, e.g. "the logits of prompt 0".
        ids: the tokens that were read.
        is_gradient: whether it is gradients of all texts, and not an output of these tokens.
    """

    what: str
    ids: list[int]
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
        raise NotFiniteError(Overflow(what, ids))


def require_finite_gradients(gradients: Mapping[str, Tensor]) -> None:
    """Check the gradients that transformers computes.

    Raises:
        NotFiniteError: if one holds NaN or infinity.
    """
    wrong = []
    for name, gradient in gradients.items():
        if not all_finite([gradient]):
            wrong.append(name)
    if wrong:
        raise NotFiniteError(Overflow(f"the gradients of {listing(wrong)}", [], is_gradient=True))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether tensors hold neither NaN nor infinity."""
    return all(bool(x.isfinite().all()) for x in tensors)


def explain(truth: Truth, overflow: Overflow, gradients_of: GradientsOf) -> MiniGPTError:
    """Return an error that says where transformers is not finite, and which dtype to take instead.

    It reads the text again with one model after the other, so no other model should be in memory.

    Args:
        gradients_of: computes the gradients of all texts.
    """
    said = f"transformers itself is not finite at {dtype_name(truth.dtype)}: {overflow.what} hold NaN or infinity"
    if not overflow.is_gradient:
        reference = reference_at(truth, truth.dtype)
        place = first_not_finite(outputs_of(reference, overflow.ids))
        del reference
        if place is not None:
            said += f", and the first output that does is {place}"
    tried = []
    for wider in WIDER[truth.dtype]:
        reference = reference_at(truth, wider)
        if broken := broken_weights(reference):
            return MiniGPTError(f"{said}; the checkpoint's own weights do too: {listing(broken)}")
        computed = gradients_of(reference) if overflow.is_gradient else outputs_of(reference, overflow.ids)
        if all_finite(computed.values()):
            return MiniGPTError(f"{said}; take {dtype_name(wider)}, at which all of it is finite")
        tried.append(dtype_name(wider))
        del reference
    return MiniGPTError(f"{said}; {' and '.join(tried) or 'a wider dtype'} cannot hold it either")


def reference_at(truth: Truth, dtype: torch.dtype) -> Reference:
    """Return the original at another dtype."""
    return Reference(truth.place, attention=truth.attention, dtype=dtype, device=truth.device)


def outputs_of(reference: Reference, ids: list[int]) -> dict[str, Tensor]:
    """Return what norms and blocks compute of a text, in the order of the data, and the logits (1, T, V) last.

    Each is named as a sentence names it.
    """
    host = reference.host
    with Recorder(host.root, [*host.sites, *host.blocks]) as recorder:
        logits = reference(torch.tensor([ids], device=reference.device))
    outputs = {f"that of {place}": output for place, output in recorder.outputs.items()}
    return outputs | {"the logits": logits}


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
        if not all_finite([parameter]):
            broken.append(name)
    return broken
