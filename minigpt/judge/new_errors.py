"""The norms and blocks of another program that add an error of their own to earlier errors.

transformers reads the texts in float64. The output of every norm and block is replaced by the program's there, so that
whatever follows is computed from the program's own numbers. Where the program differs from that, the error is new.

B batch, T tokens, C embedding.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.errors import MiniGPTError
from minigpt.judge.measures import RowDistance
from minigpt.judge.reading import Outputs, Sample
from minigpt.judge.reference import Reference
from minigpt.judge.true_norm import TrueNorm
from minigpt.judge.truth import Truth

Rows = Float[Tensor, "rows width"]  # one a token, and of norms of heads one a token and head

SAME = 1e-6  # two readings in float64 differ by less, relative to their size
EXPLAINED = 0.5  # an error of a block that falls below this share, less what was off before, came from there


class Replacing:
    """Replaces the outputs of norms and blocks of a model by a program's, and counts how far they were apart.

    Args:
        root: has the places of the truth.

    Attributes:
        outputs: of the program, for the text that is read now.
        errors: by place, of the program's outputs, given its outputs before.
        without: by place and a norm before it in its block, the same errors less what was off where that norm reads.
        has_more_streams: whether a block returns more than the program's one stream, as in Gemma 3n.
    """

    def __init__(self, truth: Truth, root: nn.Module) -> None:
        self.truth, self.root = truth, root
        self.outputs: Outputs = {}
        self.errors: defaultdict[str, RowDistance] = defaultdict(RowDistance)
        self.without: defaultdict[tuple[str, str], RowDistance] = defaultdict(RowDistance)
        self.residuals: dict[str, Rows] = {}
        self.has_more_streams = False
        self.hooks: list[Any] = []

    def __enter__(self) -> "Replacing":
        modules: dict[nn.Module, list[str]] = {}
        for place in (*self.truth.sites, *self.truth.blocks):
            modules.setdefault(self.root.get_submodule(place), []).append(place)
        for module, places in modules.items():
            hook = partial(self._replace, itertools.cycle(places))  # a module may be at several places
            self.hooks.append(module.register_forward_hook(hook))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _replace(self, places: Iterator[str], _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the program's output of the next of a module's places, in place of the true one."""
        place = next(places)
        if place not in self.outputs:
            return None
        is_alone = isinstance(output, Tensor)  # blocks may return a tuple
        exact = output
        if not is_alone:
            exact = output[0]
        program = self.outputs[place].to(exact.device, torch.float64)
        if program.numel() != exact.numel():
            self.has_more_streams = True
            return None
        program = program.view_as(exact)
        written = _rows(program)
        self.errors[place].add(written, _rows(exact))
        if place in self.truth.norms and args:
            self._add_norm(place, _rows(args[0]), written)
        for site, off in self.residuals.items():
            if site.startswith(f"{place}."):
                self.without[place, site].add(written - off, _rows(exact))
        if is_alone:
            return program
        return (program, *output[1:])

    def _add_norm(self, place: str, x: Rows, program: Rows) -> None:
        """Count the output of a norm, and keep how far the stream was off that it has read."""
        norm = self.truth.norms[place]
        off = residual_error(norm, x, program)
        if off is None or off.shape[-1] != self.truth.config.n_embd:
            return
        for site, before in self.residuals.items():
            if self._block_of(site) == self._block_of(place):
                self.without[place, site].add(program, norm(x + before))
        self.residuals[place] = off

    def _block_of(self, place: str) -> str | None:
        """Return the block that a norm is in, if it is in one."""
        for block in self.truth.blocks:
            if place.startswith(f"{block}."):
                return block
        return None


def _rows(x: Float[Tensor, "*dims width"]) -> Rows:
    """Return the rows of a norm or a block, which are (1, T, C), (T, C), and of norms of heads (1, T, H, D)."""
    return x.flatten(0, -2)


def residual_error(norm: TrueNorm, x: Rows, program: Rows) -> Rows | None:
    """Return how far the stream that a program's norm has read is from ``x``, as far as the norm's output shows it.

    A norm hides two numbers of a row: its mean and its size. They are taken from ``x``.
    """
    if norm.module is not None or norm.weight is None:
        return None
    mean = torch.zeros_like(x[..., :1])
    if norm.kind == "layer_norm":
        mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    size = (variance + norm.eps).sqrt()
    scaled = program
    if norm.bias is not None:
        scaled = program - norm.bias
    rows = scaled / norm.weight * size + mean
    return torch.where(norm.weight == 0, 0, rows - x)


def new_errors(truth: Truth, texts: list[tuple[Sample, Outputs]]) -> dict[str, float]:
    """Return the relative error that each norm and block adds, given the program's outputs before it.

    The error of a block leaves out what the program's attention added, as far as its second norm shows that. Nothing
    is known, and nothing returned, without the checkpoint or without the whole output of every block.

    Args:
        texts: the texts, and the program's outputs of norms and blocks on each.
    """
    if not texts or not truth.place.exists():
        return {}
    blocks = set(truth.blocks)
    for _, outputs in texts:
        if not blocks <= outputs.keys():
            return {}
    reference = _same_model(truth, texts[0][0])
    if reference is None:
        return {}
    with torch.inference_mode(), Replacing(truth, reference.host.root) as replacing:
        for sample, outputs in texts:
            replacing.outputs, replacing.residuals = outputs, {}
            reference(truth.tensor(sample.ids))
    if replacing.has_more_streams:
        return {}
    errors: dict[str, float] = {}
    for place, distance in replacing.errors.items():
        errors[place] = distance.relative
    for (place, _), distance in replacing.without.items():
        if distance.relative < EXPLAINED * replacing.errors[place].relative:
            errors[place] = 0.0
    return errors


def _same_model(truth: Truth, sample: Sample) -> Reference | None:
    """Return transformers in float64; None if it no longer computes the truth, since the checkpoint is another."""
    how: dict[str, Any] = {
        "dtype": truth.dtype,
        "device": truth.device,
        "compute": torch.float64,
        "offload": truth.offload,
    }
    try:
        reference = Reference(truth.place, attention=truth.attention, **how)
        with torch.inference_mode():
            logits = reference(truth.tensor(sample.ids))[0]
    except (MiniGPTError, ImportError):
        return None
    true = truth.logits(sample)
    if logits.shape != true.shape:
        return None
    error = float((logits - true).norm() / true.norm())
    if not error <= SAME:
        return None
    return reference
