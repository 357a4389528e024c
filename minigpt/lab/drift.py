"""What each norm site does to the activations: by itself, and after all that came before it."""

from collections.abc import Iterable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.lab.measures import Distance
from minigpt.lab.report import NormSite
from minigpt.model import GPT2

# T tokens, C embedding


class SiteErrors:
    """Listens to the norms of a candidate and of the float64 truth while both read the same tokens.

    Use as a context manager around the two forwards, and call ``add`` after each pair of them.
    """

    def __init__(self, candidate: GPT2, truth: dict[str, nn.Module]) -> None:
        self.candidate, self.truth = candidate, truth
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.true_outputs: dict[str, Tensor] = {}
        self.local = {site: Distance() for site in truth}
        self.propagated = {site: Distance() for site in truth}

    def __enter__(self) -> "SiteErrors":
        self._hooks = [
            hook
            for site, module in self.truth.items()
            for hook in (
                module.register_forward_hook(self._remember(site, self.true_outputs, self.inputs)),
                self.candidate.get_submodule(site).register_forward_hook(self._remember(site, self.outputs)),
            )
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def add(self) -> None:
        """Count what both models have just computed."""
        outputs, true_outputs = dict(self.outputs), dict(self.true_outputs)
        for site, true_input in self.inputs.items():
            norm = self.candidate.get_submodule(site)
            x = true_input.to(outputs[site].dtype)  # (1, T, C): what this norm can be given of the true input
            self.local[site].add(norm(x), exact_layer_norm(x, self.truth[site]))
            self.propagated[site].add(outputs[site], true_outputs[site])

    def report(self, swapped: Iterable[str]) -> list[NormSite]:
        """Every site in the order data meets them."""
        chosen = set(swapped)
        return [
            NormSite(site, self.local[site].relative, self.propagated[site].relative, site in chosen)
            for site in self.truth
        ]

    def _remember(self, site: str, outputs: dict[str, Tensor], inputs: dict[str, Tensor] | None = None):
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            outputs[site] = output
            if inputs is not None:
                inputs[site] = args[0]

        return hook


def exact_layer_norm(x: Float[Tensor, "batch seq embd"], norm: nn.Module) -> Float[Tensor, "batch seq embd"]:
    """LayerNorm of ``x`` in float64 with the weight, bias and eps of the reference's norm."""
    weight, bias, eps = (getattr(norm, name) for name in ("weight", "bias", "eps"))
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)
