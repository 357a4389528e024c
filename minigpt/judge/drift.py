"""The error at each norm, by itself and after everything before it, and in the residual stream after each block."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.judge.contest import Contest
from minigpt.judge.measures import Distance
from minigpt.judge.report import Fields
from minigpt.norms.add import has_hooks, norm_by_addition, own_addition

# T tokens, C embedding


class Drift:
    """Records the norms and blocks of the candidate, of transformers at its dtype, and of the float64 truth.

    Use it as a context manager around the forwards, and call ``add`` each time all three have read the same tokens.
    """

    def __init__(self, contest: Contest) -> None:
        self.model = contest.candidate
        self.norms = {site: RecordedNorm(norm) for site, norm in self.model.norm_modules().items()}
        self.blocks = [f"h.{i}" for i in range(contest.config.n_layer)]
        places = [*self.norms, *self.blocks]
        self.stream = Recorder(self.model, self.blocks)
        self.reference = Recorder(contest.reference.model.transformer, places)
        self.truth = Recorder(contest.truth.model.transformer, places)
        self.local: defaultdict[str, PositionedDistance] = defaultdict(PositionedDistance)
        self.propagated: defaultdict[str, PositionedDistance] = defaultdict(PositionedDistance)
        self.noise: defaultdict[str, Distance] = defaultdict(Distance)

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

    def norm_sites(self, swapped: Collection[str]) -> list[Fields]:
        """Every site, in the order of the forward."""
        return [
            Fields(
                site=site,
                swapped=site in swapped,
                **self.local[site].relative("local_error", "local_first", "local_rest"),
                **self.propagated[site].relative("propagated_error", "propagated_first", "propagated_rest"),
                noise=self.noise[site].relative,
            )
            for site in self.norms
        ]

    def block_drift(self) -> list[Fields]:
        """The residual stream after every block."""
        return [
            Fields(
                block=block,
                **self.propagated[block].relative("error", "error_first", "error_rest"),
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
        self._hooks = [
            module.register_forward_hook(partial(self._keep, place)) for place, module in self.modules.items()
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, place: str, _: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        self.inputs[place] = args[0]
        self.outputs[place] = output if isinstance(output, Tensor) else output[0]  # blocks may return a tuple


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
        self.parts = [(slice(None), Distance()), (slice(1), Distance()), (slice(1, None), Distance())]

    def add(self, value: Float[Tensor, "1 seq embd"], truth: Float[Tensor, "1 seq embd"]) -> None:
        for places, part in self.parts:
            part.add(value[:, places], truth[:, places])

    def relative(self, *names: str) -> dict[str, float]:
        """Relative RMS errors of all tokens, of the first and of the rest, under these names."""
        return {name: part.relative for name, (_, part) in zip(names, self.parts, strict=True)}


def exact_layer_norm(x: Float[Tensor, "batch seq embd"], norm: nn.Module) -> Float[Tensor, "batch seq embd"]:
    """LayerNorm of ``x`` in float64 with the weight, bias and eps of the reference's norm."""
    weight, bias, eps = (getattr(norm, name) for name in ("weight", "bias", "eps"))
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)
