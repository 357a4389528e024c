"""Foreign names and layouts -> ours. A Hugging Face file only needs a prefix removed."""

import re

import torch
from torch import Tensor

from minigpt.checkpoint.formats import Format
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError

PREFIX = "transformer."  # of a GPT2LMHeadModel's file; a GPT2Model's has none

_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod)\.)*(?:transformer\.)?")  # of DataParallel, of torch.compile


def without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefixes that wrappers around the network put before their names."""
    return {_WRAPPERS.sub("", name, count=1): tensor for name, tensor in tensors.items()}


def as_ours(tensors: dict[str, Tensor], form: Format, config: GPT2Config) -> dict[str, Tensor]:
    """Return the tensors under our names and in our layout, without those that are not parameters.

    Args:
        tensors: as ``without_wrappers`` returns them.
        form: the family that they belong to.
        config: of the model that they are for.

    Raises:
        CheckpointError: if a head that the config ties differs from the embedding.
    """
    ours = form.ours(tensors, config.n_layer)
    if config.tie_word_embeddings and "wte.weight" in ours and "lm_head.weight" in ours:
        head, embedding = ours.pop("lm_head.weight"), ours["wte.weight"]
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
            raise CheckpointError(
                "lm_head.weight differs from wte.weight, but the config ties them; "
                'a config.json with "tie_word_embeddings": false beside it uses both'
            )
    return ours
