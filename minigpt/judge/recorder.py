"""What norms and blocks compute while a model reads.

T tokens, C embedding.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Self

from torch import Tensor, nn


class Recorder:
    """Keeps the last input and output of chosen norms and blocks, in the order of the data, while it is active."""

    def __init__(self, model: nn.Module, places: Iterable[str]) -> None:
        self.modules: dict[nn.Module, list[str]] = {}
        for place in places:
            self.modules.setdefault(model.get_submodule(place), []).append(place)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        self.hooks = [
            module.register_forward_hook(partial(self._keep, itertools.cycle(names)))
            for module, names in self.modules.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(
        self, places: Iterator[str], _: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]
    ) -> None:
        place = next(places)  # a module may be at several places
        if args:
            self.inputs[place] = args[0]
        self.outputs[place] = output if isinstance(output, Tensor) else output[0]  # blocks may return a tuple
