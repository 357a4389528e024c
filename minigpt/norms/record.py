"""Metadata of a norm in a model."""

import dataclasses

from torch import Tensor, nn

ATTRIBUTE = "minigpt_record"  # of a norm's module, so that it travels and is copied with the module


@dataclasses.dataclass(frozen=True)
class NormSite:
    """The formula of the norm at a site.

    Attributes:
        kind: "layer_norm", "rms_norm" or "other".
        eps: under the root; None for another kind.
        adds_one: whether it multiplies by 1 + weight.
        width: the length of its rows.
        rounds: where it rounds in half precision: "once", after its weight has multiplied the row; "row", before that
            too, as Llama's does; "other"; None if it has no weight, or it is not known.
    """

    kind: str
    eps: float | None = None
    adds_one: bool = False
    width: int = 0
    rounds: str | None = None


@dataclasses.dataclass
class NormRecord:
    """Facts about a norm that its class has no place for.

    Attributes:
        name: what ``norms.build`` takes to build it again; None for a norm of this package, whose class says it.
        notes: what a reader should know: another eps, a scale or shift that its class lacks.
        originals: the checkpoint's "weight" and "bias" for this site, where the norm does not use them.
        initial: the values that its Parameters and buffers were built with, where a checkpoint may lack them.
        site: what the norm computes that it replaces; None if it replaces none.
        adds_one: whether the norm itself multiplies by 1 + weight, as the site does.
        trained: the name of the norm in the checkpoint itself, if that was no LayerNorm. Nothing can be fitted to it.
    """

    name: str | None = None
    notes: tuple[str, ...] = ()
    originals: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)
    initial: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    site: NormSite | None = None
    adds_one: bool = False
    trained: str | None = None


def record_of(norm: nn.Module) -> NormRecord:
    """Return the record of a norm, which begins empty."""
    record = getattr(norm, ATTRIBUTE, None)
    if record is None:
        record = NormRecord()
        setattr(norm, ATTRIBUTE, record)
    return record
