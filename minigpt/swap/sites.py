"""Replace norms in a model that is already loaded, sharing their Parameters."""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.choices import KEEP, patterns_of
from minigpt.errors import ConfigError, NormError
from minigpt.host import Host, host_of, install, probe_norm, unwrapped
from minigpt.norms import build
from minigpt.norms.foreign.adapt import AdaptedNorm, OnePlusNorm, inner_norm, notes
from minigpt.norms.foreign.builder import build_raw, is_ours
from minigpt.norms.foreign.construct import naming, require_same_shape, title
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.record import ATTRIBUTE, record_of
from minigpt.norms.registry import NormSpec
from minigpt.offload import (
    is_elsewhere,
    is_offloaded,
    plain_copy,
    require_unsharded,
    take_inputs_of,
    values_of,
)
from minigpt.precision import default_dtype

DEFAULT_EPS = 1e-5  # of a site that has none
MOST_SITES = 32  # that an error names one by one
IN_WRAPPER = re.compile(r"\.(original_module|base_layer|(modules_to_save|ln_tuning_layers)\.[^.]+)$")  # of PEFT
TRANSFORMERS_PREFIX = "transformer."  # of a GPT-2's paths in transformers
LAST_OF_GPT2 = "ln_f"  # without it
THIRDS = ("early", "middle", "late")  # of the depth, as patterns of sites
FROZEN_WITHOUT_CACHE = (
    "frozen norms count positions from 0 in each call of this model: use no cache and no left padding"
)
WAY_OUT = "to write it for this model, subclass minigpt.LayerNorm and override standardize(self, x)"


@default_dtype()
def swap_norms(
    model: nn.Module, norm: NormSpec, sites: str | Iterable[str] = "*", keep: Collection[str] = KEEP
) -> list[str]:
    """Put ``norm`` at the matching sites, in place; return their names, in the order data meets them.

    The new norm uses the Parameters of the old. Nothing is copied, an optimizer goes on with what it holds, and
    swapping back restores the model exactly, except for hooks: they go with the module they were put on. A module
    at several paths is replaced at each. In place of a fitted norm's Parameters it uses the checkpoint's. Its
    eps is the site's. A warning says if its class has another, and what becomes of a scale or shift that the class
    lacks. Where a site multiplies by 1 + weight, the new norm is given that sum in each call, and the Parameter stays.
    A class that multiplies so itself gets the Parameter. So what is saved is what the model's own class reads.

    Where accelerate has offloaded a site's Parameters, the new norm has their values on the device where the site
    computes. Swap norms before ``fully_shard``.

    In a wrapper of PEFT (``modules_to_save``, LN tuning) the norms inside are the sites, each with its own Parameters.
    A pattern that matches the wrapper's path matches them all.

    Args:
        model: a ``minigpt.GPT2``, or any causal language model of transformers.
        norm: as ``norms.build`` takes it: a name, a class, a function, "package.module:Name" or "path/to/file.py:Name".
        sites: a shell-style pattern, or several, over the norm modules' names: "*", "ln_f", "h.*.ln_1", "h.[0-5].ln_2",
            or a third of the blocks: "early", "middle", "late".
        keep: which of "scale" and "shift" stay with a class that lacks them. A norm that takes its place later has
            both again.

    Raises:
        ConfigError: if the model has no norm sites.
        NormError: if the norm is unknown, cannot be built or cannot run, a pattern matches no site, or the model is
            sharded. Nothing has been replaced then.
    """
    host = host_with_norms(model)
    require_unsharded(model)
    chosen = match_sites(model, sites)
    old = {site: unwrapped(model.get_submodule(site)) for site in chosen}
    for site, module in old.items():
        require_own_parameters(site, module, host)
    built = {site: build_like(module, norm, host, keep) for site, module in old.items()}
    new = {site: share(module, old[site], host) for site, module in built.items()}
    _require_runs(new[chosen[0]], host)
    for site, module in new.items():
        take_inputs_of(module, old[site])
    install(model, new)
    for remark in sorted(_remarks(new.values(), host)):
        logging.getLogger("minigpt").warning("%s", remark)
    return chosen


def _remarks(new: Iterable[nn.Module], host: Host) -> set[str]:
    """Return what a user should know of norms that were put into a model."""
    remarks: set[str] = set()
    for norm in new:
        remarks.update(notes(norm))
        is_frozen = isinstance(inner_norm(norm), FrozenLayerNorm)
        if is_frozen and not hasattr(host.root, "norm_modules"):
            remarks.add(FROZEN_WITHOUT_CACHE)
    return remarks


