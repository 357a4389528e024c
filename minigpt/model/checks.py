"""What a model refuses at its border, in one sentence, before anything is computed.

A bad token id would end a CUDA context, and a mask or a cache of another shape would give wrong numbers.

B batch, T new tokens, S tokens in all: those in the cache, then the new ones.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.config import GPT2Config
from minigpt.device import has_values
from minigpt.errors import ConfigError, GenerationError, MiniGPTError

if TYPE_CHECKING:
    from minigpt.model.cache import KVCache
    from minigpt.model.gpt2 import GPT2


def check_inputs(
    config: GPT2Config,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: "KVCache | None",
) -> None:
    """Check the arguments of a forward.

    Raises:
        GenerationError: if an argument has another shape, an id or a position is out of range, or there is no room.
    """
    check_ids("input_ids", input_ids)
    if not input_ids.numel():
        raise GenerationError(f"input_ids is empty: its shape is {tuple(input_ids.shape)}")
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


def check_ids(name: str, given: Tensor) -> None:
    """Check that ``given`` is rows of ids: (B, T), int64 or int32, as an embedding takes them."""
    if not isinstance(given, Tensor):
        kind = type(given).__name__
        raise GenerationError(f"{name} must be a tensor of token ids (batch, seq), got {kind}; use torch.tensor([ids])")
    if given.ndim != 2 or given.dtype not in (torch.int64, torch.int32):
        raise GenerationError(
            f"{name} must be int64 or int32 of shape (batch, seq), got {given.dtype} of shape {tuple(given.shape)}"
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


def check_context(attention_mask: Tensor | None, cache: "KVCache | None", total: int, seq: int, context: int) -> None:
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


def check_cache(config: GPT2Config, cache: "KVCache", batch: int, seq: int) -> None:
    """Check that a cache fits the model's shape, and that ``seq`` more tokens fit the cache."""
    if not hasattr(cache, "store"):
        raise GenerationError(f"cache must be made by the model's new_cache, got {type(cache).__name__}")
    layers, _, _, *heads = cache.store.select(4, 0).shape  # (L, 2, B, H, D)
    found, wanted = (layers, *heads), (config.n_layer, config.n_head, config.head_size)
    if found != wanted:
        raise GenerationError(
            f"cache must have {wanted[0]} layers of {wanted[1]} heads of width {wanted[2]}, got {found[0]}, {found[1]} "
            f"and {found[2]}; use this model's new_cache"
        )
    if batch != cache.batch_size:
        raise GenerationError(f"input_ids must have the cache's batch size of {cache.batch_size}, got {batch}")
    if cache.length + seq > cache.max_length:
        raise GenerationError(
            f"the cache holds {cache.length} tokens of at most {cache.max_length}; {seq} more do not fit"
        )


def check_layers(blocks: Iterable[nn.Module], n_layer: int) -> None:
    """Check that every block has a layer of the cache to itself. A copied block would overwrite another's keys."""
    of_each = ({getattr(part, "layer", None) for part in block.modules()} for block in blocks)
    layers = [layer for found in of_each for layer in found if isinstance(layer, int)]
    if len({*layers}) < len(layers) or not {*layers} <= {*range(n_layer)}:
        raise GenerationError(
            f"each block's attn.layer must be one of {n_layer} layers and its own, got {layers}; renumber copied blocks"
        )


def check_config(config: GPT2Config) -> None:
    """Check that a config is ours: transformers' has the same name."""
    if not isinstance(config, GPT2Config):
        raise ConfigError(f"config must be a minigpt.GPT2Config, got {kind_of(config)}; use its preset or from_dict")


def check_option(name: str, given: str, known: tuple[str, ...]) -> None:
    """Check that ``given`` is one of the names in ``known``."""
    if given not in known:
        raise ConfigError(f"must be {' or '.join(known)}, got {given!r}", argument=name)


def check_gpt2(model: object) -> None:
    """Check that a model is a minigpt.GPT2, or a wrapper that passes on its attributes."""
    if not (isinstance(getattr(model, "config", None), GPT2Config) and hasattr(model, "norm_sites")):
        raise ConfigError(f"model must be a minigpt.GPT2, got {kind_of(model)}; use minigpt.from_pretrained")


def check_weights(model: "GPT2", purpose: str, kind: type[MiniGPTError]) -> None:
    """Check that a model has values: one on the meta device has shapes only."""
    if model.wte.weight.is_meta:
        raise kind(f"a model on the meta device has shapes only, and no values to {purpose}")


def kind_of(thing: object) -> str:
    """Return "transformers's GPT2Config" for a message: the bare name may be the same as ours."""
    return f"{type(thing).__module__.partition('.')[0]}'s {type(thing).__name__}"


def _outside(ids: Tensor, end: int) -> int | None:
    """Return an id that is not in [0, end), or None."""
    low, high = (int(bound) for bound in ids.aminmax())
    return low if low < 0 else high if high >= end else None
