"""Turn tensors into the arrays of another package, and its arrays into tensors.

NumPy's arrays share a tensor's memory, so a function that writes into its input is seen. Other packages get a copy,
through DLPack where they have it: JAX takes its arrays for unchanging, and may read them later.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minigpt.errors import NormError, raised
from minigpt.norms.foreign.locate import last_line
from minigpt.precision import dtype_name

# Submodules in which packages keep their from_dlpack
PLACES = ("", ".core", ".dlpack", ".utils.dlpack", ".experimental.dlpack")
MAKERS = {"tinygrad": "Tensor"}  # of NumPy's arrays, where a package has no from_dlpack
BY_SHAPE = ("jax", "tinygrad")  # they compile each operation again for each shape
HINTS = {
    ("numpy", "bfloat16"): "pip install ml_dtypes",
    ("jax", "float64"): 'jax.config.update("jax_enable_x64", True) in the norm\'s file switches it on',
}
DOUBLE = {"dtypes.double": "float64", "dtypes.float": "float32", "dtypes.half": "float16"}  # as tinygrad writes them


class NotSupported(NormError):
    """A dtype that a package has no arrays of, or a gradient that a function does not give."""


class Package(NamedTuple):
    """Access to the arrays of a package.

    Attributes:
        name: of its module.
        to_array: a function from a tensor to an array with its numbers; it raises NotSupported for a dtype that the
            package lacks.
        is_array: a function from an object to whether it is one of its arrays.
        to_tensor: a function from an array to a tensor.
    """

    name: str
    to_array: Callable[[Tensor], Any]
    is_array: Callable[[Any], bool]
    to_tensor: Callable[[Any], Tensor]

    @property
    def compiles_by_shape(self) -> bool:
        """True if a shape that was not met before takes the time of a compiler."""
        return self.name in BY_SHAPE


def package_of(name: object) -> Package:
    """Return how to reach the arrays of a package.

    Raises:
        NormError: if it does not import, or has no ``from_dlpack``.
    """
    if name == "numpy":
        return Package("numpy", to_numpy, lambda made: isinstance(made, np.ndarray), of_numpy)
    if name == "torch":
        return Package("torch", _itself, lambda made: isinstance(made, Tensor), _itself)
    if not isinstance(name, str) or not name.isidentifier():
        raise NormError(f"must be the name of a package, numpy, torch, jax, ..., got {name!r}", argument="arrays")
    module = _imported(name)
    make = _numpy_maker(name, module) if name in MAKERS else _dlpack_maker(name)
    return Package(name, make, _has_numbers, _of_dlpack)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array on the same memory, which has the same strides.

    Raises:
        NotSupported: for bfloat16 without ml_dtypes, since NumPy has no such dtype.
    """
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(_bfloat16())


def of_numpy(array: np.ndarray) -> Tensor:
    """Return an array as a tensor, on the same memory where PyTorch can use it."""
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _bfloat16() -> Any:
    try:
        return importlib.import_module("ml_dtypes").bfloat16
    except ImportError:
        raise _lacks_dtype("numpy", torch.bfloat16) from None


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _has_numbers(made: Any) -> bool:
    """Return True for what has DLPack, or a method that gives NumPy's array."""
    return hasattr(made, "__dlpack__") or callable(getattr(made, "numpy", None))


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except raised() as error:
        raise NormError(f"must be a package that imports here, got {name!r}: {error}", argument="arrays") from error


def _dlpack_maker(name: str) -> Callable[[Tensor], Any]:
    from_dlpack = _from_dlpack(name)

    def make(tensor: Tensor) -> Any:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return _checked(name, copy, lambda: from_dlpack(copy))

    return make


def _from_dlpack(name: str) -> Callable[..., Any]:
    """Return a package's ``from_dlpack``.

    Raises:
        NormError: if it has none.
    """
    for place in PLACES:
        try:
            function = getattr(importlib.import_module(name + place), "from_dlpack", None)
        except ImportError:
            continue
        if callable(function):
            return function
    raise NormError(f"must be a package with from_dlpack, which {name} has not", argument="arrays")


def _numpy_maker(name: str, module: ModuleType) -> Callable[[Tensor], Any]:
    of_array = getattr(module, MAKERS[name])

    def make(tensor: Tensor) -> Any:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return _checked(name, copy, lambda: of_array(to_numpy(copy)))

    return make


def _checked(name: str, tensor: Tensor, make: Callable[[], Any]) -> Any:
    """Return the array of a tensor.

    Raises:
        NotSupported: if it has another dtype: JAX narrows float64 in silence. Or if the package refuses the dtype.
    """
    try:
        array = make()
    except raised() as error:
        if tensor.dtype == torch.float32:
            raise NormError(f"{name} takes no array of {tuple(tensor.shape)}: {last_line(error)}") from error
        raise _lacks_dtype(name, tensor.dtype) from error
    dtype = str(array.dtype)
    if dtype_name(tensor.dtype) not in DOUBLE.get(dtype, dtype):
        raise _lacks_dtype(name, tensor.dtype)
    return array


def _lacks_dtype(name: str, dtype: torch.dtype) -> NotSupported:
    missing = dtype_name(dtype)
    hint = HINTS.get((name, missing))
    return NotSupported(f"{name} has no {missing}" + (f" here; {hint}" if hint else ""))


def _of_dlpack(array: Any) -> Tensor:
    """Return an array as a tensor of its own."""
    if hasattr(array, "__dlpack__"):
        return torch.from_dlpack(array).clone()
    return of_numpy(array.numpy()).clone()
