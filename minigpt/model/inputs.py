"""What a forward refuses at its border, in one sentence, before anything is computed.

A bad token id would end a CUDA context, and a mask or a cache of another shape would give wrong numbers.

B batch, T new tokens, S tokens in all: those in the cache, then the new ones.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.device import has_values
from minigpt.errors import GenerationError
from minigpt.model.cache import KVCache


def check_inputs(
    config: GPT2Config,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: KVCache | None,
) -> None:
    """Check the arguments of a forward.

    Raises:
        GenerationError: if an argument has another shape, an id or a position is out of range, or there is no room.
    """
    _check_some_ids(input_ids)
    batch, seq = input_ids.shape
    if cache is not None:
        check_cache(config, cache, batch, seq)
    past = 0 if cache is None else cache.length
    if (past == 0 or input_ids.is_cpu) and has_values(input_ids):  # later ids are the model's own: do not wait for them
        check_known(input_ids, config.vocab_size)
    if attention_mask is not None:
        check_mask(attention_mask, batch, past + seq)
    if position_ids is None:
        check_context(attention_mask, cache, past + seq, seq, config.n_positions)
    else:
        check_positions(position_ids, batch, seq, config.n_positions)


def check_rows(input_ids: Int[Tensor, "batch seq"], vocab_size: int, context: int) -> None:
    """Check rows of ids that a model of this vocabulary and context reads at once.

    Raises:
        GenerationError: if there are none, an id is outside the vocabulary, or a row is longer than the context.
    """
    _check_some_ids(input_ids)
    check_known(input_ids, vocab_size)
    check_context(None, None, input_ids.shape[1], input_ids.shape[1], context)


def _check_some_ids(input_ids: Tensor) -> None:
    check_ids("input_ids", input_ids)
    if not input_ids.numel():
        raise GenerationError(f"input_ids is empty: its shape is {tuple(input_ids.shape)}")


def check_ids(name: str, ids: Tensor) -> None:
    """Check that ``ids`` are rows of ids: (B, T), int64 or int32, as an embedding takes them."""
    if not isinstance(ids, Tensor):
        kind = type(ids).__name__
        raise GenerationError(f"{name} must be a tensor of token ids (batch, seq), got {kind}; use torch.tensor([ids])")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise GenerationError(
            f"{name} must be int64 or int32 of shape (batch, seq), got {ids.dtype} of shape {tuple(ids.shape)}"
        )


def check_known(input_ids: Int[Tensor, "batch seq"], vocab_size: int) -> None:
    """Check that every id is in the vocabulary."""
    if (wrong := _outside(input_ids, vocab_size)) is not None:
        raise GenerationError(f"token id {wrong} is outside the vocabulary of {vocab_size}")


def check_mask(attention_mask: Tensor, batch: int, total: int) -> None:
    """Check that a mask covers ``total`` tokens of every row, with ones and zeros."""
    if not isinstance(attention_mask, Tensor):
        raise GenerationError(f"attention_mask must be a tensor (batch, seq), got {type(attention_mask).__name__}")
    if attention_mask.shape != (batch, total):
        raise GenerationError(
            f"attention_mask must have shape {(batch, total)}, the tokens in the cache included, "
            f"got {tuple(attention_mask.shape)}"
        )
    if has_values(attention_mask) and not torch.equal(attention_mask.bool().to(attention_mask.dtype), attention_mask):
        raise GenerationError("attention_mask must hold 1 for real tokens and 0 for padding only")


def check_positions(position_ids: Int[Tensor, "rows seq"], batch: int, seq: int, context: int) -> None:
    """Check that positions have shape (B or 1, T) and are inside the context."""
    check_ids("position_ids", position_ids)
    if position_ids.shape not in ((batch, seq), (1, seq)):
        shape = tuple(position_ids.shape)
        raise GenerationError(f"position_ids must have shape {(batch, seq)} or {(1, seq)}, got {shape}")
    if has_values(position_ids) and (wrong := _outside(position_ids, context)) is not None:
        raise GenerationError(f"position {wrong} is outside the model's context of {context}")


def check_context(attention_mask: Tensor | None, cache: KVCache | None, total: int, seq: int, context: int) -> None:
    """Check that the longest row fits the context. Padding takes no position."""
    if total <= context:
        return
    longest = total
    if attention_mask is not None:
        if not has_values(attention_mask):
            return
        longest = int(attention_mask.bool().sum(-1).max())
    elif cache is not None and cache.padding_mask is not None:
        longest = int(cache.padding_mask[:, : cache.length].sum(-1).max()) + seq
    if longest > context:
        raise GenerationError(f"{longest} tokens do not fit the model's context of {context}")


def check_cache(config: GPT2Config, cache: KVCache, batch: int, seq: int) -> None:
    """Check that a cache fits the model's shape, and that ``seq`` more tokens fit the cache."""
    expected = (config.n_layer, 2, batch, config.n_head, config.head_size)
    shape = tuple(cache.store.select(4, 0).shape) if isinstance(cache, KVCache) else type(cache).__name__
    if shape != expected:  # (L, 2, B, H, D)
        raise GenerationError(
            "cache must be this model's new_cache of input_ids' batch size: layers, 2, batch, heads and width must be "
            f"{expected}, got {shape}"
        )
    if cache.length + seq > cache.max_length:
        raise GenerationError(
            f"the cache holds {cache.length} tokens of at most {cache.max_length}; {seq} more do not fit"
        )


def _outside(ids: Tensor, end: int) -> int | None:
    """Return an id that is not in [0, end), or None."""
    low, high = (int(bound) for bound in ids.aminmax())
    return low if low < 0 else high if high >= end else None
