"""Texts, and what a runner computes of each: transformers, a model of ours, a candidate, another program.

T tokens, V vocabulary, C embedding.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minigpt.errors import MiniGPTError
from minigpt.files import TemporaryFolder


@dataclass(frozen=True, eq=False)
class Text:
    """A text that every model reads at once.

    Attributes:
        ids: a prompt and what transformers writes after it, or a window of a text.
        new_from: the length of the prompt; of a window all of it.
        first: the first position whose logits are compared.
        counted: of how many of these positions the distribution counts. A later window of the text has the others.
        start: where a window begins in its text.
    """

    ids: list[int]
    new_from: int
    first: int
    counted: int
    start: int = 0

    @classmethod
    def whole(cls, ids: list[int], new_from: int | None = None) -> "Text":
        """Return a text whose logits are all compared."""
        if new_from is None:
            new_from = len(ids)
        return cls(ids, new_from, 0, len(ids))

    @property
    def compared(self) -> slice:
        """The positions whose logits are compared."""
        return slice(self.first, len(self.ids))

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.new_from]

    @property
    def written(self) -> list[int]:
        """The tokens that transformers writes greedily after the prompt."""
        return self.ids[self.new_from :]

    @property
    def before_new(self) -> slice:
        """The positions that predict what was written."""
        return slice(self.new_from - 1, len(self.ids) - 1)

    def targets(self, device: torch.device) -> Int[Tensor, " targets"]:
        """Return the tokens whose loss counts: a prompt's, or a window's new part's, from the second on."""
        targets = self.ids[self.first + 1 : self.new_from]
        return torch.tensor(targets, dtype=torch.long, device=device)


Outputs = Mapping[str, Tensor]  # (T, C) each; of norms of heads (T, H, D) or (H, T, D)


@dataclass(frozen=True, eq=False)
class Reading:
    """The outputs of a runner for a text.

    Attributes:
        logits: at the compared positions (T, V).
        outputs: of the norms and blocks that the text reaches, by their names in the original (T, C); empty if they are
            not known.
        inputs: of norms.
        alone: outputs of norms that are given the true inputs.
    """

    logits: Float[Tensor, "seq vocab"]
    outputs: Outputs = field(default_factory=dict)
    inputs: Outputs = field(default_factory=dict)
    alone: Outputs = field(default_factory=dict)


@contextlib.contextmanager
def recorded(model: nn.Module, places: Iterable[str]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Keep the first input and the first output of chosen norms and blocks in the block, in the order of the data.

    A module that is called again reads what others have computed meanwhile, so a later call says less about it.
    """
    modules: dict[nn.Module, list[str]] = {}
    for place in places:
        modules.setdefault(model.get_submodule(place), []).append(place)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def keep(places: Iterator[str], module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        place = next(places)  # a module may be at several places
        is_exported = type(module).__module__ == "torch.export.unflatten"  # it lists whatever is used later
        if isinstance(output, tuple) or (isinstance(output, list) and not is_exported):  # of a block
            output = output[0]
        if place in outputs or not isinstance(output, Tensor):
            return
        if args:
            inputs[place] = args[0]
        outputs[place] = output

    hooks: list[RemovableHandle] = []
    for module, names in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hook
            hooks.append(module.register_forward_hook(partial(keep, itertools.cycle(names))))
    try:
        yield inputs, outputs
    finally:
        for hook in hooks:
            hook.remove()


def rounded_as(reading: Reading, site: str, x: Float[Tensor, "seq *rows"]) -> Float[Tensor, "1 seq *rows"]:
    """Return a norm's true input as a batch of its own, at the dtype of the norm's output in a reading."""
    return x[None].to(reading.outputs[site].dtype, copy=True)


def as_batch(ids: list[int], device: torch.device) -> Tensor:
    """Return token ids as a batch of one (1, T)."""
    return torch.tensor([ids], device=device)


OUTPUT, INPUT = "output.", "input."  # begin the keys of a norm's or block's output, and of a norm's input


class StoredReadings(dict[Text, Any]):
    """Readings by text, each in a file of a temporary folder that goes with this object.

    Args:
        device: to which they are read.

    Raises:
        MiniGPTError: where a reading is set, if there is no room for it on the disk.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.folder = device, TemporaryFolder("truth")

    def __setitem__(self, text: Text, reading: Reading) -> None:
        file = self.folder.path / f"{len(self)}.safetensors"
        tensors = {"logits": reading.logits.cpu().contiguous()}
        for place, y in reading.outputs.items():
            tensors[OUTPUT + place] = _apart(y)
        for site, x in reading.inputs.items():
            tensors[INPUT + site] = _apart(x)
        try:
            save_file(tensors, file)
        except (OSError, SafetensorError) as error:
            raise MiniGPTError(
                f"cannot keep the true logits in {self.folder.path}: {error}; TMPDIR names a folder with more room"
            ) from error
        super().__setitem__(text, file)

    def __getitem__(self, text: Text) -> Reading:
        outputs: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        with safe_open(super().__getitem__(text), "pt", device=str(self.device)) as stored:
            logits = stored.get_tensor("logits")
            for name in stored.keys():  # noqa: SIM118 (it is no dict)
                if name.startswith(OUTPUT):
                    outputs[name.removeprefix(OUTPUT)] = stored.get_tensor(name)
                if name.startswith(INPUT):
                    inputs[name.removeprefix(INPUT)] = stored.get_tensor(name)
        return Reading(logits, outputs, inputs)


def _apart(x: Tensor) -> Tensor:
    """Return a copy on the CPU: what a block returns, the next norm is given, and a file holds no tensor twice."""
    return x.cpu().contiguous().clone()
