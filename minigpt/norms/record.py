"""Metadata of a norm in a model."""

import dataclasses
from typing import Any

from torch import Tensor, nn

ATTRIBUTE = "minigpt_record"  # of a norm's module, so that it travels and is copied with the module


@dataclasses.dataclass
class NormRecord:
    """Facts about a norm that its class has no place for.

    Attributes:
        name: what ``norms.build`` takes to build it again; None for a norm of this package, whose class says it.
        notes: what a reader should know: another eps, a scale or shift that its class lacks.
        originals: the checkpoint's "weight" and "bias" for this site, where the norm does not use them.
        initial: the values that its Parameters and buffers were built with, where a checkpoint may lack them.
        site: what the norm computes that it replaces, a ``minigpt.host.NormSite``.
        adds_one: whether the norm itself multiplies by 1 + weight, as the site does.
        trained: the name of the norm in the checkpoint itself, if that was no LayerNorm. Nothing can be fitted to it.
    """

    name: str | None = None
    notes: tuple[str, ...] = ()
    originals: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)
    initial: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    site: Any = None
    adds_one: bool = False
    trained: str | None = None


def record_of(norm: nn.Module) -> NormRecord:
    """Return the record of a norm, which begins empty."""
    record = getattr(norm, ATTRIBUTE, None)
    if record is None:
        record = NormRecord()
        setattr(norm, ATTRIBUTE, record)
    return record
