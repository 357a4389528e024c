"""The error at each norm, by itself and after everything before it, and in the residual stream after each block."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.judge.contest import Contest
from minigpt.judge.measures import Distance
from minigpt.judge.parity_report import BlockDrift, NormSite
from minigpt.norms.add import has_hooks, norm_by_addition, own_addition

# T tokens, C embedding


class Drift:
    """Records the norms and blocks of the candidate, of transformers at its dtype, and of the float64 truth.

    Use it as a context manager around the forwards, and call ``add`` each time all three have read the same tokens.
    """

    def __init__(self, contest: Contest) -> None:
        self.sites = contest.candidate.norm_sites()
        self.blocks = [f"h.{i}" for i in range(contest.config.n_layer)]
        places = [*self.sites, *self.blocks]
        self.candidate = Listener(contest.candidate, places)
        self.reference = Listener(contest.reference.model.transformer, places)
        self.truth = Listener(contest.truth.model.transformer, places)
        self.true_norms = {site: contest.truth.model.transformer.get_submodule(site) for site in self.sites}
        self.local = {site: PositionedDistance() for site in self.sites}
        self.propagated = {place: PositionedDistance() for place in places}
        self.noise = {place: PositionedDistance() for place in places}

    def __enter__(self) -> "Drift":
        for listener in (self.candidate, self.reference, self.truth):
            listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        for listener in (self.candidate, self.reference, self.truth):
            listener.stop()

    def add(self) -> None:
        """Count what all three have just computed.

        Raises:
            NormError: if a norm returned NaN where the truth is a number.
        """
        for place, true_output in self.truth.outputs.items():
            if self.candidate.outputs[place].isnan().any() and not true_output.isnan().any():
                raise NormError(
                    f"{place} returns NaN where the reference returns numbers, so its error cannot be measured"
                )
            self.propagated[place].add(self.candidate.outputs[place], true_output)
            self.noise[place].add(self.reference.outputs[place], true_output)
        for site, true_norm in self.true_norms.items():
            # (1, T, C): the true input in the norm's dtype
            x = self.truth.inputs[site].to(self.candidate.outputs[site].dtype)
            self.local[site].add(self.candidate.again[site](x.clone()), exact_layer_norm(x, true_norm))

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


CALLED = {"forward", "add_norm"}  # the methods by which a block calls its norms


class Listener:
    """Keeps the last input and output of chosen modules, and a function that repeats the computation.

    It wraps the modules' methods. Hooks would be simpler, but a norm with hooks no longer adds the residual itself, so
    it would compute something else than without them.
    """

    def __init__(self, model: nn.Module, places: list[str]) -> None:
        self.modules: dict[str, Any] = {place: model.get_submodule(place) for place in places}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.again: dict[str, Callable[[Tensor], Tensor]] = {}  # the same computation for another input

    def start(self) -> None:
        self._own = [(module, {name: vars(module)[name] for name in CALLED & vars(module).keys()})
                     for module in self.modules.values()]  # fmt: skip
        self._hooks = []
        for place, module in self.modules.items():
            if has_hooks(module):  # they may change the output, and the norm does not use add_norm anyway
                self._hooks.append(module.register_forward_hook(self._hook(place)))
                continue
            vars(module)["forward"] = self._heard(place, module.forward)
            if (add_norm := own_addition(module)) is not None:
                vars(module)["add_norm"] = self._heard_sum(place, add_norm)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, own in self._own:
            for name in CALLED:
                vars(module).pop(name, None)
            vars(module).update(own)

    def _hook(self, place: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Tensor, ...], output: Any) -> None:
            self._keep(place, args[0], output, module.forward)

        return hook

    def _heard(self, place: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def heard(x: Tensor, *more: Any, **named: Any) -> Any:
            output = forward(x, *more, **named)
            self._keep(place, x, output, forward)
            return output

        return heard

    def _heard_sum(self, place: str, add_norm: Callable[..., Any]) -> Callable[..., Any]:
        def heard(residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
            total, y = add_norm(residual.clone(), delta)  # it may write the sum over its argument
            self._keep(place, total, y, partial(norm_by_addition, add_norm))
            return total, y

        return heard

    def _keep(self, place: str, x: Tensor, output: Any, again: Callable[[Tensor], Tensor]) -> None:
        self.inputs[place], self.again[place] = x, again
        self.outputs[place] = (
            output[0] if isinstance(output, tuple) else output
        )  # blocks of some versions return a tuple


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
