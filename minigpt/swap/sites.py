"""Replace norms in a model that is already loaded, sharing their Parameters."""

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minigpt import norms
from minigpt.choices import KEEP, patterns_of
from minigpt.errors import ConfigError, NormError
from minigpt.norms.foreign.adapt import AdaptedNorm
from minigpt.norms.foreign.construct import naming, require_same_shape, title
from minigpt.norms.record import record_of

THIRDS = ("early", "middle", "late")  # of the depth, as patterns of sites
WAY_OUT = "to write it for this model, subclass minigpt.LayerNorm and override standardize(self, x)"


class HasNorms(Protocol):
    """A model whose norms can be swapped: a ``minigpt.GPT2``, or the ``transformer`` of a model of ``minigpt.hf``."""

    config: Any
    training: bool
    wte: Any

    def __call__(self, input_ids: Tensor, /) -> Any: ...
    def norm_sites(self) -> list[str]: ...
    def norm_modules(self) -> dict[str, nn.Module]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def get_submodule(self, target: str, /) -> Any: ...
    def set_submodule(self, target: str, module: nn.Module, /) -> None: ...
    def train(self, mode: bool = True, /) -> Any: ...


def swap_norms(
    model: HasNorms, norm: norms.NormSpec, sites: str | Iterable[str] = "*", keep: Collection[str] = KEEP
) -> list[str]:
    """Put ``norm`` at the matching sites, in place; return their names, in the order data meets them.

    The new norm uses the Parameters of the old. Nothing is copied, an optimizer goes on with what it holds, and
    swapping back restores the model exactly, except for hooks: they go with the module they were put on. In place of a
    fitted norm's Parameters it uses the checkpoint's. Its eps is the config's. A warning says if its class has another,
    and what becomes of a scale or shift that the class lacks.

    Args:
        norm: as ``norms.build`` takes it: a name, a class, a function, "package.module:Name" or "path/to/file.py:Name".
        sites: a shell-style pattern, or several, over the norm modules' names: "*", "ln_f", "h.*.ln_1", "h.[0-5].ln_2",
            or a third of the blocks: "early", "middle", "late".
        keep: which of "scale" and "shift" stay beside a class that lacks them. A norm that takes its place later has
            both again.

    Raises:
        ConfigError: if the model has no norm sites.
        NormError: if the norm is unknown, cannot be built or cannot run, one module is given to several sites, or a
            pattern matches no site. Nothing has been replaced then.
    """
    check_has_norms(model)
    chosen = match_sites(model, sites)
    old = {name: model.get_submodule(name) for name in chosen}
    for name, module in old.items():
        require_own_parameters(name, module)
    new = {name: build_like(module, norm, model, keep) for name, module in old.items()}
    _require_one_each(model, list(new.values()))
    for name, module in new.items():
        share(module, old[name], model)
    _require_runs(next(iter(new.values())), model)
    for name, module in new.items():
        model.set_submodule(name, module)
    for note in sorted({note for module in new.values() for note in norms.notes(module)}):
        logging.getLogger("minigpt").warning("%s", note)
    return chosen


def check_has_norms(model: object) -> None:
    """Check that a model has norm sites."""
    if not all(hasattr(model, name) for name in ("norm_sites", "norm_modules", "wte")):
        raise ConfigError(
            "model must be a minigpt.GPT2, or the .transformer of a model of minigpt.hf, got a "
            f"{type(model).__module__.partition('.')[0]}.{type(model).__name__}"
        )


