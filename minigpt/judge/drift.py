"""The error at each norm, by itself and after everything before it, and in the residual stream after each block."""

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minigpt.errors import NormError
from minigpt.judge.contest import Contest
from minigpt.judge.measures import Distance
from minigpt.judge.parity_report import BlockDrift, NormSite
from minigpt.norms.add import add_norm, parts_of

# T tokens, C embedding


class Drift:
    """Records the norms and blocks of the candidate, of transformers at its dtype, and of the float64 truth.

    Use it as a context manager around the forwards, and call ``add`` each time all three have read the same tokens.
    """

    def __init__(self, contest: Contest) -> None:
        self.contest = contest
        self.models: dict[str, Any] = {
            "candidate": contest.candidate,
            "reference": contest.reference.model.transformer,
            "truth": contest.truth.model.transformer,
        }
        self.sites = contest.candidate.norm_sites()
        self.blocks = [f"h.{i}" for i in range(contest.config.n_layer)]
        places = [*self.sites, *self.blocks]
        self.outputs: dict[str, dict[str, Tensor]] = {name: {} for name in self.models}
        self.true_inputs: dict[str, Tensor] = {}
        self.local = {site: PositionedDistance() for site in self.sites}
        self.propagated = {place: PositionedDistance() for place in places}
        self.noise = {place: PositionedDistance() for place in places}

    def __enter__(self) -> "Drift":
        self.hooks = [
            _keep_output(model, place, self.outputs[name])
            for name, model in self.models.items()
            for place in self.propagated
        ]
        self.hooks += [_keep_input(self.models["truth"], site, site, self.true_inputs) for site in self.sites]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def add(self) -> None:
        """Count what all three have just computed.

        Raises:
            NormError: if a norm returned NaN where the truth is a number.
        """
        for place in self.propagated:
            candidate, reference, truth = (self.outputs[name][place] for name in self.models)
            if candidate.isnan().any() and not truth.isnan().any():
                raise NormError(
                    f"{place} returns NaN where the reference returns numbers, so its error cannot be measured"
                )
            self.propagated[place].add(candidate, truth)
            self.noise[place].add(reference, truth)
        for site in self.sites:
            x = self.true_inputs[site].to(self.contest.dtype)  # (1, T, C): the true input in the norm's dtype
            norm, true_norm = (self.models[name].get_submodule(site) for name in ("candidate", "truth"))
            # As a Block calls them: ln_2 also adds the residual.
            y = add_norm(norm, *parts_of(x))[1] if site.endswith("ln_2") else norm(x.clone())
            self.local[site].add(y, exact_layer_norm(x, true_norm))

    def norm_sites(self, swapped: Iterable[str]) -> list[NormSite]:
        """Every site, in the order of the forward."""
        chosen = set(swapped)
        return [
            NormSite(
                site=site,
                local_error=self.local[site].relative,
                propagated_error=self.propagated[site].relative,
                swapped=site in chosen,
                local_first=self.local[site].first.relative,
                local_rest=self.local[site].rest.relative,
                propagated_first=self.propagated[site].first.relative,
                propagated_rest=self.propagated[site].rest.relative,
                noise=self.noise[site].relative,
            )
            for site in self.sites
        ]

    def block_drift(self) -> list[BlockDrift]:
        """The residual stream after every block."""
        return [
            BlockDrift(
                block=block,
                error=self.propagated[block].relative,
                error_first=self.propagated[block].first.relative,
                error_rest=self.propagated[block].rest.relative,
                noise=self.noise[block].relative,
            )
            for block in self.blocks
        ]


def _keep_output(model: nn.Module, place: str, outputs: dict[str, Tensor]) -> RemovableHandle:
    """Keep what a norm or a block returns.

    For ``ln_2`` that is the input of the MLP. A hook on ``ln_2`` itself would change the model, which calls a norm with
    hooks in place of its ``add_norm``.
    """
    if place.endswith("ln_2"):
        return _keep_input(model, place.replace("ln_2", "mlp"), place, outputs)

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        # Blocks of some versions return a tuple. An add_norm may write its sum over a block's output.
        outputs[place] = (output[0] if isinstance(output, tuple) else output).clone()

    return model.get_submodule(place).register_forward_hook(hook)


def _keep_input(model: nn.Module, module: str, place: str, inputs: dict[str, Tensor]) -> RemovableHandle:
    def hook(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs[place] = given[0].clone()

    return model.get_submodule(module).register_forward_pre_hook(hook)


class PositionedDistance:
    """A distance, with the first token apart: it carries the massive activations (arXiv 2402.17762)."""

    def __init__(self) -> None:
        self.first, self.rest = Distance(), Distance()

    def add(self, value: Float[Tensor, "1 seq embd"], truth: Float[Tensor, "1 seq embd"]) -> None:
        self.first.add(value[:, :1], truth[:, :1])
        self.rest.add(value[:, 1:], truth[:, 1:])

    @property
    def relative(self) -> float:
        """Over all positions."""
        return Distance.sum(self.first, self.rest).relative


def exact_layer_norm(x: Float[Tensor, "batch seq embd"], norm: nn.Module) -> Float[Tensor, "batch seq embd"]:
    """LayerNorm of ``x`` in float64 with the weight, bias and eps of the reference's norm."""
    weight, bias, eps = (getattr(norm, name) for name in ("weight", "bias", "eps"))
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)
