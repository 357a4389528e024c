"""What ``forward`` may be given, as transformers' own takes it, and whose logits are then wanted.

B batch, T new tokens, C embedding.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.model.checks import check_ids
from minigpt.model.masking import visible
from minigpt.placement import has_values

OF_LOSS = {"num_items_in_batch", "shift_labels", "ignore_index"}
OF_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def require_one_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Refuse neither and both.

    Raises:
        GenerationError: that, or the ids are not (B, T).
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise GenerationError("give either input_ids or inputs_embeds")
    if input_ids is not None:
        check_ids("input_ids", input_ids)


def is_packed(
    more: dict[str, Any], position_ids: Tensor | None, attention_mask: Tensor | None, past_key_values: Any
) -> bool:
    """Whether keywords of ``forward`` that kernels elsewhere take say that texts are packed.

    Raises:
        TypeError: the message names a keyword that is unknown.
        GenerationError: they do, and ``position_ids`` cannot keep them apart.
    """
    given = {name for name, value in more.items() if value is not None}
    if unknown := sorted(given - OF_LOSS - OF_PACKING - {"cache_position"}):
        raise TypeError(f"GPT2LMHeadModel.forward() got an unexpected keyword argument {unknown[0]!r}")
    packed = sorted(given & OF_PACKING)
    if packed and (position_ids is None or attention_mask is not None or past_key_values is not None):
        raise GenerationError(
            f"{packed[0]} says that texts are packed; give position_ids too, which keep them apart, and neither a mask "
            "nor a cache"
        )
    return bool(packed)


def packed_mask(position_ids: Int[Tensor, "rows seq"]) -> Bool[Tensor, "rows 1 seq seq"] | None:
    """Return True where a query sees a key of its own text, where a row has several texts one after the other.

    A text begins wherever a position does not follow the last. None where no row has a second text.
    """
    text = (position_ids.diff(prepend=position_ids[..., :1] - 1) != 1).cumsum(-1)  # (rows, T), its number in the row
    if has_values(text) and not text[..., -1].any():
        return None
    seen = visible(None, 0, text.shape[-1], text.device)  # (1, 1, T, T)
    return seen & (text[..., None, :, None] == text[..., None, None, :])


def kept(x: Float[Tensor, "batch seq embd"], which: int | Tensor) -> Tensor:
    """The positions of the stream whose logits are wanted: (B, kept, C), or (kept, C) of a mask (B, T)."""
    if isinstance(which, int):
        return x[:, -which:]
    if which.ndim == 2:
        return x[which] if which.dtype == torch.bool else x.take_along_dim(which[..., None], dim=1)
    return x[:, which]
