"""Replace norms in a model that is already loaded, sharing their Parameters."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from minigpt import norms
from minigpt.errors import NormError
from minigpt.model.gpt2 import GPT2


def swap_norms(model: GPT2, norm: norms.NormSpec, sites: str | Iterable[str] = "*") -> list[str]:
    """Put ``norm`` at the matching sites, in place; return their names, in the order data meets them.

    The new norm uses the very Parameters of the old, so nothing is copied, an optimizer goes on with what it holds, and
    swapping back restores the model exactly.

    Args:
        sites: a shell-style pattern, or several, over the norm modules' names: "*", "ln_f", "h.*.ln_1", "h.[0-5].ln_2".

    Raises:
        NormError: the norm is unknown, or a pattern matches no site. Nothing has been replaced then.
    """
    chosen = match_sites(model, sites)
    replacements = {name: _sharing(norm, model.get_submodule(name)) for name in chosen}
    for name, module in replacements.items():
        model.set_submodule(name, module)
    return chosen


def match_sites(model: GPT2, sites: str | Iterable[str]) -> list[str]:
    """The norm sites that at least one pattern matches.

    Raises:
        NormError: a pattern matches none.
    """
    patterns = [sites] if isinstance(sites, str) else list(sites)
    names = model.norm_sites()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise NormError(f"no norm site matches {pattern!r}; the sites are {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _sharing(norm: norms.NormSpec, old: Any) -> nn.Module:
    new = norms.build(norm, old.normalized_shape, eps=old.eps, bias=old.bias is not None)
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)
