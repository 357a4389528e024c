"""Replace norms in a model that is already loaded, sharing their Parameters."""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from minigpt import norms
from minigpt.choices import KEEP, patterns_of
from minigpt.errors import ConfigError, NormError
from minigpt.host import Host, copy_without_hooks, host_of, install
from minigpt.norms.foreign.adapt import AdaptedNorm
from minigpt.norms.foreign.construct import naming, require_same_shape, title
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.record import record_of

EPS = 1e-5  # of a site that has none
MOST_SITES = 32  # that an error names one by one
THIRDS = ("early", "middle", "late")  # of the depth, as patterns of sites
WAY_OUT = "to write it for this model, subclass minigpt.LayerNorm and override standardize(self, x)"


def swap_norms(
    model: nn.Module, norm: norms.NormSpec, sites: str | Iterable[str] = "*", keep: Collection[str] = KEEP
) -> list[str]:
    """Put ``norm`` at the matching sites, in place; return their names, in the order data meets them.

    The new norm uses the Parameters of the old. Nothing is copied, an optimizer goes on with what it holds, and
    swapping back restores the model exactly, except for hooks: they go with the module they were put on. A module that
    stands at several paths is replaced at each. In place of a fitted norm's Parameters it uses the checkpoint's. Its
    eps is the site's. A warning says if its class has another, and what becomes of a scale or shift that the class
    lacks. Where a site multiplies by 1 + weight, the new norm gets a weight of its own, which is larger by one.

    Args:
        model: a ``minigpt.GPT2``, or any causal language model of transformers.
        norm: as ``norms.build`` takes it: a name, a class, a function, "package.module:Name" or "path/to/file.py:Name".
        sites: a shell-style pattern, or several, over the norm modules' names: "*", "ln_f", "h.*.ln_1", "h.[0-5].ln_2",
            or a third of the blocks: "early", "middle", "late".
        keep: which of "scale" and "shift" stay beside a class that lacks them. A norm that takes its place later has
            both again.

    Raises:
        ConfigError: if the model has no norm sites.
        NormError: if the norm is unknown, cannot be built or cannot run, or a pattern matches no site. Nothing has been
            replaced then.
    """
    host, chosen = host_with_norms(model), match_sites(model, sites)
    old = {name: model.get_submodule(name) for name in chosen}
    for name, module in old.items():
        require_own_parameters(name, module)
    new = {name: build_like(module, norm, host, keep) for name, module in old.items()}
    for name, module in new.items():
        share(module, old[name], host)
    _require_runs(new[chosen[0]], host)
    install(model, new)
    remarks = {note for module in new.values() for note in norms.notes(module)}
    if not hasattr(host.root, "norm_modules") and any(isinstance(module, FrozenLayerNorm) for module in new.values()):
        remarks.add("frozen norms count positions from 0 in each call of this model: use no cache and no left padding")
    for note in sorted(remarks):
        logging.getLogger("minigpt").warning("%s", note)
    return chosen


def host_with_norms(model: Any) -> Host:
    """Return a model as a host.

    Raises:
        ConfigError: if it is no module, or has no norm sites.
    """
    host = host_of(model) if isinstance(model, nn.Module) else None
    if host is None or not host.sites:
        kind = f"{type(model).__module__.partition('.')[0]}.{type(model).__name__}"
        raise ConfigError(f"model must be a minigpt.GPT2, or a language model of transformers with norms, got a {kind}")
    return host


