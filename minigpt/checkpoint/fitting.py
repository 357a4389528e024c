"""Are these tensors a model's, all of them, of its shapes, and numbers? Asked before anything is made of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, listing
from minigpt.placement import DTYPES, dtype_name


def require_affordable(config: GPT2Config, tensors: Mapping[str, Tensor], place: Path) -> None:
    """Refuse a config that asks for far more than there is, before a model of its shape is laid out.

    Raises:
        CheckpointError: the message says the size.
    """
    wanted, held = config.parameter_count, sum(tensor.numel() for tensor in tensors.values())
    if wanted > 10 * held + 10**6 or config.n_layer > 10 * len(tensors) + 100:
        raise CheckpointError(
            f"the config of {place} asks for {wanted:,} parameters, {4 * wanted / 1e9:,.1f} GB at float32, "
            f"and its weights are {held:,} numbers"
        )


def require_fitting(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], place: Path) -> None:
    """Refuse tensors that are not exactly those wanted.

    Raises:
        CheckpointError: some are missing, unexpected, of another shape, or of a dtype that no model computes in.
    """
    complaints = misfits(given, wanted)
    known = {name: given[name].dtype for name in given.keys() & wanted.keys() if wanted[name].is_floating_point()}
    strange = [f"{name} is {dtype_name(dtype)}" for name, dtype in known.items() if not _computes_in(dtype)]
    if strange:
        complaints.append(f"of a dtype other than {', '.join(DTYPES)}: {listing(strange)}")
    if complaints:
        raise CheckpointError(f"{place} does not hold this model's tensors: {'; '.join(complaints)}")


def misfits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """What is missing, unexpected or of another shape, in a few words each; nothing where all fit."""
    missing, unexpected = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    shapes = {name: (tuple(given[name].shape), tuple(wanted[name].shape)) for name in given.keys() & wanted.keys()}
    misshapen = [f"{name} is {has}, not {needs}" for name, (has, needs) in shapes.items() if has != needs]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape:": misshapen}
    return [f"{what} {listing(names)}" for what, names in kinds.items() if names]


def require_finite(tensors: Mapping[str, Tensor], place: Path, when: str = "") -> None:
    """Refuse NaN and infinity.

    Raises:
        CheckpointError: the message names the tensors, and says ``when`` they are not.
    """
    if names := not_finite(tensors):
        raise CheckpointError(f"{place} holds NaN or infinity in {listing(names)}{when}")


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity. Every value is read."""
    return [name for name, tensor in tensors.items() if _computes_in(tensor.dtype) and not _is_finite(tensor)]


def only_dtype(tensors: Mapping[str, Tensor], place: Path) -> torch.dtype:
    """The dtype that all have.

    Raises:
        CheckpointError: they have several, or there are none.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.ndim}  # a norm may count its calls
    if not dtypes:
        raise CheckpointError(f"{place} holds no tensors")
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise CheckpointError(f"{place} holds tensors of {names}; name the dtype to compute in, such as float32")
    return dtypes.pop()


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()  # NaN anywhere makes both NaN; and no mask as large as the tensor is made
    return bool(low.isfinite() and high.isfinite())


def _computes_in(dtype: torch.dtype) -> bool:
    return dtype in DTYPES.values()
