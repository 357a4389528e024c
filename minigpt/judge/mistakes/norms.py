"""Mistakes in norms. They need no network of ours: any host's norms are replaced.

B batch, T tokens, C embedding.
"""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from minigpt.host import host_of
from minigpt.judge.mistakes.mistake import Mistake, MistakePart, Swaps
from minigpt.norms.formulas import (
    AS_ONE_PLUS,
    AS_WEIGHT,
    CURES,
    OF_SHIFT,
    OVER_SEQUENCE,
    NormParts,
    formula,
    right_parts,
    tables,
)
from minigpt.norms.record import NormSite
from minigpt.norms.registry import KINDS

PAIRED_PARTS = {
    "spread": MistakePart.SPREAD,
    "divisor": MistakePart.DIVISOR,
    "eps": MistakePart.EPS,
}  # whose common mistakes are made together


class FormulaNorm(nn.Module):
    """A norm that is computed by its formula. A mistake replaces one of the parts, and a second mistake another one.

    Args:
        norm: the module whose weight and bias it takes.
    """

    def __init__(self, norm: Any, adds_one: bool, parts: NormParts) -> None:
        super().__init__()
        self.weight, self.bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        self.adds_one, self.parts = adds_one, parts

    def forward(self, x: Float[Tensor, "*dims embd"]) -> Float[Tensor, "*dims embd"]:
        """Return the norm of rows (B, T, C)."""
        scale = x.new_ones(()) if self.weight is None else self.weight + self.adds_one
        shift = x.new_zeros(()) if self.bias is None else self.bias
        return formula(x, self.parts, scale, shift)


def wrong_norms(model: nn.Module) -> Iterator[Mistake]:
    """Yield mistakes in the norms of any host."""
    host = host_of(model)
    norms, known = host.norms(), dict[str, NormSite]()
    for site, norm in norms.items():
        described = host.site_of(norm)
        if described.kind in KINDS:
            known[site] = described
    if not known:
        return
    classes = {FormulaNorm, *(type(norms[site]) for site in known)}

    def mistaken(words: str, table: str, part: Any, sites: list[str], place: str = "every norm") -> Mistake:
        def put(model: nn.Module, swaps: Swaps) -> None:
            root = host_of(model).root
            for site in sites:
                owner, _, name = site.rpartition(".")
                parent = root.get_submodule(owner)
                norm: Any = getattr(parent, name)
                if type(norm) not in classes:  # another mistake has put something else there
                    continue
                of_norm = known[site]
                parts = getattr(norm, "parts", None) or right_parts(of_norm.kind, of_norm.eps or 0.0)
                swaps.set(parent, name, FormulaNorm(norm, of_norm.adds_one, {**parts, table: part}))

        if first.adds_one and words == AS_ONE_PLUS:
            words = "the scale as 2 + weight: the 1 added twice"
        about: dict[str, Any] = {"family": words, "cure": CURES.get(words, ""), "rank": len(sites) < len(known)}
        if len(sites) == len(known) and (about["cure"] or table == "eps"):
            about["part"] = PAIRED_PARTS.get(table)
        return Mistake(f"{words} in {place}", put, is_causal=table != "dims", **about)

    first = next(iter(known.values()))
    by_table = tables(first.kind, first.eps or 0.0, rare=False)
    untried = {"", OVER_SEQUENCE}
    if not first.adds_one:
        untried.add(AS_WEIGHT)
    if all(getattr(norms[site], "bias", None) is None for site in known):
        untried |= {*OF_SHIFT}
    for name, table in by_table.items():
        for words, part in table.items():
            if words in untried:
                continue
            for place, sites in places_of([*known]).items():
                yield mistaken(words, name, part, sites, place)
    if first.kind == "layer_norm":
        yield mistaken(OVER_SEQUENCE, "dims", (1,), [*known])


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
