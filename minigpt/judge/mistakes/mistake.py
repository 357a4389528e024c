"""A mistake: one part of a network computed in another way, how it is put into a model, and how it is taken out again.

B batch, T tokens, V vocabulary.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, TypeVar

from jaxtyping import Float, Int
from torch import Tensor, nn

Put = Callable[[Any, "Swaps"], None]  # changes a model through ``Swaps``
OfIds = Callable[[Int[Tensor, "1 seq"]], Int[Tensor, "1 read"]]
OfLogits = Callable[[Float[Tensor, "read vocab"]], Float[Tensor, "seq vocab"]]
OfBoth = Callable[[Float[Tensor, "seq vocab"], Float[Tensor, "seq vocab"]], Float[Tensor, "seq vocab"]]


class Swaps(contextlib.ExitStack):
    """Changes of a model's attributes, which are undone in reverse order when the block ends. Nothing is copied.

    Args:
        new_from: the length of the prompt that the model reads.
        padding: how many tokens that prompt is shorter than the longest.
    """

    def __init__(self, new_from: int = sys.maxsize, padding: int = 0) -> None:
        super().__init__()
        self.new_from, self.padding = new_from, padding

    def set(self, owner: nn.Module, name: str, value: Any) -> None:
        """Give a module another attribute: a submodule, a Parameter, a buffer, a method or a number."""
        kept = {**vars(owner), **owner._modules, **owner._parameters, **owner._buffers}
        if name in kept:
            self.callback(setattr, owner, name, kept[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def parameter(self, owner: nn.Module, name: str, value: Tensor) -> None:
        """Give a module another Parameter."""
        self.set(owner, name, nn.Parameter(value, requires_grad=False))


def nothing(model: Any, swaps: Swaps) -> None:
    """Leave a model as it is: the mistake is outside of it."""


def as_given(x: Tensor) -> Tensor:
    """Return what is given."""
    return x


class MistakePart(Enum):
    """What a mistake changes, where that decides what it is tried with."""

    WIRING = auto()
    LAST_NORM = auto()
    SCALE = auto()
    MASK = auto()
    SPREAD = auto()
    DIVISOR = auto()
    EPS = auto()
    WEIGHTS = auto()  # it may be in one block alone


@dataclass(frozen=True)
class Mistake:
    """One part of a network computed in another way.

    Attributes:
        words: a noun phrase that completes "It is this model with ...".
        put: changes the model.
        ids: changes the token ids that the model reads.
        logits: changes its logits. A row of NaN is one that the mistake does not determine.
        is_causal: whether a token's logits depend on no later token, so that the beginning of a text is enough.
        family: mistakes of a family differ by where they are only. Of those that the logits cannot tell apart, the
            simplest is named.
        error: of a rounding, the relative error of a number; 0 of a mistake that is no rounding.
        moves_blocks: whether it changes which blocks there are, so that other mistakes are put in before it.
        rebuilds: whether it builds the modules anew by another config, so that other mistakes are put in after it.
        fit: of the logits and the program's own, where the mistake has numbers that only the program knows.
        rank: 1 for a mistake in a part of what another one is in, or with more numbers of its own.
        cure: "Write ... in place of ...", where that is one plain phrase.
        part: what it changes; None if it is tried with others by its effect alone.
    """

    words: str
    put: Put = nothing
    ids: OfIds = as_given
    logits: OfLogits = as_given
    is_causal: bool = True
    family: str = ""
    error: float = 0.0
    moves_blocks: bool = False
    rebuilds: bool = False
    fit: OfBoth | None = None
    rank: int = 0
    cure: str = ""
    part: MistakePart | None = None

    def in_block(self, number: int) -> "Mistake":
        """Return the mistake in one block alone of those that it is in."""

        def put(model: Any, swaps: Swaps) -> None:
            self.put(SimpleNamespace(h=[model.h[number]]), swaps)

        return replace(self, words=f"{self.words} in h.{number} alone", put=put, rank=1)

    @property
    def simplicity(self) -> tuple[int, int, str]:
        """Of mistakes that the logits cannot tell apart, the least is named: that of lowest rank and fewest letters."""
        return self.rank, len(self.words), self.words

    @property
    def kind(self) -> str:
        """The family, or the words of a mistake that has none: mistakes of a kind differ by where they are only."""
        return self.family or self.words

    @property
    def is_outside(self) -> bool:
        """True if it changes the logits alone, so that the model need not compute again."""
        return self.put is nothing and self.ids is as_given


F = TypeVar("F", bound=Callable[..., Any])
Make = Callable[[Any], Iterable[Mistake]]  # the mistakes of a config


class MistakeTable(list[Make]):
    """The mistakes of a kind of models, by their config, their shape or themselves. The order decides nothing."""

    def add(self, make: Make) -> Make:
        """Decorate a function that yields the mistakes of a config."""
        self.append(make)
        return make


OF_GPT2 = MistakeTable()  # of a GPT2Config
OF_ANY = MistakeTable()  # of the Shape of a model of any architecture
OF_OTHER = MistakeTable()  # of a model of transformers


def always(config: Any) -> bool:
    """Return True: a mistake is one of any config."""
    return True


def mistake(
    words: str,
    *,
    role: str = "put",
    into: Callable[[Any], Any] = as_given,
    table: MistakeTable = OF_GPT2,
    when: Callable[[Any], bool] = always,
    **about: Any,
) -> Callable[[F], F]:
    """Decorate a function that is a mistake.

    Args:
        role: what it does, as an attribute of ``Mistake``: put, logits or fit.
        into: makes that of the function; by default it is that itself.
        when: whether a config can have the mistake.
        about: further attributes of ``Mistake``.
    """

    def add(function: F) -> F:
        only = Mistake(words, **{role: into(function)}, **about)
        table.append(lambda config: [only] if when(config) else [])
        return function

    return add
