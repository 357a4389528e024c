"""Call somebody else's constructor with what a norm can be told: a size, an eps, and whether there is a shift."""

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minigpt.errors import RAISED, MiniGPTError, NormError
from minigpt.norms.foreign.locate import last_line

EPS = re.compile(r"(\w+_)?(eps|epsilon)")
SHIFT_FLAG = re.compile(r"((use|has|with|add|enable|include|elementwise|learnable)_)?(bias|beta|shift)")
SCALE_FLAG = re.compile(r"(use|has|with|add|enable|include)_(weight|gamma|scale)|(\w+_)?affine|learnable")
TWICE = re.compile(r"multiple values for keyword argument '(\w+)'")  # Python's own words, which a TypeError has alone

Maker = Callable[..., Any]
Size = int | torch.Size | list[int]


class Constructed(NamedTuple):
    """What was made, and whether it could be told an eps."""

    module: nn.Module
    takes_eps: bool


def construct(make: Maker, shape: tuple[int, ...], *, eps: float, bias: bool) -> Constructed:
    """``make(size, ...)``, with eps and the flag of the shift under the names that its signature has for them.

    The size is its first argument: an int or a shape, whichever the class can be called and then run with.

    Raises:
        NormError: it cannot be called so, raises, or makes something that is no ``torch.nn.Module``.
    """
    if isinstance(make, nn.Module):
        raise NormError(f"{title(make)} is a module already made; give its class, or a function that makes one")
    if isinstance(make, type) and not issubclass(make, nn.Module):
        raise NormError(f"{title(make)} is a class, but not a torch.nn.Module")
    keywords, errors, made = _keywords(make, eps, bias), [], []
    for size in _sizes(make, shape):
        try:
            one = _call(make, size, keywords)
        except NormError as error:
            errors.append(error)
        else:
            if _runs(one.module, shape):
                return one
            made.append(one)
    if made:
        return made[0]  # its first use says what is wrong, if anything is, on the device that it is written for
    raise _with_a_way_out(errors[0])


def title(make: object) -> str:
    """What a class, function or module is called in a message."""
    if isinstance(make, functools.partial):
        return title(make.func)
    return type(make).__qualname__ if isinstance(make, nn.Module) else getattr(make, "__qualname__", repr(make))


def source_file(make: object) -> str | None:
    """The file that a class, function or module is written in; None where there is none."""
    if isinstance(make, functools.partial):
        return source_file(make.func)
    try:
        written: Any = type(make) if isinstance(make, nn.Module) else inspect.unwrap(make)  # pyright: ignore
        return inspect.getsourcefile(written)
    except (TypeError, OSError):  # it was never written in a file, but in a session for instance
        return None


@contextlib.contextmanager
def naming(make: object, asked: str | None = None) -> Iterator[None]:
    """Around what somebody else's code is asked for: what that raises is a NormError that names it."""
    try:
        yield
    except (MiniGPTError, torch.OutOfMemoryError):
        raise
    except RAISED as error:
        raise NormError(f"{asked or title(make)} raised {last_line(error, source_file(make))}") from error


def _with_a_way_out(error: NormError) -> NormError:
    """The same; where a size may have been taken for something else, a config for one, with what to do about it."""
    cause: Any = error.__cause__
    if not isinstance(cause, TypeError) and not isinstance(getattr(cause, "obj", None), int | torch.Size | list):
        return error
    hint = "if it takes something else than a size, an eps and a flag, wrap it in a function (size, eps, bias)"
    found = NormError(f"{error}; {hint}")
    found.__cause__ = cause
    return found


def _call(make: Maker, size: Size, keywords: dict[str, Any]) -> Constructed:
    """What it makes when told all that, but for what it settles by itself."""
    told = dict(keywords)
    while True:
        try:
            return Constructed(_made(make, size, told), any(map(EPS.fullmatch, told)))
        except NormError as error:
            twice = _told_twice(make, error.__cause__)
            if twice not in told:
                raise
        del told[twice]  # here, since within "except" Python calls the next such error a KeyError


def _made(make: Maker, size: Size, keywords: dict[str, Any]) -> nn.Module:
    takes_size = _signature(make)[0]
    comes_first = takes_size.name == _parameters(make)[0].name
    by_name = {Parameter.KEYWORD_ONLY: takes_size.name, Parameter.VAR_KEYWORD: "normalized_shape"}.get(
        takes_size.kind, None if comes_first else takes_size.name
    )
    unnamed = [one for one in _signature(make)[1:] if one.kind is Parameter.POSITIONAL_ONLY]
    places = [keywords.get(one.name, one.default) for one in unnamed]
    named = {name: value for name, value in keywords.items() if name not in {one.name for one in unnamed}}
    given = ", ".join([repr(size), *map(repr, places), *(f"{name}={value!r}" for name, value in named.items())])
    with naming(make, f"{title(make)}({given})"):
        module = make(*places, **{by_name: size}, **named) if by_name else make(size, *places, **named)
    if not isinstance(module, nn.Module):
        raise NormError(f"{title(make)} makes a {type(module).__name__}, not a torch.nn.Module")
    return module


