"""The norms of a model in the words of a config.json, and back.

A model whose norms are not all LayerNorm is saved under the ``model_type`` "minigpt-gpt2", so that no program reads it
as a plain GPT-2. The field ``norm`` then names its norms: one name, or pairs [pattern of sites, name], the last match
deciding. A name that is not registered means code. A file never makes code run, so the caller has to name it too.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

import minigpt.norms as norms
from minigpt.choices import GPT2_TYPE, MINIGPT_TYPE
from minigpt.errors import NormError, listing
from minigpt.model import GPT2

ARCHITECTURE = "MiniGPT2LMHeadModel"
OF_OURS = ("norm", "arithmetic")  # the fields that such a config.json adds to a GPT-2's

Pairs = list[tuple[str, norms.NormSpec]]
Norms = norms.NormSpec | Mapping[str, norms.NormSpec] | Pairs  # at all sites, or by patterns of sites

# Frozen norms as a plain GPT-2, which ``study/export.py`` writes: an eps so large that a norm divides by its root.
PLAIN_CALIBRATION = [1.0, 1.0]  # the calibration of a frozen norm that divides by 1
NORM_WEIGHT = re.compile(r"(.*\.)?(ln_1|ln_2|ln_f)\.weight")
PLAIN_NORM = "frozen"  # the norm of such a checkpoint
PLAIN_FORM: Pairs = [("*", PLAIN_NORM)]


def norm_fields(model: GPT2) -> dict[str, Any]:
    """Return the fields of config.json that name the model's norms; none if all are LayerNorm."""
    from minigpt.host import unwrapped

    sites = model.site_names()
    pairs = []
    for site, norm in model.norm_modules().items():
        norm = unwrapped(norm)
        if not _is_layer_norm(norm):
            pairs.append([site, norms.name_of(norm)])
    if not pairs:
        return {}
    names = {name for _, name in pairs}
    is_one = len(pairs) == len(sites) and len(names) == 1
    return {"model_type": MINIGPT_TYPE, "architectures": [ARCHITECTURE], "norm": pairs[0][1] if is_one else pairs}


def described_norms(model: nn.Module) -> str:
    """Return the names of the norms of a model: "rms", or "fused, rms at ln_f" for several."""
    from minigpt.host import host_of, unwrapped

    sites_of: dict[str, list[str]] = {}
    for site, norm in host_of(model).norms().items():
        sites_of.setdefault(norms.name_of(unwrapped(norm)), []).append(site)
    most = max(sites_of, key=lambda name: len(sites_of[name]))
    parts = [most]
    for name, sites in sites_of.items():
        if name != most:
            parts.append(f"{name} at {listing(sites)}")
    return ", ".join(parts)


def split_norms(fields: Mapping[str, Any]) -> tuple[dict[str, Any], Pairs]:
    """Return the fields of a config.json as a plain GPT-2's, and the norms that they name.

    Raises:
        NormError: if the norms are not a name or pairs.
    """
    if fields.get("model_type") != MINIGPT_TYPE:
        return dict(fields), []
    plain = {name: value for name, value in fields.items() if name not in OF_OURS}
    return plain | {"model_type": GPT2_TYPE}, as_pairs(fields.get("norm", "fused"))


def as_pairs(norm: Any) -> Pairs:
    """Return norms by patterns of sites as pairs, in the order in which they are applied.

    Raises:
        NormError: if a list is not one of pairs.
    """
    if isinstance(norm, Mapping):
        return list(norm.items())
    if not isinstance(norm, list | tuple):
        return [("*", norm)]
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in norm):
        raise NormError(f"norms must be a name or pairs [sites, name], got {list(norm)!r}")
    return [(site, chosen) for site, chosen in norm]


def norm_at(pairs: Pairs, site: str) -> norms.NormSpec | None:
    """Return the norm of the last pattern that matches ``site``; None if there is none."""
    for pattern, norm in reversed(pairs):
        if fnmatchcase(site, pattern):
            return norm
    return None


def sites_for(norm: norms.NormSpec, sites: list[str], named: Pairs, *, by_site: bool) -> list[str]:
    """Return the sites, of the given ones, at which a caller's norm belongs.

    A config.json may name a norm that is not registered, which is code. The class that the caller gives for it belongs
    where config.json names code, and only there. Any other norm belongs at all of the sites.

    Args:
        sites: those that the caller asks for.
        named: the norms that config.json names, by patterns of sites.
        by_site: whether the caller says for each of several norms where it belongs. The class for the code is then the
            one with its name. A single class may have another name by now.
    """
    if norms.is_registered(norm):
        return sites
    code = [site for site in sites if _is_code(norm_at(named, site))]
    if not code:
        return sites
    if by_site:
        names = {_class_of_norm(name) for _, name in named if _is_code(name)}
        if _class_of_norm(norms.name_of(norm)) not in names:
            return sites
    return code


def _is_code(norm: norms.NormSpec | None) -> bool:
    return norm is not None and not norms.is_registered(norm)


def _class_of_norm(norm: object) -> str:
    return str(norm).rpartition(":")[2]


def require_registered(norm: Any) -> None:
    """Check that every norm that a config.json names is registered.

    Raises:
        NormError: the message says how to ask for one that is not.
    """
    for _, name in as_pairs(norm):
        if not norms.is_registered(name):
            raise NormError(
                f"config.json asks for the norm {name!r}, which is not a registered one, and code is not run because a "
                f"file names it; if you trust it, ask for it yourself: --norm, or from_pretrained(..., norm={norm!r})"
            )


def sites_with_other_eps(model: GPT2) -> dict[str, list[float]]:
    """Return the sites of registered norms whose eps is not the config's, which config.json has no field for."""
    from minigpt.host import unwrapped
    from minigpt.norms.foreign.adapt import other_eps

    sites = {}
    for site, norm in model.norm_modules().items():
        plain = unwrapped(norm)
        if not (_is_layer_norm(plain) or norms.is_registered(norms.name_of(plain))):
            continue
        eps = other_eps(norm, model.config.layer_norm_epsilon)
        if eps:
            sites[site] = eps
    return sites


def _is_layer_norm(norm: nn.Module) -> bool:
    known = {info.cls for info in norms.available().values() if info.exact}
    return type(norm) is nn.LayerNorm or type(norm) in known


def norms_in_config(fields: Mapping[str, Any]) -> Pairs:
    """Return the norms that a config.json names, by patterns of sites; none if all are LayerNorm.

    Raises:
        NormError: as ``split_norms``.
    """
    plain, pairs = split_norms(fields)
    eps = plain.get("layer_norm_epsilon")
    if isinstance(eps, int | float) and is_frozen(eps):
        return PLAIN_FORM
    return pairs


def is_frozen(eps: float) -> bool:
    """True if a config's layer_norm_epsilon says that its norms divide by a constant."""
    return eps >= 2.0**20


def unscaled(tensors: dict[str, Tensor], eps: float) -> dict[str, Tensor]:
    """Return the tensors of a plain form as tensors of frozen norms that divide by 1."""
    plain = dict(tensors)
    for name, weight in tensors.items():
        if not NORM_WEIGHT.fullmatch(name):
            continue
        plain[name] = weight / eps**0.5
        site = name.removesuffix(".weight")
        plain[f"{site}.calibration"] = torch.tensor(PLAIN_CALIBRATION, dtype=weight.dtype)
    return plain
