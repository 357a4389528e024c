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

from minigpt.errors import NormError
from minigpt.host import hooked
from minigpt.inputs import check_rows
from minigpt.report.charts import Maps
from minigpt.report.fields import Form, Shown
from minigpt.report.numerals import brief, percent
from minigpt.report.parts import Number, Part, cells, titles
from minigpt.swap.fit import original_norm, r_squared
from minigpt.swap.sites import host_with_norms

MOST_CHANNELS = 3
ABOUT = (
    "Deviation and spread are mean and standard deviation over the tokens after the first. The mean's share is of a "
    "row's mean square. The largest channels have most of the variance. What a constant explains is R squared of the "
    "output with a constant deviation."
)
SHADES = "A stronger colour is a larger number, on a logarithmic scale."
MAPS: tuple[tuple[str, str, str, Form], ...] = (  # a field, its title, what it is, and its form
    ("deviation", "Deviation", "the mean deviation of a row, which LayerNorm divides by", brief),
    ("mean_share", "The mean's share", "the mean's part in a row's mean square, which RMSNorm leaves in", percent),
    ("unexplained", "Lost by freezing", "the share of the output that a constant deviation does not explain", percent),
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
        channels: those with most of the variance, summed over all tokens.
        unexplained: the share of the norm's output that it does not explain (1 - R squared) if it divides by
            constants, as ``frozen`` does, and keeps its scale and shift.
    """

    site: str
    deviation: Annotated[float, Shown("deviation")]
    deviation_spread: Annotated[float, Shown("spread")]
    deviation_first: Annotated[float, Shown("first token")]
    mean_share: Annotated[float, Shown("mean's share", percent)]
    channels: list[Channel]
    unexplained: float


@torch.inference_mode()
def look(model: nn.Module, input_ids: Int[Tensor, "batch seq"]) -> list[SiteStatistics]:
    """Return what each norm is given when the model reads ``input_ids`` (B, T), in the order of the data.

    A norm of queries or keys is given a row for each head; its heads count as texts.

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
        original, kind = original_norm(norm, model), host.site_of(norm).kind
        return lambda _, args: sites.append(_of_site(site, _by_text(site, args[0], input_ids), original, kind))

    hooks = [norm.register_forward_pre_hook(looks(site, norm)) for site, norm in host.norms().items()]
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
    raise NormError(f"{site} is given rows of shape {tuple(x.shape)}, which are not those of {batch} x {seq} tokens")


def _of_site(site: str, x: Float[Tensor, "batch seq embd"], norm: Any, kind: str) -> SiteStatistics:
    x, norm, mean = x.double(), copy.deepcopy(norm).double(), x.double().mean(-1)
    centred = x - mean[..., None] if kind == "layer_norm" else x
    deviation = torch.sqrt(centred.square().mean(-1) + norm.eps)  # (B, T)
    if x.shape[1] < 2 or not deviation.isfinite().all():
        raise NormError(f"rows must have two tokens or more, and finite values, got {tuple(x.shape)} at {site}")
    constants = deviation[:, 1:].mean().expand(deviation.shape[1]).clone()  # (T), as a frozen norm divides
    constants[0] = deviation[:, 0].mean()
    frozen = centred / constants[:, None] * norm.weight + (0 if norm.bias is None else norm.bias)
    energy = (x - mean[..., None]).square().sum((0, 1))  # (C)
    shares, channels = (energy / energy.sum()).topk(min(MOST_CHANNELS, len(energy)))
    return SiteStatistics(
        site=site,
        deviation=deviation[:, 1:].mean().item(),
        deviation_spread=deviation[:, 1:].std(correction=0).item(),
        deviation_first=deviation[:, 0].mean().item(),
        mean_share=(mean.square() / x.square().mean(-1).clamp(min=1e-300)).mean().item(),
        channels=[Channel(channel, share) for channel, share in zip(channels.tolist(), shares.tolist(), strict=True)],
        unexplained=1 - r_squared(frozen, norm(x)),
    )


def look_parts(sites: Sequence[SiteStatistics], about: str) -> list[Part]:
    """Return the table of the sites, and a map of them for each quantity, which only the page draws."""
    rows = [
        (site.site, *cells(SiteStatistics, vars(site)), _channels(site), Number(1 - site.unexplained, percent))
        for site in sites
    ]
    heads = ("norm site", *titles(SiteStatistics), "largest channels", "constant explains")
    figures = [vars(site) for site in sites]
    drawings = [
        Part(key, title, SHADES, drawing="maps", data=Maps(figures, {key: caption}, form), brief=0)
        for key, title, caption, form in MAPS
    ]
    return [*drawings, Part("figures", "Every site", f"{about}. {ABOUT}", heads, rows)]


def _channels(site: SiteStatistics) -> str:
    names = ", ".join(str(top.channel) for top in site.channels)
    return f"{names}: {percent(sum(top.share for top in site.channels))}"
