"""Collect what frozen norms divide by: the deviations of a text in the model before its norms are frozen."""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.swap.sites import HasNorms, check_has_norms, match_sites, swap_norms


@torch.no_grad()
def calibrate(
    model: HasNorms, input_ids: Int[Tensor, "batch seq"], sites: str | Iterable[str] = "*"
) -> dict[str, float]:
    """Give the frozen norms at ``sites`` their average deviation on ``input_ids``; return it by site.

    The text is read once, in eval mode, with LayerNorm in place of these norms, so that the deviations are those of the
    model before they are frozen. Frozen norms elsewhere stay, as the paper freezes one norm after the other.

    Args:
        input_ids: (B, T) token ids without padding, of two tokens or more; position 0 counts as a text's first.
        sites: as for ``swap_norms``.

    Raises:
        ConfigError: if the model has no norm sites.
        NormError: if there is no frozen norm, a pattern matches no site, or the text is too short.
        GenerationError: if an id is outside the vocabulary, or there are more tokens than the context has.
    """
    check_has_norms(model)
    chosen = {site: model.get_submodule(site) for site in match_sites(model, sites)}
    frozen = {site: norm for site, norm in chosen.items() if isinstance(norm, FrozenLayerNorm)}
    if not frozen:
        raise NormError(
            'no site holds a frozen norm to calibrate; put one there with swap_norms(model, "frozen"), or --norm frozen'
        )
    was_training = model.training
    swap_norms(model, "fused", frozen)
    hooks = [model.get_submodule(site).register_forward_pre_hook(_calibrates(norm)) for site, norm in frozen.items()]
    try:
        model.train(False)
        model(input_ids)
    finally:
        for hook in hooks:
            hook.remove()
        for site, norm in frozen.items():
            model.set_submodule(site, norm)
        model.train(was_training)
    return {site: norm.calibration[0].mean().item() for site, norm in frozen.items() if norm.calibration is not None}


def _calibrates(norm: FrozenLayerNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    return lambda _, inputs: norm.calibrate(inputs[0])
