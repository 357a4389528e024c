"""The norms that a config chooses: how they are built into the network, and checked before it is saved."""

import itertools
from typing import Any

import torch
from torch import nn

from minigpt import norms
from minigpt.errors import NormError
from minigpt.hf.config import Choice
from minigpt.norms.foreign.adapt import eps_of
from minigpt.swap import match_sites


def install_norms(body: Any, chosen: Choice) -> None:
    """Build the chosen norms into ``body``. Each keeps a copy of the values that it was built with.

    They are built on the CPU even if the model is on the meta device. A norm may have values that the checkpoint
    lacks, and on the meta device they would be lost.
    """
    device = body.wte.weight.device
    for site, norm in norm_by_site(body, chosen).items():
        with torch.device("cpu"):
            built = norms.build(norm, body.config.n_embd, eps=body.config.layer_norm_epsilon)
        body.set_submodule(site, built)
        for part in built.modules():
            own = itertools.chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
            vars(part)["_as_built"] = {name: tensor.detach().clone() for name, tensor in own}
        built._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def norm_by_site(body: Any, chosen: Choice) -> dict[str, norms.NormSpec]:
    """Return the chosen norm of every site. A later pattern overrides an earlier one."""
    pairs = [("*", "fused"), *chosen.by_site()]
    return {site: norm for pattern, norm in pairs for site in match_sites(body, pattern)}


def check_norms(body: Any, chosen: Choice, eps: float) -> None:
    """Check that a saved model would load with the norms that it has.

    Args:
        eps: what the config says now. It may have changed since the norms were built.

    Raises:
        NormError: the message names the site.
    """
    for site, norm in norm_by_site(body, chosen).items():
        if _kind(body.get_submodule(site)) != _kind(norms.build(norm, body.config.n_embd, eps=eps)):
            raise NormError(
                f"{site} is not as the config says, so what is saved would load as another model; choose norms and eps "
                "by from_pretrained(..., norm=..., layer_norm_epsilon=...), or keep the state_dict"
            )


def _kind(norm: nn.Module) -> tuple[Any, ...]:
    """Return what must be the same in two norms: their classes, the names of what they hold, and eps."""
    return [type(part) for part in norm.modules()], norm.state_dict().keys(), eps_of(norm)
