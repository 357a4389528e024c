"""A norm of the original, in float64.

T tokens, C embedding.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from minigpt.host import Float64, NormSite, exact_norm
from minigpt.offload import is_offloaded, plain_copy, values_of


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
            return cls(site.kind, None, None, 0.0, module=plain_copy(norm) if is_offloaded(norm) else norm)
        values = values_of(norm)  # also where they stay in a file
        weight, bias = values.get("weight"), values.get("bias")
        if weight is not None:
            weight = weight.double() + site.adds_one
        return cls(site.kind, weight, bias, site.eps or 0.0, site.rounds)

    def __call__(self, x: Float[Tensor, "*dims embd"]) -> Float[Tensor, "*dims embd"]:
        if self.module is None:
            return exact_norm(x, self.kind, self.weight, self.bias, self.eps)
        with Float64():
            return self.module(x.double())
