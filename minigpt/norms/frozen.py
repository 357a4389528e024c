"""LayerNorm that divides by a constant, a step between a norm and none, and the way from one to the other."""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm, RowShape, Vectors
from minigpt.norms.variants import require_share


class _Reading(threading.local):  # each thread reads with its own model
    position_ids: Tensor | None = None


_READING = _Reading()


class AtPositions:
    """Lets norms know the positions of the rows that they get inside a ``with`` block.

    Args:
        position_ids: (B, T) or (1, T).
    """

    def __init__(self, position_ids: Int[Tensor, "rows seq"]) -> None:
        self.position_ids = position_ids
        self.outer: Tensor | None = None

    def __enter__(self) -> None:
        self.outer = _READING.position_ids
        _READING.position_ids = self.position_ids

    def __exit__(self, *error: object) -> None:
        _READING.position_ids = self.outer


@register("frozen", exact=False)
class FrozenLayerNorm(LayerNorm):
    """Divides by an average deviation, collected from calibration text (Heimersheim 2024, arXiv 2409.13710).

    ``y = (x - mean) / deviation * weight + bias`` is linear in x, so it is a matrix.

    In a trained GPT-2 the first position has massive activations. Their deviation is many times that of the others, so
    position 0 has a constant of its own, as in the papers (arXiv 2507.02559, section 2).

    The norms of queries and keys get a row for each head, in an order that the model decides. There all rows have one
    constant.

    A norm does not know the positions of its rows. A model of this package says them by ``AtPositions``, and one of
    transformers by ``tell_positions``. By default the rows of each text begin at position 0.

    Buffer ``calibration``: (usual deviation, deviation of position 0), or None until ``calibrate``.

    Attributes:
        is_first: which rows of the input (B or 1, T) are at position 0 where no ``AtPositions`` says it, or None for
            the first of each text.

    Raises:
        NormError: in forward, if it has not been calibrated.
    """

    calibration: Float[Tensor, "2"] | None
    is_first: Bool[Tensor, "rows seq"] | None = None

    def __init__(self, normalized_shape: RowShape, eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias)
        self.register_buffer("calibration", None)

    def standardize(self, x: Vectors) -> Vectors:
        """Return the row at mean 0, divided by the average deviation of its position."""
        if self.calibration is None:
            raise NormError(
                "this frozen norm has no deviation to divide by yet; collect it from text by "
                "minigpt.fit_norms(model, input_ids) or --fit FILE"
            )
        deviation = self._deviation_at(x, self.calibration.to(x.dtype))
        return (x - x.mean(dim=self.row_dims, keepdim=True)) / deviation

    def _deviation_at(self, x: Vectors, calibration: Float[Tensor, "2"]) -> Float[Tensor, "*rows"]:
        """Return what each row of ``x`` is divided by: the constant of its position."""
        usual, first = calibration
        rows = x.shape[: x.ndim - len(self.normalized_shape)]  # (B, T), or (B, T, H) of heads
        deviation = torch.where(self._is_first(rows, x.device), first, usual)
        return deviation[(..., *[None] * len(self.normalized_shape))]

    def _is_first(self, rows: torch.Size, device: torch.device) -> Bool[Tensor, "*rows"]:
        """Return which of the rows are at position 0, by the positions that the model says if these are its rows."""
        if len(rows) > 2:  # of heads
            return torch.tensor(False, device=device)
        if not rows:
            return torch.tensor(True, device=device)
        position_ids = _READING.position_ids  # None if no model says them
        is_first = self.is_first if position_ids is None else position_ids == 0
        if is_first is None or is_first.shape[-1:] != rows[-1:]:
            return torch.arange(rows[-1], device=device) == 0
        return is_first

    @property
    def is_ready(self) -> bool:
        """True if the norm can run: it has its constants, or needs none."""
        return self.calibration is not None

    def deviation(self, x: Vectors) -> Float[Tensor, "*rows"]:
        """Return sqrt(var + eps) of each row of ``x``, (..., 1)."""
        return torch.sqrt(x.var(dim=self.row_dims, correction=0, keepdim=True) + self.eps)

    def calibrate(self, x: Float[Tensor, "batch seq *row"]) -> None:
        """Take the constants from this norm's inputs (B, T, ...) in a model, position 0 first: mean deviations.

        Raises:
            NormError: if there are fewer than two positions, or values that are not finite.
        """
        if x.shape[1] < 2:
            raise NormError(f"calibration needs texts of two tokens or more, got {x.shape[1]}")
        deviation = self.deviation(x.detach().to(torch.promote_types(x.dtype, torch.float32)))  # (B, T, ...)
        first, usual = deviation[:, 0].mean(), deviation[:, 1:].mean()
        if x.ndim - len(self.normalized_shape) > 2:  # of heads
            first = usual = deviation.mean()
        if not (first.isfinite() and usual.isfinite()):
            raise NormError("calibration needs activations that are finite; some are NaN or infinite")
        self.freeze(first, usual)

    def freeze(self, first: Tensor, usual: Tensor) -> None:
        """Take these averages as the constants: the deviation of the first position, and that of all others."""
        self.calibration = torch.stack([usual, first])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.get(f"{prefix}calibration")
        if saved is not None:
            saved = state_dict[f"{prefix}calibration"] = as_calibration(saved)
        if self.calibration is None and saved is not None:
            self.calibration = torch.empty(2, dtype=self.weight.dtype, device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def as_calibration(saved: Tensor) -> Float[Tensor, "2"]:
    """Return the constants of a frozen norm as they were saved, also by an earlier version if all rows had one.

    Raises:
        NormError: if they were chosen by another rule.
    """
    if saved.shape == (3,) and saved[2].isinf():
        return saved[:2].clone()
    if saved.shape != (2,):
        raise NormError(
            f"calibration must have shape (2,), got {tuple(saved.shape)}: an earlier version chose the constant by "
            "another rule; fit the frozen norms anew"
        )
    return saved


def needs_text(norm: object) -> bool:
    """Return True for a norm that takes constants from a text before it can run."""
    return isinstance(norm, FrozenLayerNorm) and not norm.is_ready


def tell_positions(norms: Iterable[nn.Module], position_ids: Int[Tensor, "rows seq"] | None) -> None:
    """Tell frozen norms where the rows that they get next are in their texts; None if each text begins with them."""
    is_first = None
    if position_ids is not None:
        is_first = position_ids == 0
    for norm in norms:
        if isinstance(norm, FrozenLayerNorm):
            norm.is_first = is_first


@register("taper", exact=False, parameter="gate")
class TaperedLayerNorm(FrozenLayerNorm):
    """Goes from LayerNorm to a frozen norm, ``y = gate * LayerNorm(x) + (1 - gate) * Frozen(x)`` (arXiv 2602.10408).

    At a gate of 1 it is LayerNorm and needs no calibration; at 0 it is linear in x. "taper:0.25" sets the gate. A
    training loop may lower the attribute ``gate`` between steps, as the paper does.

    Args:
        gate: the share of LayerNorm, from 0 to 1.
    """

    def __init__(self, normalized_shape: RowShape, eps: float = 1e-5, *, bias: bool = True, gate: float = 0.5) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias)
        self.gate = require_share(gate, "gate")

    @property
    def is_ready(self) -> bool:
        """True if the norm can run: a gate of 1 needs no constants."""
        return self.gate == 1 or super().is_ready

    def standardize(self, x: Vectors) -> Vectors:
        """Return the mixture of the row at variance 1 and the row over a constant, both at mean 0."""
        standard = LayerNorm.standardize(self, x)
        return standard if self.gate == 1 else torch.lerp(super().standardize(x), standard, self.gate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate={self.gate}"
