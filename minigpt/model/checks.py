"""What a forward may be given. Anything else is refused in one sentence, before something is computed.

B batch, T new tokens.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.config import GPT2Config
from minigpt.errors import GenerationError
from minigpt.model.attention import CausalSelfAttention
from minigpt.model.cache import KVCache
from minigpt.placement import has_values


def require_tokens(input_ids: Int[Tensor, "batch seq"], cache: KVCache | None, config: GPT2Config) -> None:
    """Refuse what is no tokens of this model, or more than the cache has room for.

    Raises:
        GenerationError: the message says what is wrong with which.
    """
    require_ids("input_ids", input_ids)
    if not input_ids.numel():
        raise GenerationError(f"input_ids is {tuple(input_ids.shape)}: there are no tokens to read")
    if not (cache is None or isinstance(cache, KVCache)):
        raise GenerationError(f"the cache must be one of the model's new_cache, not of type {type(cache).__name__}")
    first_read = cache is None or cache.length == 0  # later ids are the model's own: spare a GPU the wait
    if cache is not None:
        cache.require_room(*input_ids.shape)
        if first_read:
            cache.require_shape(config)
    if (first_read or input_ids.is_cpu) and has_values(input_ids):
        require_known(input_ids, config.vocab_size)


def require_own_layers(blocks: Iterable[nn.Module], n_layer: int) -> None:
    """Refuse blocks that would write over one another's keys, as a block that stands twice does, or its copy.

    Raises:
        GenerationError: two of them have one layer of a cache, or one has none of its ``n_layer``.
    """
    attentions = [[part for part in block.modules() if isinstance(part, CausalSelfAttention)] for block in blocks]
    layers = [layer for block in attentions for layer in {part.layer for part in block}]
    if len({*layers}) < len(layers) or not {*layers} <= {*range(n_layer)}:
        raise GenerationError(
            f"the blocks' attn.layer are {layers}, and each needs a layer of its own among the cache's {n_layer}; "
            "number copies anew, or read without a cache (use_cache=False)"
        )


def require_ids(what: str, given: Tensor) -> None:
    """Refuse what cannot be rows of ids, by shape and dtype.

    Raises:
        GenerationError: it is not (B, T) of int64 or int32, as an embedding takes them.
    """
    if not isinstance(given, Tensor):
        said = f"{what} must be a tensor of token ids (batch, seq), not of type {type(given).__name__}"
        raise GenerationError(f"{said}; torch.tensor([ids]) makes one")
    if given.ndim != 2 or given.dtype not in (torch.int64, torch.int32):
        raise GenerationError(
            f"{what} must be whole numbers (batch, seq), int64 or int32, "
            f"not {given.dtype} of shape {tuple(given.shape)}"
        )


def require_known(input_ids: Int[Tensor, "batch seq"], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        GenerationError: the message names one.
    """
    if (wrong := _outside(input_ids, vocab_size)) is not None:
        raise GenerationError(f"token id {wrong} is outside the vocabulary of {vocab_size}")


def require_positions(position_ids: Int[Tensor, "rows seq"], batch: int, seq: int, context: int) -> None:
    """Refuse positions of another shape than (B or 1, T), or outside the context.

    Raises:
        GenerationError: the message names one.
    """
    require_ids("position_ids", position_ids)
    if position_ids.shape not in ((batch, seq), (1, seq)):
        raise GenerationError(f"position_ids is {tuple(position_ids.shape)}, but must be {(batch, seq)} or {(1, seq)}")
    if has_values(position_ids) and (wrong := _outside(position_ids, context)) is not None:
        raise GenerationError(f"position {wrong} is outside the model's context of {context}")


def require_context(position_ids: Int[Tensor, "rows seq"], total: int, is_padded: bool, context: int) -> None:
    """Refuse more tokens than the context has positions, of which padding takes none.

    Raises:
        GenerationError: the message says how many the longest row has.
    """
    if total <= context:
        return
    if is_padded and not (has_values(position_ids) or torch.compiler.is_compiling()):
        return  # while compiling it is asked: better two programs than one that reads beyond the table
    longest = int(position_ids.max()) + 1 if is_padded else total
    if longest > context:
        raise GenerationError(f"{longest} tokens are more than the {context} of the model's context")


def _outside(ids: Tensor, end: int) -> int | None:
    """One that is not in [0, end), if any."""
    low, high = (int(bound) for bound in ids.aminmax())
    return low if low < 0 else high if high >= end else None
