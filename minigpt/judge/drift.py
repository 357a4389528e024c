"""The error at each norm, by itself and after everything before it, and in the residual stream after each block."""

import contextlib
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
        self.model = contest.candidate
        self.sites = self.model.norm_sites()
        self.blocks = [f"h.{i}" for i in range(contest.config.n_layer)]
        places = [*self.sites, *self.blocks]
        self.norms = {site: RecordedNorm(norm) for site, norm in self.model.norm_modules().items()}
        self.stream = Recorder(self.model, self.blocks)
        self.reference = Recorder(contest.reference.model.transformer, places)
        self.truth = Recorder(contest.truth.model.transformer, places)
        self.local = {site: PositionedDistance() for site in self.sites}
        self.propagated = {place: PositionedDistance() for place in places}
        self.noise = {place: Distance() for place in places}

    def __enter__(self) -> "Drift":
        self._active = contextlib.ExitStack()
        for part in (self.stream, self.reference, self.truth):
            self._active.enter_context(part)
        for site, norm in self.norms.items():
            self.model.set_submodule(site, norm)
            self._active.callback(self.model.set_submodule, site, norm.norm)
        return self

    def __exit__(self, *_: object) -> None:
        self._active.close()

    def add(self) -> None:
        """Count what all three have just computed.

        Raises:
            NormError: if a norm returned NaN where the truth is a number.
        """
        outputs = {site: norm.output for site, norm in self.norms.items()} | self.stream.outputs
        for place, true_output in self.truth.outputs.items():
            if outputs[place].isnan().any() and not true_output.isnan().any():
                raise NormError(
                    f"{place} returns NaN where the reference returns numbers, so its error cannot be measured"
                )
            self.propagated[place].add(outputs[place], true_output)
            self.noise[place].add(self.reference.outputs[place], true_output)
        for site, norm in self.norms.items():
            x = self.truth.inputs[site].to(norm.output.dtype)  # (1, T, C): the true input in the norm's dtype
            self.local[site].add(norm.again(x.clone()), exact_layer_norm(x, self.truth.modules[site]))

    def norm_sites(self, swapped: Iterable[str]) -> list[NormSite]:
        """Every site, in the order of the forward."""
        chosen = set(swapped)
        return [
            NormSite(
                site=site,
                local_error=self.local[site].all.relative,
                propagated_error=self.propagated[site].all.relative,
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
                error=self.propagated[block].all.relative,
                error_first=self.propagated[block].first.relative,
                error_rest=self.propagated[block].rest.relative,
                noise=self.noise[block].relative,
            )
            for block in self.blocks
        ]


class Recorder:
    """Keeps the last input and output of chosen norms and blocks while it is active, by forward hooks."""

    def __init__(self, model: nn.Module, places: Iterable[str]) -> None:
        self.modules = {place: model.get_submodule(place) for place in places}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self._hooks = [module.register_forward_hook(self._hook(place)) for place, module in self.modules.items()]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, place: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            self.inputs[place] = args[0]
            self.outputs[place] = output if isinstance(output, Tensor) else output[0]  # blocks may return a tuple

        return keep


class RecordedNorm(nn.Module):
    """Calls a norm as the model would, and keeps its output and a function that repeats the computation.

    A hook on the norm would not do: a norm with hooks no longer adds the residual itself, see ``minigpt.norms.add``.
    """

    output: Tensor
    again: Callable[[Tensor], Tensor]

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        if (addition := own_addition(norm)) is not None and not has_hooks(norm):
            self.add_norm = partial(self._add_norm, addition)

    def forward(self, x: Tensor) -> Tensor:
        self.output, self.again = self.norm(x), self.norm
        return self.output

    def _add_norm(self, addition: Callable[..., Any], residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total, self.output = addition(residual.clone(), delta)  # it may write the sum over its argument
        self.again = partial(norm_by_addition, addition)
        return total, self.output


class PositionedDistance:
    """A distance, with the first token apart: it carries the massive activations (arXiv 2402.17762)."""

    def __init__(self) -> None:
        self.all, self.first, self.rest = Distance(), Distance(), Distance()

    def add(self, value: Float[Tensor, "1 seq embd"], truth: Float[Tensor, "1 seq embd"]) -> None:
        for part, places in ((self.all, slice(None)), (self.first, slice(1)), (self.rest, slice(1, None))):
            part.add(value[:, places], truth[:, places])


def exact_layer_norm(x: Float[Tensor, "batch seq embd"], norm: nn.Module) -> Float[Tensor, "batch seq embd"]:
    """LayerNorm of ``x`` in float64 with the weight, bias and eps of the reference's norm."""
    weight, bias, eps = (getattr(norm, name) for name in ("weight", "bias", "eps"))
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)
