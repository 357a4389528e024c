"""The affine product of a few tokens: what decoding spends its time on, and which call of the library does it best.

B batch, T new tokens. With few rows in ``x`` the time is that of reading the weights once, if the call lets it be.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

FEW = range(7, 33)  # how many rows are better put second, the weights first, where the library blocks them


def product(
    x: Float[Tensor, "batch seq inp"], rows: Float[Tensor, "out inp"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "batch seq out"]:
    """``x rows^T + bias``, with ``rows`` contiguous: ``F.linear`` by the fastest of its equals."""
    count = x.numel() // x.shape[-1]  # B * T
    if not x.is_cpu or count not in (1, *FEW):
        return F.linear(x, rows, bias)
    if count == 1:
        vector = x.reshape(-1)  # (in)
        y = torch.mv(rows, vector) if bias is None else torch.addmv(bias, rows, vector)  # (out)
    else:
        columns = x.reshape(count, -1).t().contiguous()  # (in, B * T)
        y = torch.mm(rows, columns) if bias is None else torch.addmm(bias[:, None], rows, columns)  # (out, B * T)
        y = y.t()
    return y.reshape(*x.shape[:-1], -1)  # (B, T, out)
