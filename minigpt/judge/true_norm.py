"""A norm of the original, in float64.

T tokens, C embedding.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from minigpt.host import Float64, NormSite, exact_norm


@dataclass(frozen=True, eq=False)
class TrueNorm:
    """A norm of the original, in float64.

    Attributes:
        kind: "layer_norm", "rms_norm" or "other", whose own ``module`` then computes it.
        weight: what it multiplies by, so 1 + weight where it adds one.
        rounds: where it rounds in half precision, as ``NormSite`` says.
    """

    kind: str
    weight: Float[Tensor, " embd"] | None
    bias: Float[Tensor, " embd"] | None
    eps: float
    rounds: str | None = None
    module: nn.Module | None = None

    @classmethod
    def of(cls, norm: nn.Module, site: NormSite) -> "TrueNorm":
        """Return a norm of a float64 model."""
        if site.kind == "other":
            return cls(site.kind, None, None, 0.0, module=norm)
        weight, bias = parameter_of(norm, "weight"), parameter_of(norm, "bias")
        if weight is not None:
            weight = weight + site.adds_one
        return cls(site.kind, weight, bias, site.eps or 0.0, site.rounds)

    def __call__(self, x: Float[Tensor, "*dims embd"]) -> Float[Tensor, "*dims embd"]:
        if self.module is None:
            return exact_norm(x, self.kind, self.weight, self.bias, self.eps)
        with Float64():
            return self.module(x.double())


def parameter_of(norm: nn.Module, role: str) -> Tensor | None:
    """Return the values of a norm's Parameter; None if it has none of that name."""
    parameter = getattr(norm, role, None)
    return parameter.detach() if isinstance(parameter, nn.Parameter) else None