def _told_twice(make: Maker, error: BaseException | None) -> str | None:
    """What a base class was told by the class itself, and again by ``**kwargs``; None where that is not the error."""
    found = TWICE.search(str(error)) if isinstance(error, TypeError) else None
    return found[1] if found and found[1] not in {own.name for own in _parameters(make)} else None


def _sizes(make: Maker, shape: tuple[int, ...]) -> list[Size]:
    """The forms that a size can be given in, the likeliest first."""
    as_shape: list[Size] = [torch.Size(shape), list(shape)]
    if len(shape) > 1:
        return as_shape
    first = _signature(make)[0]
    asks_for_shape = "shape" in first.name and first.annotation not in (int, "int")
    return [*as_shape, *shape] if asks_for_shape else [*shape, *as_shape]


def _runs(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether it gives two rows back in their own shape. A copy of it is asked, so that it remembers nothing of it."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            y = copy.deepcopy(module)(torch.randn(1, 2, *shape))
    except RAISED:  # of any kind: what cannot run here may run elsewhere
        return False
    return isinstance(y, Tensor) and y.shape == (1, 2, *shape)


def _keywords(make: Maker, eps: float, bias: bool) -> dict[str, Any]:
    """What it is told beside the size, named as in its own signature or in those that it passes ``**kwargs`` to."""
    beside_size = _signature(make)[1:]
    bound = make.keywords if isinstance(make, functools.partial) else {}  # its user's choice, eps or not
    keywords = {
        parameter.name: value
        for parameter in (*_passed_on(make), *beside_size)
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and parameter.name not in bound
        for value in _told(parameter, eps, bias)
    }
    missing = [
        parameter.name
        for parameter in beside_size
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        and parameter.name not in keywords
    ]
    if missing:
        raise NormError(
            f"{title(make)} needs {', '.join(missing)} beside a size, an eps and a flag for the shift; "
            "wrap it in a function (size, eps, bias) that knows the rest"
        )
    return keywords


def _told(parameter: Parameter, eps: float, bias: bool) -> Iterator[Any]:
    """The value for one parameter of a constructor; none where it is left at its default."""
    default = parameter.default
    is_flag = default is Parameter.empty or default is None or isinstance(default, bool)
    if EPS.fullmatch(parameter.name):
        yield eps
    elif is_flag and SHIFT_FLAG.fullmatch(parameter.name):
        yield bias
    elif is_flag and SCALE_FLAG.fullmatch(parameter.name):
        yield True


def _signature(make: Maker) -> list[Parameter]:
    """The parameters, that of the size first, which it is unless it has the name of something else that is told."""
    parameters = _parameters(make)
    untold = [parameter for parameter in parameters if not list(_told(parameter, 0.0, True))]
    size = next((parameter for parameter in untold if parameter is parameters[0] or _may_be_size(parameter)), None)
    if size is None:
        raise NormError(f"{title(make)} is told no size: it takes {', '.join(p.name for p in parameters)}")
    return [size, *(parameter for parameter in parameters if parameter is not size)]


def _may_be_size(parameter: Parameter) -> bool:
    """Whether one that is not the first may be told it: by its name alone, and by what it is without it."""
    is_named = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    default = None if parameter.default is Parameter.empty else parameter.default
    is_like = default is None or (isinstance(default, int | tuple | list) and not isinstance(default, bool))
    return is_named and is_like and parameter.name not in ("device", "dtype")


def _parameters(make: Maker) -> list[Parameter]:
    """The parameters of a class's constructor, without self, or of a function: at least one."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError) as error:
        raise NormError(f"{title(make)} has no signature to read; wrap it in a function (size, eps, bias)") from error
    if not parameters:
        raise NormError(f"{title(make)} takes no arguments, but a norm must be told its size")
    return parameters


def _passed_on(make: Maker) -> list[Parameter]:
    """What ``**kwargs`` can hold: the parameters of the base classes' constructors, or, of a function, our own."""
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in _signature(make)):
        return []
    if not isinstance(make, type):
        ours = {"eps": EPS, "bias": SHIFT_FLAG}
        named = [parameter.name for parameter in _signature(make)]
        return [Parameter(name, Parameter.KEYWORD_ONLY) for name, pattern in ours.items()
                if not any(map(pattern.fullmatch, named))]  # fmt: skip
    found: list[Parameter] = []
    for cls in make.__mro__[: make.__mro__.index(nn.Module)]:
        if "__init__" in vars(cls):
            parameters = list(inspect.signature(cls.__init__).parameters.values())
            found.extend(parameters[2:])  # after self and the size
            if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
                break
    return found