def match_sites(model: HasNorms, sites: str | Iterable[str]) -> list[str]:
    """Return the norm sites that at least one pattern matches.

    Raises:
        NormError: if a pattern matches none, or there is no pattern.
    """
    names, matched = model.norm_sites(), set[str]()
    for pattern in patterns_of(sites):
        matched |= {*matching(pattern, names)}
    return [name for name in names if name in matched]


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the norm sites of ``names`` that a pattern matches.

    "early", "middle" and "late" are the norms of the first, second and last third of the blocks. ln_f is in none.

    Raises:
        NormError: if it matches none.
    """
    if pattern in THIRDS:
        blocks = {name: int(name.split(".")[1]) for name in names if name.startswith("h.")}
        layers, third = max(blocks.values()) + 1, THIRDS.index(pattern)
        first, end = round(third * layers / 3), round((third + 1) * layers / 3)
        matched = [name for name, block in blocks.items() if first <= block < end]
    else:
        matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        raise NormError(f"no norm site matches {pattern!r}; the sites are {', '.join(names)}")
    return matched


def require_own_parameters(name: str, module: nn.Module) -> None:
    """Check that weight and bias are Parameters. Pruning, for example, computes them from others.

    Raises:
        NormError: if one of the two is not.
    """
    tensors = [own for role in ("weight", "bias") if isinstance(own := getattr(module, role, None), Tensor)]
    if not all(isinstance(own, nn.Parameter) for own in tensors):
        raise NormError(f"weight or bias of {name} is not a Parameter; undo its pruning or parametrization")


def originals(norm: nn.Module) -> dict[str, nn.Parameter]:
    """Return the checkpoint's weight and bias at a norm's site, also those that the norm does not use."""
    both = {role: getattr(norm, role, None) for role in ("weight", "bias")}
    return {role: own for role, own in both.items() if isinstance(own, nn.Parameter)} | record_of(norm).originals


def build_like(old: nn.Module, norm: norms.NormSpec, model: HasNorms, keep: Collection[str] = KEEP) -> nn.Module:
    """Return a new norm for the site of ``old``, with a shift if that has one, and the model's eps."""
    own = originals(old)
    has_shift = "bias" in own or "weight" not in own
    return norms.build(norm, model.config.n_embd, eps=model.config.layer_norm_epsilon, bias=has_shift, keep=keep)


def _require_one_each(model: HasNorms, new: list[nn.Module]) -> None:
    """Check that every site has a separate module, since a module holds the Parameters of one site."""
    taken = {id(module) for module in model.modules()}
    for norm in new:
        own = id(norm.norm if isinstance(norm, AdaptedNorm) else norm)
        if own in taken:
            raise NormError("norm returns one module for several sites; it must make a new one at every call")
        taken.add(own)


def share(new: nn.Module, old: nn.Module, model: HasNorms) -> None:
    """Give ``new`` the checkpoint's Parameters that ``old`` has or remembers; move it to the model's device, dtype."""
    record = record_of(new)
    with naming(new):
        new.to(model.wte.weight.device, model.wte.weight.dtype)
        for role, shared in originals(old).items():
            parameter = getattr(new, role, None)
            if isinstance(parameter, nn.Parameter) and parameter.shape == shared.shape:
                if role in record_of(old).originals:
                    shared.data = shared.data.to(parameter)  # the model may have been moved meanwhile
                if shared.requires_grad and not parameter.requires_grad:
                    record.notes += (f"{title(new)} freezes its {role}; here it is the model's, which is trained",)
                setattr(new, role, shared)
            else:
                record.originals[role] = shared
        record.trained = record_of(old).trained
        new.train(old.training)


@torch.no_grad()
def _require_runs(norm: nn.Module, model: HasNorms) -> None:
    """Try a copy of a norm on two tokens.

    Raises:
        NormError: if it raises, or its output is not like its input.
    """
    if norms.is_ours(type(norm)) or model.wte.weight.is_meta:
        return
    asked, own = copy.deepcopy(norm).eval(), norm.norm if isinstance(norm, AdaptedNorm) else norm
    x = torch.arange(2.0 * model.config.n_embd).sin().view(1, 2, -1).to(model.wte.weight)
    try:
        with naming(own), torch.random.fork_rng(devices=[]):
            y = asked(x.clone())
            require_same_shape(y, x, asked)
            if y.dtype != x.dtype:
                raise NormError(f"{title(own)} must return its input's dtype {x.dtype}, got {y.dtype}")
    except NormError as error:
        shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
        raise NormError(f"{error} on an input of {shape} in {dtype}; {WAY_OUT}") from error