def host_with_norms(model: Any) -> Host:
    """Return a model as a host.

    Raises:
        ConfigError: if it is no module, or has no norm sites.
    """
    host = host_of(model) if isinstance(model, nn.Module) else None
    if host is None or not host.sites:
        package = type(model).__module__.partition(".")[0]
        kind = f"{package}.{type(model).__name__}"
        raise ConfigError(f"model must be a minigpt.GPT2, or a language model of transformers with norms, got a {kind}")
    return host


def match_sites(model: nn.Module, sites: str | Iterable[str]) -> list[str]:
    """Return the norm sites that at least one pattern matches.

    Raises:
        NormError: if a pattern matches none, or there is no pattern.
    """
    host = host_with_norms(model)
    matched: set[str] = set()
    for pattern in patterns_of(sites):
        matched.update(_matching_at(host, pattern))
    return [path for path in host.paths if path in matched]


def _matching_at(host: Host, pattern: str) -> list[str]:
    """Return the paths of the norms that a pattern matches, with the prefix of all places or without it.

    Raises:
        NormError: if it matches none.
    """
    try:
        return matching(pattern, host.paths)
    except NormError:
        if not host.prefix:
            raise
    return [host.prefix + site for site in matching(pattern, host.sites)]


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the norm sites of ``names`` that a pattern matches.

    "early", "middle" and "late" are the norms of the first, second and last third of the blocks. ln_f is in none. A
    GPT-2's may also have the path that transformers gives it, "transformer.ln_f".

    Raises:
        NormError: if it matches none.
    """
    if not names:
        raise NormError("this model has no norm that can be swapped")
    if pattern in THIRDS:
        matched = _of_third(THIRDS.index(pattern), names)
    else:
        matched = [name for name in names if _matches(name, pattern)]
    if not matched and LAST_OF_GPT2 in names:
        matched = [name for name in names if _matches(TRANSFORMERS_PREFIX + name, pattern)]
    if not matched:
        if len(names) > MOST_SITES:
            every_block = [re.sub(r"\.\d+\.", ".*.", name) for name in names]
            names = list(dict.fromkeys(every_block))
        raise NormError(f"no norm site matches {pattern!r}; the sites are {', '.join(names)}")
    return matched


def _matches(site: str, pattern: str) -> bool:
    """Return whether a pattern matches a norm site, or the wrapper of PEFT around it."""
    wrapper = IN_WRAPPER.sub("", site)
    return fnmatchcase(site, pattern) or fnmatchcase(wrapper, pattern)


def _of_third(third: int, names: Sequence[str]) -> list[str]:
    """Return the norms of a third of the blocks, 0, 1 or 2; nothing if no name has a block's number."""
    blocks: dict[str, int] = {}
    for name in names:
        number = re.search(r"\.(\d+)\.", name)
        if number:
            blocks[name] = int(number[1])
    layers = max(blocks.values(), default=-1) + 1
    first = round(third * layers / 3)
    end = round((third + 1) * layers / 3)
    return [name for name, block in blocks.items() if first <= block < end]


def require_own_parameters(name: str, module: nn.Module, host: Host | None = None) -> None:
    """Check that weight and bias are Parameters with values. Pruning, for example, computes them from others.

    Args:
        host: the model, which may be on the device "meta" as a whole. None for one that has values.

    Raises:
        NormError: if one of the two is not, or is a placeholder for what accelerate offloads with the whole
            block.
    """
    for role in ("weight", "bias"):
        if module._buffers.get(role) is not None:
            raise NormError(
                f"{name} has a fixed {role}, a buffer that no norm can share or train; name other sites, without it"
            )
        tensor = getattr(module, role, None)
        if not isinstance(tensor, Tensor):
            continue
        if not isinstance(tensor, nn.Parameter):
            raise NormError(f"weight or bias of {name} is not a Parameter; undo its pruning or parametrization")
        has_values = host is None or host.device.type != "meta"
        if tensor.is_meta and has_values and not is_offloaded(module):
            raise NormError(
                f"{role} of {name} is a placeholder, and its block is offloaded as one (preload_module_classes); leave "
                "the block's class out there"
            )