def match_sites(model: nn.Module, sites: str | Iterable[str]) -> list[str]:
    """Return the norm sites that at least one pattern matches.

    Raises:
        NormError: if a pattern matches none, or there is no pattern.
    """
    names, matched = host_with_norms(model).paths, set[str]()
    for pattern in patterns_of(sites):
        matched |= {*matching(pattern, names)}
    return [name for name in names if name in matched]


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the norm sites of ``names`` that a pattern matches.

    "early", "middle" and "late" are the norms of the first, second and last third of the blocks. ln_f is in none.

    Raises:
        NormError: if it matches none.
    """
    if not names:
        raise NormError("this model has no norm that can be swapped")
    if pattern in THIRDS:
        numbers = {name: re.search(r"\.(\d+)\.", name) for name in names}
        blocks = {name: int(number[1]) for name, number in numbers.items() if number}
        layers, third = max(blocks.values(), default=-1) + 1, THIRDS.index(pattern)
        first, end = round(third * layers / 3), round((third + 1) * layers / 3)
        matched = [name for name, block in blocks.items() if first <= block < end]
    else:
        matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        if len(names) > MOST_SITES:
            names = [*dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)]
        raise NormError(f"no norm site matches {pattern!r}; the sites are {', '.join(names)}")
    return matched


def require_own_parameters(name: str, module: nn.Module) -> None:
    """Check that weight and bias are Parameters. Pruning, for example, computes them from others.

    Raises:
        NormError: if one of the two is not.
    """
    for role in ("weight", "bias"):
        if role in module._buffers and module._buffers[role] is not None:
            raise NormError(
                f"{name} has a fixed {role}, a buffer that no norm can share or train; name other sites, without it"
            )
    tensors = [tensor for role in ("weight", "bias") if isinstance(tensor := getattr(module, role, None), Tensor)]
    if not all(isinstance(tensor, nn.Parameter) for tensor in tensors):
        raise NormError(f"weight or bias of {name} is not a Parameter; undo its pruning or parametrization")


def originals(norm: nn.Module) -> dict[str, nn.Parameter]:
    """Return the checkpoint's weight and bias at a norm's site, also those that the norm does not use."""
    both = {role: getattr(norm, role, None) for role in ("weight", "bias")}
    used = {role: parameter for role, parameter in both.items() if isinstance(parameter, nn.Parameter)}
    return used | record_of(norm).originals


def build_like(old: nn.Module, norm: norms.NormSpec, host: Host, keep: Collection[str] = KEEP) -> nn.Module:
    """Return a new norm for the site of ``old``, with a shift if that has one, and the site's eps."""
    site, parameters = host.norm_site(old), originals(old)
    has_shift = "bias" in parameters or ("weight" not in parameters and site.kind != "rms_norm")
    eps = EPS if site.eps is None else site.eps
    new = norms.build(norm, site.width, eps=eps, bias=has_shift, keep=keep)
    record_of(new).site = site
    return new


def share(new: nn.Module, old: nn.Module, host: Host) -> None:
    """Give ``new`` the checkpoint's Parameters that ``old`` has or remembers; move it to the model's device, dtype."""
    record, adds_one = record_of(new), host.norm_site(old).adds_one
    with naming(new):
        new.to(host.weight.device, host.weight.dtype)
        for role, shared in originals(old).items():
            parameter = getattr(new, role, None)
            if isinstance(parameter, nn.Parameter) and parameter.shape == shared.shape:
                if role in record_of(old).originals:
                    shared.data = shared.data.to(parameter)  # the model may have been moved meanwhile
                if shared.requires_grad and not parameter.requires_grad:
                    record.notes += (f"{title(new)} freezes its {role}; here it is the model's, which is trained",)
                if role == "weight" and adds_one:  # the new norm multiplies by its weight alone
                    record.originals[role] = shared
                    record.notes += ("the sites multiply by 1 + weight; the new norms' weight is that sum",)
                    shared = nn.Parameter(shared.detach() + 1, requires_grad=shared.requires_grad)
                setattr(new, role, shared)
            else:
                record.originals[role] = shared
        record.trained = record_of(old).trained
        new.train(old.training)


@torch.no_grad()
def _require_runs(norm: nn.Module, host: Host) -> None:
    """Try a copy of a norm on two tokens.

    Raises:
        NormError: if it raises, or its output is not like its input.
    """
    if norms.is_ours(type(norm)) or host.weight.is_meta:
        return
    trial, inner = copy_without_hooks(norm).eval(), norm.norm if isinstance(norm, AdaptedNorm) else norm
    x = torch.arange(2.0 * record_of(norm).site.width).sin().view(1, 2, -1).to(host.weight)
    try:
        with naming(inner), torch.random.fork_rng(devices=[]):
            y = trial(x.clone())
            require_same_shape(y, x, trial)
            if y.dtype != x.dtype:
                raise NormError(f"{title(inner)} must return its input's dtype {x.dtype}, got {y.dtype}")
    except NormError as error:
        shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
        raise NormError(f"{error} on an input of {shape} in {dtype}; {WAY_OUT}") from error
