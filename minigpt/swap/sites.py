"""Replace norms in a model that is already loaded, sharing their Parameters."""

import logging
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from minigpt import norms
from minigpt.config import GPT2Config
from minigpt.errors import NormError, is_several
from minigpt.model import GPT2
from minigpt.model.checks import check_gpt2
from minigpt.norms.foreign.adapt import SAME_EPS, AdaptedNorm
from minigpt.norms.foreign.construct import naming, title

SITES, A_SITE = "norm sites", "h.*.ln_1"  # what patterns are of, where nothing else is said, and one of them


def swap_norms(model: GPT2, norm: norms.NormSpec, sites: str | Iterable[str] = "*") -> list[str]:
    """Put ``norm`` at the matching sites, in place; return their names, in the order data meets them.

    The new norm uses the very Parameters of the old, so nothing is copied, an optimizer goes on with what it holds, and
    swapping back restores the model exactly, but for hooks: they go with the module they were put on. Its eps is the
    config's; a warning says where its class has another.

    Args:
        norm: as ``norms.build`` takes it: a name, a class, a function, "package.module:Name" or "path/to/file.py:Name".
        sites: a shell-style pattern, or several, over the norm modules' names: "*", "ln_f", "h.*.ln_1", "h.[0-5].ln_2".

    Raises:
        ConfigError: the model is no GPT2.
        NormError: the norm is unknown, cannot be made or does not fit, one module is given to several sites, or a
            pattern matches no site. Nothing has been replaced then.
    """
    check_gpt2(model)
    chosen = match_sites(model, sites)
    require_own_parameters(model, chosen)
    built = {name: _built(norm, model.get_submodule(name), model.config) for name in chosen}
    _require_one_each(model, list(built.values()))
    replacements = {name: _sharing(new, model.get_submodule(name)) for name, new in built.items()}
    for name, module in replacements.items():
        model.set_submodule(name, module)
    for note in sorted({note for module in replacements.values() for note in norms.notes(module)}):
        if not note.endswith(SAME_EPS):
            logging.getLogger("minigpt").warning("%s", note)
    return chosen


def match_sites(model: GPT2, sites: str | Iterable[str]) -> list[str]:
    """The norm sites that at least one pattern matches.

    Raises:
        NormError: a pattern matches none, or is no text, or there is no pattern.
    """
    patterns, names = patterns_of(sites), model.norm_sites()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise NormError(f"no norm site matches {pattern!r}; the sites are {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def patterns_of(given: str | Iterable[str], what: str = SITES, such_as: str = A_SITE) -> list[str]:
    """One pattern, or several, as a list; ``what`` they are of and one ``such_as`` they may be, for messages.

    Raises:
        NormError: there is none, or one is no text.
    """
    patterns: list[Any] = list(given) if is_several(given) else [given]
    if not patterns:
        raise NormError(f'no pattern of {what} was given; "*" is all of them')
    require_patterns(patterns, what, such_as)
    return patterns


def require_patterns(patterns: Iterable[object], what: str = SITES, such_as: str = A_SITE) -> None:
    """Refuse patterns that are no texts.

    Raises:
        NormError: the message names the first.
    """
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise NormError(f"a pattern of {what} is a text such as {such_as!r}, and not {wrong[0]!r:.100}")


def _built(norm: norms.NormSpec, old: Any, config: GPT2Config) -> nn.Module:
    has_bias = getattr(old, "bias", None) is not None
    return norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon, bias=has_bias)


def _require_one_each(model: GPT2, new: list[nn.Module]) -> None:
    """Refuse a function that hands out one module again and again: it has room for the Parameters of one site."""
    taken = {id(module) for module in model.modules()}
    for norm in new:
        own = id(norm.norm if isinstance(norm, AdaptedNorm) else norm)
        if own in taken:
            raise NormError("the same module is given to several sites; make a new one at every call")
        taken.add(own)


def require_own_parameters(model: GPT2, names: Iterable[str]) -> None:
    """Refuse modules whose weight is computed from others, as by pruning: it can be neither shared nor written into.

    Raises:
        NormError: weight or bias of one is no Parameter, or it has no weight.
    """
    for name in names:
        module = model.get_submodule(name)
        weight, bias = (getattr(module, own, None) for own in ("weight", "bias"))
        if weight is None:
            raise NormError(f"{name} ({title(module)}) has no weight; put minigpt.LayerNorm(width) there first")
        if not all(isinstance(own, nn.Parameter) for own in (weight, bias) if own is not None):
            raise NormError(f"weight or bias of {name} is no Parameter of its own; undo its pruning or parametrization")


def _sharing(new: Any, old: Any) -> nn.Module:
    with naming(new):
        new.weight = new.bias = None
        new.to(old.weight.device, old.weight.dtype)  # its buffers, and any Parameter beside the two that are shared
        new.weight, new.bias = old.weight, getattr(old, "bias", None)
        return new.train(old.training)
