"""The norms that a config chooses: built into the network, and told from others that somebody has put there since."""

import itertools
from typing import Any

import torch

from minigpt import norms
from minigpt.engine import GPT2
from minigpt.errors import NormError
from minigpt.hf.config import Choice
from minigpt.norms.foreign.adapt import eps_of
from minigpt.swap import match_sites


def install_norms(body: GPT2, chosen: Choice) -> None:
    """Build the chosen norms into ``body``; they remember the values that they were built with.

    On the CPU first, also where the model is on the meta device until its checkpoint is read: a norm may have numbers
    of its own, which that checkpoint does not have.
    """
    device = torch.empty(0).device  # where new tensors go, here or around this
    for pattern, norm in [("*", "fused"), *chosen.by_site()]:
        for site in match_sites(body, pattern):
            with torch.device("cpu"):
                built = norms.build(norm, body.config.n_embd, eps=body.config.layer_norm_epsilon)
            body.set_submodule(site, built)
            for part in built.modules():
                own = itertools.chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
                vars(part)["_as_built"] = {name: tensor.detach().clone() for name, tensor in own}
            built._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def norm_kinds(body: GPT2) -> dict[str, Any]:
    """What stands at each site: the classes of its parts, the names of what they save, and every eps."""
    return {
        site: ([type(part) for part in norm.modules()], [*norm.state_dict()], eps_of(norm))
        for site, norm in body.norm_modules().items()
    }


def require_norms_of_config(body: GPT2, of_config: dict[str, Any], eps_now: float) -> None:
    """Refuse to save norms that would load as others.

    Args:
        of_config: the ``norm_kinds`` that the config has built.
        eps_now: what the config says by now.

    Raises:
        NormError: the message names the site.
    """
    for site, (classes, saved, eps) in norm_kinds(body).items():
        classes_of_config, saved_of_config, eps_of_config = of_config[site]
        if classes != classes_of_config:
            raise NormError(
                f"{site} is not as the config says, so what is saved would load as another model; "
                "choose norms by from_pretrained(..., norm=...), or keep the state_dict"
            )
        if other := sorted({*saved} ^ {*saved_of_config}):
            raise NormError(f"{site} differs in {other[0]} from what the config builds; keep the state_dict")
        if eps != {eps_now if built == body.config.layer_norm_epsilon else built for built in eps_of_config}:
            raise NormError(
                f"{site} has another eps than the config's, so what is saved would load as another model; "
                "choose it by from_pretrained(..., layer_norm_epsilon=...), or keep the state_dict"
            )
