"""Call somebody else's constructor with the arguments of a norm: a size, an eps, and whether there is a shift."""

import contextlib
import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minigpt.errors import MiniGPTError, NormError, raised
from minigpt.norms.foreign.locate import FUNCTION, last_line, source_file

EPS_NAME = re.compile(r"(\w+_)?(eps|epsilon)")
SHIFT_FLAG = re.compile(r"((use|has|with|add|enable|include|elementwise|learnable)_)?(bias|beta|shift)")
SCALE_FLAG = re.compile(r"(use|has|with|add|enable|include)_(weight|gamma|scale)|(\w+_)?affine|learnable|channels_last")

Maker = Callable[..., Any]


class Call(NamedTuple):
    """A call of a constructor that makes a norm."""

    make: Maker
    first: Parameter  # of its signature: the size
    size: Any
    keywords: dict[str, Any]

    @property
    def takes_eps(self) -> bool:
        """True if the constructor takes an eps."""
        return any(map(EPS_NAME.fullmatch, self.keywords))

    def module(self) -> nn.Module:
        """Return a new norm.

        Raises:
            NormError: if the constructor raises, or does not return a ``torch.nn.Module``.
        """
        return _make(self.make, self.first, self.size, self.keywords)


class Constructed(NamedTuple):
    """A norm, and the call that made it."""

    module: nn.Module
    call: Call


def construct(make: Maker, shape: tuple[int, ...], *, eps: float, bias: bool) -> Constructed:
    """Call ``make`` with the size, and with eps and the flag of the shift under the names of its signature.

    The size is an int or a shape: the first form with which the norm can be built and runs.

    Raises:
        NormError: if ``make`` cannot be called so, raises, or does not return a ``torch.nn.Module``.
    """
    if isinstance(make, nn.Module):
        raise NormError(f"norm must be a class or a function that makes one, got a module: {title(make)}")
    if isinstance(make, type) and not issubclass(make, nn.Module):
        raise NormError(f"{title(make)} is a class, but not a torch.nn.Module")
    with naming(make):
        parameters = list(inspect.signature(make).parameters.values())
    first = next((one for one in parameters if not _known([one], eps, bias)), None)  # some take their eps before it
    if first is None:
        raise NormError(f"{title(make)} has no parameter for the size")
    sizes: list[Any] = [torch.Size(shape)]
    if len(shape) == 1:
        sizes.insert(0, shape[0])
    errors = []
    made = []
    for size, keywords in itertools.product(sizes, _keywords(make, parameters, eps, bias)):
        call = Call(make, first, size, keywords)
        try:
            one = Constructed(call.module(), call)
        except NormError as error:
            errors.append(error)
            continue
        if _runs(one.module, shape):
            return one
        made.append(one)
    if made:
        return made[0]  # it may run on another device, like a CUDA kernel
    raise errors[0]


def title(make: object) -> str:
    """Return what a class, function or module is called in a message."""
    make = getattr(make, FUNCTION, make)
    if isinstance(make, functools.partial):
        return title(make.func)
    if isinstance(make, nn.Module):
        return type(make).__qualname__
    return getattr(make, "__qualname__", type(make).__qualname__)


def require_same_shape(y: object, x: Tensor, norm: nn.Module) -> None:
    """Check that a norm's output ``y`` is one tensor in the shape of its input ``x``.

    Raises:
        NormError: if it is not; the message names the line on which the norm's ``forward`` begins.
    """
    if isinstance(y, Tensor) and y.shape == x.shape:
        return
    got = f"a {type(y).__name__}"
    if isinstance(y, Tensor):
        got = str(tuple(y.shape))
    forward = inspect.unwrap(type(norm).forward)
    code = getattr(forward, "__code__", None)
    place = ""
    if code:
        place = f" ({code.co_filename}, line {code.co_firstlineno})"
    raise NormError(f"{title(norm)} must return one tensor of its input's shape {tuple(x.shape)}, got {got}{place}")


@contextlib.contextmanager
def naming(make: object, name: str | None = None) -> Iterator[None]:
    """Turn what somebody else's code raises into a NormError that names the code. Ctrl-C still ends the program."""
    try:
        yield
    except (MiniGPTError, torch.OutOfMemoryError):
        raise
    except raised() as error:
        what = last_line(error, source_file(make))
        raise NormError(f"{name or title(make)} raised {what}") from error


def _make(make: Maker, first: Parameter, size: Any, keywords: dict[str, Any]) -> nn.Module:
    arguments = [repr(size)]
    for key, value in keywords.items():
        arguments.append(f"{key}={value!r}")
    with naming(make, f"{title(make)}({', '.join(arguments)})"):
        if first.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            module = make(**{first.name: size}, **keywords)
        else:
            module = make(size, **keywords)
    if not isinstance(module, nn.Module):
        raise NormError(f"{title(make)} makes a {type(module).__name__}, not a torch.nn.Module")
    return module


def _runs(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return True if a copy of the module returns two rows in the shape of its input."""
    size = torch.Size(shape).numel()
    x = torch.arange(2.0 * size).sin().view(1, 2, *shape)
    try:
        with naming(module), torch.random.fork_rng(devices=[]), torch.no_grad():
            require_same_shape(copy.deepcopy(module)(x), x, module)
    except raised():
        return False
    return True


def _keywords(make: Maker, parameters: list[Parameter], eps: float, bias: bool) -> list[dict[str, Any]]:
    """Return the keyword arguments to try, in order: the signature's, and more for ``**kwargs``.

    ``**kwargs`` may go to a base class that takes an eps and a bias. The class may pass one of them itself, and would
    then raise if it got it twice. So both are tried first, then one, then none.
    """
    chosen = make.keywords if isinstance(make, functools.partial) else {}  # by the user
    keywords = _known([parameter for parameter in parameters if parameter.name not in chosen], eps, bias)
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return [keywords]
    more = {"eps": eps, "bias": bias}
    for name in chosen:
        more.pop(name, None)
    attempts = [more | keywords]
    for name in ("bias", "eps"):
        if name in more:
            attempts.append({name: more[name]} | keywords)
    return [*attempts, keywords]


def _known(parameters: Iterable[Parameter], eps: float, bias: bool) -> dict[str, Any]:
    """Return the arguments that a norm gets: an eps, and flags for its shift and its scale."""
    known: dict[str, Any] = {}
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        is_flag = default is Parameter.empty or default is None or isinstance(default, bool)
        if EPS_NAME.fullmatch(name):
            known[name] = eps
        elif is_flag and SHIFT_FLAG.fullmatch(name):
            known[name] = bias
        elif is_flag and SCALE_FLAG.fullmatch(name):
            known[name] = True
    return known
