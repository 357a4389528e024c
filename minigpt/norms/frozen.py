"""LayerNorm that divides by a constant, a step between a norm and none, and the way from one to the other."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import NormError
from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm
from minigpt.norms.variants import require_share

MASSIVE = 4.0  # the first position has its own constant if its deviation is more than this times the usual


@register("frozen", exact=False)
class FrozenLayerNorm(LayerNorm):
    """Divides by an average deviation, collected from calibration text (Heimersheim 2024, arXiv 2409.13710).

    ``y = (x - mean) / deviation * weight + bias`` is linear in x, so it is a matrix.

    In a trained GPT-2 the first position has massive activations. Their deviation is many times that of the others, so
    the paper gives that position its own constant. A norm does not know the position of a row, and with a cache or
    padding it cannot count. It recognizes a massive row by its deviation: it is beyond ``boundary``, the geometric mean
    of the two constants. If calibration finds only one kind of row, the boundary is infinite.

    Buffer ``calibration``: (usual deviation, massive deviation, boundary), or None until ``calibrate``.

    Raises:
        NormError: in forward, if it has not been calibrated.
    """

    calibration: Float[Tensor, "3"] | None

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias)
        self.register_buffer("calibration", None)

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Return the row at mean 0, divided by the average deviation of its kind."""
        if self.calibration is None:
            raise NormError(
                "this frozen norm has no deviation to divide by yet; collect it from text by "
                "minigpt.fit_norms(model, input_ids) or --fit FILE"
            )
        usual, massive, boundary = self.calibration.to(x.dtype)
        mean = x.mean(dim=self.row_dims, keepdim=True)  # (..., 1)
        return (x - mean) / torch.where(self.deviation(x) < boundary, usual, massive)

    @property
    def is_ready(self) -> bool:
        """Whether the norm can run: it has its constants, or needs none."""
        return self.calibration is not None

    def deviation(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*rows"]:
        """Return sqrt(var + eps) of each row of ``x``, (..., 1)."""
        return torch.sqrt(x.var(dim=self.row_dims, correction=0, keepdim=True) + self.eps)

    def calibrate(self, x: Float[Tensor, "batch seq *row"]) -> None:
        """Take the constants from this norm's inputs (B, T, ...) in a model, position 0 first.

        Raises:
            NormError: if there are fewer than two positions, or values that are not finite.
        """
        if x.shape[1] < 2:
            raise NormError(f"calibration needs texts of two tokens or more, got {x.shape[1]}")
        deviation = self.deviation(x.detach().to(torch.promote_types(x.dtype, torch.float32))).flatten(1)  # (B, T)
        first, typical = deviation[:, 0].mean(), deviation[:, 1:].median()
        boundary = _boundary(first, typical)
        usual = deviation[deviation < boundary].mean()
        if not usual.isfinite():
            raise NormError("calibration needs activations that are finite; some are NaN or infinite")
        massive = deviation[deviation >= boundary].mean() if boundary.isfinite() else usual
        self.calibration = torch.stack([usual, massive, boundary])

    def freeze(self, first: Tensor, usual: Tensor) -> None:
        """Take these averages as the constants.

        Args:
            first: the deviation of the first position. It has its own constant if it is massive.
            usual: the deviation of all others.
        """
        boundary = _boundary(first, usual)
        self.calibration = torch.stack([usual, first if boundary.isfinite() else usual, boundary])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.calibration is None and f"{prefix}calibration" in state_dict:
            self.calibration = torch.empty_like(state_dict[f"{prefix}calibration"], device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@register("taper", exact=False, parameter="gate")
class TaperedLayerNorm(FrozenLayerNorm):
    """Goes from LayerNorm to a frozen norm, ``y = gate * LayerNorm(x) + (1 - gate) * Frozen(x)`` (arXiv 2602.10408).

    At a gate of 1 it is LayerNorm and needs no calibration; at 0 it is linear in x. "taper:0.25" sets the gate. A
    training loop may lower the attribute ``gate`` between steps, as the paper does.

    Args:
        gate: the share of LayerNorm, from 0 to 1.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, bias: bool = True, gate: float = 0.5
    ) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias)
        self.gate = require_share(gate, "gate")

    @property
    def is_ready(self) -> bool:
        """Whether the norm can run: a gate of 1 needs no constants."""
        return self.gate == 1 or super().is_ready

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Return the mixture of the row at variance 1 and the row over a constant, both at mean 0."""
        standard = LayerNorm.standardize(self, x)
        return standard if self.gate == 1 else torch.lerp(super().standardize(x), standard, self.gate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate={self.gate}"


def _boundary(first: Tensor, usual: Tensor) -> Tensor:
    """Return the deviation that separates the two kinds of row; infinity if there is only one kind."""
    return torch.sqrt(first * usual) if first > MASSIVE * usual else first.new_tensor(float("inf"))
