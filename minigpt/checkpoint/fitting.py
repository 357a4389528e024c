"""Check that tensors are exactly a model's, of its shapes and in a dtype that it computes in."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from minigpt.errors import CheckpointError, listing
from minigpt.placement import DTYPES, dtype_name


def require_fitting(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], place: Path) -> None:
    """Check that ``given`` are exactly the tensors wanted.

    Raises:
        CheckpointError: if some are missing, unexpected, of another shape, or of a dtype that no model computes in.
    """
    complaints = misfits(given, wanted)
    known = {name: given[name].dtype for name in given.keys() & wanted.keys() if wanted[name].is_floating_point()}
    strange = [f"{name} is {dtype_name(dtype)}" for name, dtype in known.items() if dtype not in DTYPES.values()]
    if strange:
        complaints.append(f"of a dtype other than {', '.join(DTYPES)}: {listing(strange)}")
    if complaints:
        raise CheckpointError(f"{place} does not hold this model's tensors: {'; '.join(complaints)}")


def misfits(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return what is missing, unexpected or of another shape, in a few words each."""
    missing, unexpected = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    shapes = {name: (tuple(given[name].shape), tuple(wanted[name].shape)) for name in given.keys() & wanted.keys()}
    misshapen = [f"{name} is {has}, not {needs}" for name, (has, needs) in shapes.items() if has != needs]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape:": misshapen}
    return [f"{what} {listing(names)}" for what, names in kinds.items() if names]


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity. Reads every value."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.dtype in DTYPES.values()}
    return [name for name, tensor in floating.items() if not tensor.isfinite().all()]


def only_dtype(tensors: Mapping[str, Tensor], place: Path) -> torch.dtype:
    """Return the dtype of all tensors.

    Raises:
        CheckpointError: if they have several, or there are none.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.ndim}  # a norm may count its calls
    if not dtypes:
        raise CheckpointError(f"{place} holds no tensors")
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise CheckpointError(f"{place} holds tensors of {names}; choose the dtype to compute in, e.g. float32")
    return dtypes.pop()