def originals(norm: nn.Module) -> dict[str, nn.Parameter]:
    """Return the checkpoint's weight and bias at a norm's site, also those that the norm does not use.

    Those that are offloaded are new Parameters with the values.
    """
    values = values_of(norm) if is_elsewhere(norm) else {}
    used: dict[str, nn.Parameter] = {}
    for role in ("weight", "bias"):
        parameter = getattr(norm, role, None)
        if isinstance(parameter, nn.Parameter):
            used[role] = parameter
            if role in values:
                used[role] = nn.Parameter(values[role].clone(), requires_grad=parameter.requires_grad)
    return used | record_of(norm).originals


def build_like(old: nn.Module, norm: NormSpec, host: Host, keep: Collection[str] = KEEP) -> nn.Module:
    """Return a new norm for the site of ``old``, with a shift if that has one, and the site's eps."""
    site = host.site_of(old)
    parameters = originals(old)
    has_shift = "bias" in parameters or ("weight" not in parameters and site.kind != "rms_norm")
    eps = DEFAULT_EPS if site.eps is None else site.eps
    new = build(norm, site.width, eps=eps, bias=has_shift, keep=keep)
    if site.adds_one and isinstance(new, AdaptedNorm):
        raw = build_raw(norm, site.width, eps=eps, bias=has_shift)
        if probe_norm(raw, site.width).adds_one:  # it multiplies as the site does, so its weight is the site's
            record_of(raw).name = record_of(new).name
            record_of(raw).adds_one = True
            new = raw
    record_of(new).site = site
    return new


def share(new: nn.Module, old: nn.Module, host: Host) -> nn.Module:
    """Return ``new`` with the checkpoint's Parameters that ``old`` has or remembers, on their device.

    It is in the model's dtype. At a site that multiplies by 1 + weight it is a ``OnePlusNorm``, unless it does so too.
    """
    record = record_of(new)
    site = host.site_of(old)
    parameters = originals(old)
    device = host.device
    if parameters:
        device = next(iter(parameters.values())).device
    with naming(new):
        new.to(device, host.dtype)
        for role, shared in parameters.items():
            parameter = getattr(new, role, None)
            if not isinstance(parameter, nn.Parameter) or parameter.shape != shared.shape:
                record.originals[role] = shared
                continue
            if role in record_of(old).originals:
                shared.data = shared.data.to(parameter)  # the model may have been moved meanwhile
            if shared.requires_grad and not parameter.requires_grad:
                record.notes += (f"{title(new)} freezes its {role}; here it is the model's, which is trained",)
            setattr(new, role, shared)
        record.trained = record_of(old).trained
        _take_constants(new, old)
        has_weight = isinstance(getattr(new, "weight", None), nn.Parameter)
        if site.adds_one and not record.adds_one and has_weight:
            record.notes += ("the sites multiply by 1 + weight; the new norms are given that sum",)
            eps = DEFAULT_EPS if site.eps is None else site.eps
            new = OnePlusNorm(new, new.get_parameter("weight"), eps, is_wide=site.kind == "rms_norm")
            setattr(new, ATTRIBUTE, record)
        return new.train(old.training)


def _take_constants(new: nn.Module, old: nn.Module) -> None:
    """Give a frozen norm the constants of the checkpoint's own, if that is frozen too."""
    if not (isinstance(new, FrozenLayerNorm) and isinstance(old, FrozenLayerNorm)):
        return
    if record_of(old).trained is not None and old.calibration is not None:
        new.calibration = old.calibration.clone()


@torch.no_grad()
def _require_runs(norm: nn.Module, host: Host) -> None:
    """Try a copy of a norm on two tokens.

    Raises:
        NormError: if it raises, or its output is not like its input.
    """
    inner = inner_norm(norm)
    if is_ours(type(inner)) or host.device.type == "meta":
        return
    if isinstance(inner, AdaptedNorm):
        inner = inner.norm
    trial = plain_copy(norm).eval()
    site = record_of(norm).site
    assert site is not None  # of a norm that was built for one
    rows = torch.arange(2.0 * site.width).sin().view(1, 2, -1)
    x = rows.to(host.device, host.dtype)
    try:
        with naming(inner), torch.random.fork_rng(devices=[]):
            y = trial(x.clone())
            require_same_shape(y, x, trial)
            if y.dtype != x.dtype:
                raise NormError(f"{title(inner)} must return its input's dtype {x.dtype}, got {y.dtype}")
    except NormError as error:
        shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
        raise NormError(f"{error} on an input of {shape} in {dtype}; {WAY_OUT}") from error
