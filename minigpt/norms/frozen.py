"""LayerNorm that divides by a constant: the step between a norm and none."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import NormError
from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm

MASSIVE = 4.0  # times the usual: from here on the first position's deviation counts as another kind


@register("frozen", exact=False)
class FrozenLayerNorm(LayerNorm):
    """Divides by an average deviation, collected from calibration text (Heimersheim 2024, arXiv 2409.13710).

    ``y = (x - mean) / deviation * weight + bias``, which is linear in x: what is left is a matrix.

    In a trained GPT-2 the first position carries massive activations, whose deviation is many times that of the others,
    and one constant cannot serve both. The paper gives that position a constant of its own. A norm is not told which
    position a row stands at, and with a cache or padding it cannot count; so a massive row is told by its own
    deviation: it is beyond ``boundary``, the geometric mean of the two kinds. Where calibration finds only one kind,
    there is one constant and no boundary.

    Buffer ``calibration``: (usual deviation, massive deviation, boundary), or None until ``calibrate``.

    Raises:
        NormError: (in forward) it has not been calibrated.
    """

    calibration: Float[Tensor, "3"] | None

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(normalized_shape, eps, bias)
        self.register_buffer("calibration", None)

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """The row at mean 0, divided by the average deviation of its kind."""
        if self.calibration is None:
            raise NormError(
                "this frozen norm has no deviation to divide by yet; collect it from text, with "
                "minigpt.swap.calibrate(model, input_ids) or minigpt parity --calibration FILE"
            )
        usual, massive, boundary = self.calibration.to(x.dtype)
        mean = x.mean(dim=self.row_dims, keepdim=True)  # (..., 1)
        return (x - mean) / torch.where(self.deviation(x) < boundary, usual, massive)

    def deviation(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*rows"]:
        """What LayerNorm divides each row of ``x`` by, sqrt(var + eps): (..., 1)."""
        return torch.sqrt(x.var(dim=self.row_dims, correction=0, keepdim=True) + self.eps)

    def calibrate(self, x: Float[Tensor, "batch seq *row"]) -> None:
        """Take the constants from the inputs (B, T, ...) that this norm has in a model, position 0 first.

        Raises:
            NormError: fewer than two positions, or values that are not finite.
        """
        if x.shape[1] < 2:
            raise NormError(f"calibration needs texts of two tokens or more, not of {x.shape[1]}")
        deviation = self.deviation(x.detach().to(torch.promote_types(x.dtype, torch.float32)))
        deviation = deviation.flatten(1)  # (B, T)
        first, typical = deviation[:, 0].mean(), deviation[:, 1:].median()
        boundary = torch.sqrt(first * typical) if first > MASSIVE * typical else first.new_tensor(float("inf"))
        usual = deviation[deviation < boundary].mean()
        if not usual.isfinite():
            raise NormError("calibration met activations that are not finite, and so have no average deviation")
        massive = deviation[deviation >= boundary].mean() if boundary.isfinite() else usual
        self.calibration = torch.stack([usual, massive, boundary])

    def freeze(self, first: Tensor, usual: Tensor) -> None:
        """Take these averages as the constants.

        Args:
            first: the deviation of the first position. It has a constant of its own if it is massive.
            usual: the deviation of all others.
        """
        boundary = torch.sqrt(first * usual) if first > MASSIVE * usual else first.new_tensor(float("inf"))
        self.calibration = torch.stack([usual, first if boundary.isfinite() else usual, boundary])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.calibration is None and f"{prefix}calibration" in state_dict:
            self.calibration = torch.empty_like(state_dict[f"{prefix}calibration"], device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
