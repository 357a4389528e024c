"""Foreign tensor names -> ours. A Hugging Face file needs no more than this: our names and layouts are its own."""

from collections.abc import Iterable

import torch
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError

PREFIX = "transformer."  # of a GPT2LMHeadModel's file; a GPT2Model's has none


def translate(tensors: dict[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names, without those that are no parameters.

    Raises:
        CheckpointError: two tensors would get one name, or a head that the config ties differs from the embedding.
    """
    ours: dict[str, Tensor] = {}
    buffers = set(old_buffers(config))
    for name, tensor in tensors.items():
        name = name.removeprefix(PREFIX)
        if name in ours:
            raise CheckpointError(f"{name} is in the file twice, with and without the prefix {PREFIX!r}")
        if name not in buffers:
            ours[name] = tensor
    return _with_tied_head(ours) if config.tie_word_embeddings else ours


def old_buffers(config: GPT2Config) -> Iterable[str]:
    """Causal masks that early versions of transformers saved beside the weights; ours is in model/masking.py."""
    return (f"h.{i}.attn.{name}" for i in range(config.n_layer) for name in ("bias", "masked_bias"))


def _with_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("wte.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise CheckpointError(
            "lm_head.weight differs from wte.weight though the config ties them; "
            'set "tie_word_embeddings": false in config.json to use both'
        )
    return tensors
