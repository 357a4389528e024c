"""Mistakes in norms: eps, variance, scale and shift. They need no network of ours: any host's norms are replaced.

B batch, T tokens, C embedding.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.host import Host, host_of
from minigpt.judge.mistakes.mistake import Mistake, Swaps

OTHER_EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12, 0.0)


class NormBySteps(nn.Module):
    """LayerNorm or RMSNorm in steps. A mistake replaces one of them, and a second mistake another one.

    Args:
        norm: the module whose weight and bias it takes, and whose steps if it has some.
        steps: center, spread, divide, eps or affine, by name.
    """

    def __init__(self, norm: Any, steps: Mapping[str, Any]) -> None:
        super().__init__()
        self.weight, self.bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        self.steps = {**getattr(norm, "steps", {}), **steps}

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of rows (B, T, C)."""
        steps = self.steps
        centred = steps["center"](x)
        y = centred / steps["divide"](steps["spread"](centred), steps["eps"])
        return steps["affine"](y, self.weight, self.bias)


# The steps


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def centred_along(x: Tensor) -> Tensor:
    """Subtract the mean of the sequence."""
    return x - x.mean(1, keepdim=True)


def not_centred(x: Tensor) -> Tensor:
    return x


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def mean_square_along(x: Tensor) -> Tensor:
    return x.square().mean(1, keepdim=True)


def unbiased(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)


def sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def under_root(variance: Tensor, eps: float) -> Tensor:
    return torch.sqrt(variance + eps)


def beside_root(variance: Tensor, eps: float) -> Tensor:
    return torch.sqrt(variance) + eps


def no_root(variance: Tensor, eps: float) -> Tensor:
    return variance + eps


def no_division(variance: Tensor, eps: float) -> Tensor:
    return torch.ones_like(variance)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def one_more(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply by 1 + weight."""
    return affine(y, None if weight is None else 1 + weight, bias)


def scale_alone(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return affine(y, weight, None)


def shift_alone(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return affine(y, None, bias)


def neither(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return y


def early_shift(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Add the shift before the scale multiplies."""
    return affine(affine(y, None, bias), weight, None)


RIGHT_STEPS: dict[str, dict[str, Any]] = {  # by the kind of a norm
    "layer_norm": {"center": centred, "spread": mean_square, "divide": under_root, "affine": affine},
    "rms_norm": {"center": not_centred, "spread": mean_square, "divide": under_root, "affine": affine},
}


# The table


def stepped(host: Host, norm: nn.Module, steps: Mapping[str, Any]) -> NormBySteps:
    """Return a norm of a host with these steps in place of its own."""
    if isinstance(norm, NormBySteps):
        return NormBySteps(norm, steps)
    site = host.site_of(norm)
    own = {**RIGHT_STEPS[site.kind], "eps": site.eps}
    if site.adds_one:
        own["affine"] = one_more
    return NormBySteps(norm, {**own, **steps})


def replace_norms(model: nn.Module, swaps: Swaps, sites: list[str], steps: Mapping[str, Any]) -> None:
    """Replace steps of the norms at some sites of a model."""
    host = host_of(model)
    for site in sites:
        owner, _, name = site.rpartition(".")
        parent = host.root.get_submodule(owner)
        norm = getattr(parent, name)
        if isinstance(norm, NormBySteps) or host.site_of(norm).kind in RIGHT_STEPS:
            swaps.set(parent, name, stepped(host, norm, steps))


def places_of(sites: list[str]) -> dict[str, list[str]]:
    """Return groups of sites by what they are called: all norms, then the norms of each kind."""
    kinds: dict[str, list[str]] = {}
    for site in sites:
        kinds.setdefault(site.rpartition(".")[2], []).append(site)
    groups = {"every norm": sites}
    if len(kinds) == 1:
        return groups
    for kind, members in kinds.items():
        groups[kind if len(members) == 1 else f"every {kind}"] = members
    return groups


def norms_at(words: str, sites: list[str], steps: Mapping[str, Any], family: str, *, is_causal: bool) -> Mistake:
    """Return a mistake in the norms at some sites."""

    def put(model: nn.Module, swaps: Swaps) -> None:
        replace_norms(model, swaps, sites, steps)

    return Mistake(words, put, family=family, is_causal=is_causal)


def formulas(kind: str, eps: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield wrong formulas of a kind of norm, in words and steps."""
    for other in OTHER_EPSILONS:
        if other and other != eps:
            yield f"eps {other:g} in place of {eps:g}", {"eps": other}
    yield "no eps", {"eps": 0.0}
    if kind == "layer_norm":
        yield "the deviation by n - 1", {"spread": unbiased}
        yield "no mean subtracted (an RMSNorm)", {"center": not_centred}
        yield "no shift", {"affine": scale_alone}
        yield "no scale and no shift", {"affine": neither}
        yield "the shift added before the scale multiplies", {"affine": early_shift}
        yield "no scale", {"affine": shift_alone}
    else:
        yield "the mean subtracted (a LayerNorm)", {"center": centred}
        yield "no scale", {"affine": neither}
    yield "std + eps in place of sqrt(variance + eps)", {"divide": beside_root}
    yield "the variance in place of the deviation", {"divide": no_root}
    yield "no division by the deviation", {"divide": no_division}
    yield "the sum of squares in place of their mean", {"spread": sum_of_squares}
    yield "the scale as 1 + weight", {"affine": one_more}


def wrong_norms(model: nn.Module) -> Iterator[Mistake]:
    """Yield mistakes in the norms of any host."""
    host = host_of(model)
    known = {}
    for site, norm in host.norms().items():
        found = host.site_of(norm)
        if found.kind in RIGHT_STEPS:
            known[site] = found
    if not known:
        return
    first = next(iter(known.values()))
    for words, steps in formulas(first.kind, first.eps or 0.0):
        if first.adds_one and steps.get("affine") is one_more:
            words, steps = "the scale as weight, not 1 + weight", {"affine": affine}
        for place, sites in places_of([*known]).items():
            yield norms_at(f"{words} in {place}", sites, steps, words, is_causal=True)
    if first.kind == "layer_norm":
        along = {"center": centred_along, "spread": mean_square_along}
        words = "a norm over the sequence in place of the width"
        yield norms_at(words, [*known], along, words, is_causal=False)
