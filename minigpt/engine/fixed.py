"""One new token a row in shapes that never change: it is given all the room of a cache, and its place there as data.

So a compiler makes one program of it, and a CUDA graph one launch.

B rows, S tokens that there is room for, C embedding.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from minigpt.model.cache import FixedCache
from minigpt.model.gpt2 import GPT2
from minigpt.model.masking import additive_mask


def hiding(visible: Bool[Tensor, "rows room"], dtype: torch.dtype) -> Float[Tensor, "rows room"]:
    """What is added to scores: 0 where visible, -inf where not. A Boolean mask would be converted by every layer anew.

    A row sees its own token at least, so -inf makes no NaN, and hides the largest score of any dtype.
    """
    return additive_mask(visible, dtype, -torch.inf)


def read_fixed(model: GPT2, x: Tensor, mask: Tensor, cache: FixedCache) -> Tensor:
    """The stream (B, 1, C) of one new token a row through the whole network; ``mask`` (B or 1, S) is as ``hiding``."""
    return model.read(x, mask[:, None, None], cache)
