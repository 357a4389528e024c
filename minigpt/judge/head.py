"""A check for a wrong head alone: a program's logits are then a linear function of the right hidden states.

P positions, C embedding, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_COLUMNS = 512  # logits of a position that are fitted
SPARE = 1.2  # as many positions as numbers that are fitted, times this, must be there


def enough(positions: int, width: int) -> bool:
    """Return whether so many positions can tell a linear function of hidden states from noise."""
    return positions >= SPARE * (width + 1)


def left_by_a_head(hidden: Sequence[Tensor], logits: Sequence[Tensor]) -> float:
    """Return the RMS error of the head, with a bias, that fits a program's logits best.

    It is divided by the root of the share of positions that the fit leaves free, so that noise keeps its size.

    Args:
        hidden: what the right head reads of each text (T, C).
        logits: the program's, of each text (T, V).
    """
    x, y = torch.cat([*hidden]).double(), []
    for part in logits:
        step = max(1, part.shape[-1] // MOST_COLUMNS)
        y.append(part[:, ::step].double())
    targets = torch.cat(y)
    known = ~targets.isnan().any(-1)
    x, targets = x[known], targets[known]
    positions, width = x.shape
    if not enough(positions, width):
        return math.inf
    with_bias = torch.cat([x, torch.ones_like(x[:, :1])], dim=-1)  # (P, C + 1)
    basis = torch.linalg.qr(with_bias).Q
    left = targets - basis @ (basis.T @ targets)
    free = 1 - (width + 1) / positions
    return float((left.square().mean() / free).sqrt())
