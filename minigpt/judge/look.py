"""Statistics of each norm's input on a text: its deviations, its mean, its massive channels; as a table and a page.

B batch, T tokens, C embedding.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minigpt.errors import NormError
from minigpt.host import hooked
from minigpt.inputs import check_rows
from minigpt.report.numerals import Form, brief, percent
from minigpt.report.part import Part, Shown, cells, titles
from minigpt.swap.fit import original_norm, r_squared
from minigpt.swap.sites import host_with_norms

MOST_CHANNELS = 3
ABOUT = (
    "Deviation and spread are mean and standard deviation over the tokens after the first. The mean's share is of a "
    "row's mean square. Unexplained is the share of the output that the norm loses if it divides by a constant (1 - R "
    "squared). The largest channels have most of the variance."
)
SHADES = "A stronger colour is a larger number, on a logarithmic scale."
SITE_MAPS: tuple[tuple[str, str, str, Form], ...] = (  # a field, its title, what it is, and its form
    ("deviation", "Deviation", "the mean deviation of a row, which LayerNorm divides by", brief),
    ("mean_share", "The mean's share", "the mean's part in a row's mean square, which RMSNorm leaves in", percent),
    ("unexplained", "Unexplained", "the share of the output that the norm loses if it divides by a constant", percent),
)


@dataclasses.dataclass(frozen=True)
class Channel:
    """A channel, and its share of the variance."""

    channel: int
    share: float


@dataclasses.dataclass(frozen=True)
class SiteStatistics:
    """Statistics of a norm's input. A row is the stream at one token. Its deviation is what the norm divides by:
    sqrt(variance + eps), and for an RMSNorm sqrt(mean square + eps).

    Attributes:
        deviation: its mean over the tokens after the first.
        deviation_spread: its standard deviation over the same tokens.
        deviation_first: its mean over first tokens.
        mean_share: the share of a row's mean square that the square of its mean is, over all tokens.
        unexplained: the share of the norm's output that it loses (1 - R squared) if it divides by constants, as
            ``frozen`` does, and keeps its scale and shift.
        channels: those with most of the variance, summed over all tokens.
    """

    site: str
    deviation: Annotated[float, Shown("deviation")]
    deviation_spread: Annotated[float, Shown("spread")]
    deviation_first: Annotated[float, Shown("first token")]
    mean_share: Annotated[float, Shown("mean's share", percent)]
    unexplained: Annotated[float, Shown("unexplained", percent)]
    channels: list[Channel]


@torch.inference_mode()
def site_statistics(model: nn.Module, input_ids: Int[Tensor, "batch seq"]) -> list[SiteStatistics]:
    """Return what each norm is given when the model reads ``input_ids`` (B, T), in the order of the data.

    A norm of queries or keys is given a row for each head; its heads count as texts.
    ``pandas.DataFrame(site_statistics(model, ids))`` has a row for each norm, and a column for each attribute.

    Args:
        model: a ``minigpt.GPT2``, or any causal language model of transformers.

    Raises:
        ConfigError: if the model has no norm sites.
        NormError: if rows have fewer than two tokens, values are not finite, or a norm is of neither kind.
        GenerationError: if an id is outside the vocabulary, or there are more tokens than the context has.
    """
    host = host_with_norms(model)
    check_rows(input_ids, len(host.weight), host.shape.n_positions)
    sites: list[SiteStatistics] = []

    def looks(site: str, norm: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        original = original_norm(norm, model)
        kind = host.site_of(norm).kind

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            rows = _by_text(site, args[0], input_ids)
            sites.append(_of_site(site, rows, original, kind))

        return hook

    hooks: list[RemovableHandle] = []
    for site, norm in host.norms().items():
        hook = looks(site, norm)
        hooks.append(norm.register_forward_pre_hook(hook))
    try:
        with hooked(model):
            host.run(input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return sites


def _by_text(
    site: str, x: Float[Tensor, "*rows embd"], input_ids: Int[Tensor, "batch seq"]
) -> Float[Tensor, "texts seq embd"]:
    """Return what a norm is given as texts of rows; of a norm of heads, a text for each head.

    Raises:
        NormError: if there is no row for each token.
    """
    batch, seq = input_ids.shape
    if x.dim() == 3 and x.shape[:2] == (batch, seq):
        return x
    if x.dim() == 4 and x.shape[1] == seq:  # (B, T, H, D)
        return x.transpose(1, 2).flatten(0, 1)
    if x.dim() == 4 and x.shape[2] == seq:  # (B, H, T, D)
        return x.flatten(0, 1)
    if x.dim() == 2 and len(x) == batch * seq:
        return x.unflatten(0, (batch, seq))
    raise NormError(f"{site} is given rows of shape {tuple(x.shape)}, which are not rows of {batch} x {seq} tokens")


def _of_site(site: str, x: Float[Tensor, "batch seq embd"], norm: Any, kind: str) -> SiteStatistics:
    """Return the statistics of the rows that a norm is given.

    Raises:
        NormError: if rows have fewer than two tokens, or values are not finite.
    """
    x = x.double()
    norm = copy.deepcopy(norm).double()
    mean = x.mean(-1, keepdim=True)  # (B, T, 1)
    centred = x - mean if kind == "layer_norm" else x
    deviation = torch.sqrt(centred.square().mean(-1) + norm.eps)  # (B, T)
    if x.shape[1] < 2 or not deviation.isfinite().all():
        raise NormError(f"rows must have two tokens or more, and finite values, got {tuple(x.shape)} at {site}")
    first, later = deviation[:, 0], deviation[:, 1:]
    mean_square = x.square().mean(-1)  # (B, T)
    mean_shares = mean[..., 0].square() / mean_square.clamp(min=1e-300)
    constants = later.mean().expand(x.shape[1]).clone()  # (T), as a frozen norm divides
    constants[0] = first.mean()
    frozen = centred / constants[:, None] * norm.weight
    if norm.bias is not None:
        frozen = frozen + norm.bias
    return SiteStatistics(
        site=site,
        deviation=later.mean().item(),
        deviation_spread=later.std(correction=0).item(),
        deviation_first=first.mean().item(),
        mean_share=mean_shares.mean().item(),
        channels=_largest_channels(x - mean),
        unexplained=1 - r_squared(frozen, norm(x)),
    )


def _largest_channels(centred: Float[Tensor, "batch seq embd"]) -> list[Channel]:
    """Return the channels of centred rows that have most of the variance."""
    energy = centred.square().sum((0, 1))  # (C)
    shares = energy / energy.sum()
    largest = shares.topk(min(MOST_CHANNELS, len(shares)))
    channels: list[Channel] = []
    for channel, share in zip(largest.indices.tolist(), largest.values.tolist(), strict=True):
        channels.append(Channel(channel, share))
    return channels


def look_parts(sites: Sequence[SiteStatistics], about: str) -> list[Part]:
    """Return the table of the sites, and a map of them for each quantity, which only the page draws."""
    figures = [vars(site) for site in sites]
    parts: list[Part] = []
    for key, title, caption, form in SITE_MAPS:
        maps = {"sites": figures, "titles": {key: caption}, "form": form}
        parts.append(Part(key, title, SHADES, drawing="maps", data=maps, brief=0))
    heads = ("norm site", *titles(SiteStatistics), "largest channels")
    rows = [(site.site, *cells(SiteStatistics, site), _channels(site)) for site in sites]
    parts.append(Part("figures", "Every site", f"{about}. {ABOUT}", heads, rows))
    return parts


def _channels(site: SiteStatistics) -> str:
    names = ", ".join(str(top.channel) for top in site.channels)
    share = sum(top.share for top in site.channels)
    return f"{names}: {percent(share)}"
