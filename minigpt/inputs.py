"""Checks of a model and of the ids, masks and caches that it reads, before anything is computed.

A bad token id would end a CUDA context, and a mask or a cache of another shape would give wrong numbers.

B batch, T new tokens, S tokens in all: those in the cache, then the new ones.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.config import GPT2Config
from minigpt.device import has_values
from minigpt.errors import ConfigError, GenerationError, MiniGPTError, kind_of


class Cache(Protocol):
    """The attributes of a ``minigpt.model.KVCache`` that a check reads."""

    store: Tensor  # (L, 2, B, H, max_length, D)
    length: int
    padding_mask: Tensor | None  # (B, length)


def check_inputs(
    config: GPT2Config,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
) -> None:
    """Check the arguments of a forward.

    Raises:
        GenerationError: if an argument has another shape, an id or a position is out of range, or there is no room.
    """
    _check_some_ids(input_ids)
    batch, seq = input_ids.shape
    past = 0
    if cache is not None:
        check_cache(config, cache, batch, seq)
        past = cache.length
    is_cheap = past == 0 or input_ids.is_cpu  # later ids are the model's own: do not wait for a GPU to say them
    if is_cheap and has_values(input_ids):
        check_known(input_ids, config.vocab_size)
    if attention_mask is not None:
        check_mask(attention_mask, batch, past + seq)
    if position_ids is not None:
        check_positions(position_ids, batch, seq, config.n_positions)
    else:
        check_context(attention_mask, cache, past + seq, seq, config.n_positions)


def check_rows(input_ids: Int[Tensor, "batch seq"], vocab_size: int, context: int) -> None:
    """Check rows of ids that a model of this vocabulary and context reads at once.

    Raises:
        GenerationError: if there are none, an id is outside the vocabulary, or a row is longer than the context.
    """
    _check_some_ids(input_ids)
    check_known(input_ids, vocab_size)
    seq = input_ids.shape[1]
    check_context(None, None, seq, seq, context)


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
    wrong = _outside(input_ids, vocab_size)
    if wrong is not None:
        raise GenerationError(f"token id {wrong} is outside the vocabulary of {vocab_size}")


def check_mask(attention_mask: Tensor, batch: int, total: int) -> None:
    """Check that a mask covers ``total`` tokens of every row, with ones and zeros."""
    if not isinstance(attention_mask, Tensor):
        raise GenerationError(f"attention_mask must be a tensor (batch, seq), got {type(attention_mask).__name__}")
    shape = tuple(attention_mask.shape)
    if shape != (batch, total):
        raise GenerationError(
            f"attention_mask must have shape {(batch, total)}, the tokens in the cache included, got {shape}"
        )
    if not has_values(attention_mask):
        return
    as_bits = attention_mask.bool().to(attention_mask.dtype)
    if not torch.equal(as_bits, attention_mask):
        raise GenerationError("attention_mask must hold 1 for real tokens and 0 for padding only")


def check_positions(position_ids: Int[Tensor, "rows seq"], batch: int, seq: int, context: int) -> None:
    """Check that positions have shape (B or 1, T) and are inside the context."""
    check_ids("position_ids", position_ids)
    shape = tuple(position_ids.shape)
    if shape not in ((batch, seq), (1, seq)):
        raise GenerationError(f"position_ids must have shape {(batch, seq)} or {(1, seq)}, got {shape}")
    if not has_values(position_ids):
        return
    wrong = _outside(position_ids, context)
    if wrong is not None:
        raise GenerationError(f"position {wrong} is outside the model's context of {context}")


def check_context(attention_mask: Tensor | None, cache: Cache | None, total: int, seq: int, context: int) -> None:
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


def check_cache(config: GPT2Config, cache: Cache, batch: int, seq: int) -> None:
    """Check that a cache fits the model's shape, and that ``seq`` more tokens fit the cache."""
    expected = (config.n_layer, 2, batch, config.n_head, config.head_size)
    got: tuple[int, ...] | str = type(cache).__name__
    columns = 0
    if isinstance(getattr(cache, "store", None), Tensor):
        *shape, columns, head_size = cache.store.shape
        got = (*shape, head_size)  # (L, 2, B, H, D)
    if got != expected:
        raise GenerationError(
            "cache must be this model's new_cache of input_ids' batch size: layers, 2, batch, heads and width must be "
            f"{expected}, got {got}"
        )
    if cache.length + seq > columns:
        raise GenerationError(f"the cache holds {cache.length} tokens of at most {columns}; {seq} more do not fit")


def _outside(ids: Tensor, end: int) -> int | None:
    """Return an id that is not in [0, end), or None."""
    low, high = ids.aminmax()
    if low < 0:
        return int(low)
    if high >= end:
        return int(high)
    return None


def check_config(config: object) -> None:
    """Check that a network's shape is a minigpt.GPT2Config: transformers' has the same name."""
    if not isinstance(config, GPT2Config):
        kind = kind_of(config)
        raise ConfigError(f"config must be a minigpt.GPT2Config, got {kind}; use its preset or from_dict")


def check_gpt2(model: object) -> None:
    """Check that a model is a minigpt.GPT2, or a wrapper that passes on its attributes."""
    if not (isinstance(getattr(model, "config", None), GPT2Config) and hasattr(model, "site_names")):
        raise ConfigError(f"model must be a minigpt.GPT2, got {kind_of(model)}; minigpt.from_pretrained opens one")


def check_weights(model: Any, purpose: str, kind: type[MiniGPTError]) -> None:
    """Check that a GPT2 has values: one on the meta device has shapes only."""
    if model.wte.weight.is_meta:
        raise kind(f"a model on the meta device has shapes only, and no values to {purpose}")


def check_layers(blocks: nn.ModuleList, n_layer: int) -> None:
    """Check that each block writes to a layer of the cache of its own. Blocks may have been copied or removed.

    Raises:
        GenerationError: if two blocks would write to the same layer, or one to a layer that the cache does not have.
    """
    layers: list[int] = []
    for block in blocks:
        numbers = {getattr(part, "layer", None) for part in block.modules()}
        layers += [layer for layer in numbers if isinstance(layer, int)]
    different = set(layers)
    if len(different) < len(layers) or not different <= set(range(n_layer)):
        raise GenerationError(
            f"each block's attn.layer must be one of {n_layer} layers and its own, got {layers}; renumber copied blocks"
        )


def left_padded(
    texts: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Return token ids (B, T), padded on the left, and their attention mask (B, T): 0 for padding."""
    longest = max(map(len, texts))
    rows = []
    mask = torch.ones(len(texts), longest, dtype=torch.long, device=device)
    for row, text in enumerate(texts):
        padding = longest - len(text)
        rows.append([0] * padding + list(text))
        mask[row, :padding] = 0
    return torch.tensor(rows, device=device), mask


def refuse_pipeline(model: object) -> bool:
    """Raise the error of a model that a pipeline of transformers is given: ``can_generate`` is what it asks first.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "a minigpt.GPT2 is no model of transformers; minigpt.hf.GPT2LMHeadModel.from_pretrained(SOURCE) opens the same "
        "checkpoint for transformers' tools, and takes norm= too"
    )
