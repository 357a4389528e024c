"""Foreign names and layouts -> ours. A Hugging Face file needs no more than a prefix removed."""

import re

import torch
from torch import Tensor

from minigpt.checkpoint.formats import Format, recognise
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, listing

PREFIX = "transformer."  # of a GPT2LMHeadModel's file; a GPT2Model's has none

_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod)\.)*(?:transformer\.)?")  # of DataParallel, of torch.compile
_OTHER_HEADS = re.compile(r"(score|classifier|qa_outputs|multiple_choice_head|v_head)\..*")


def translate(tensors: dict[str, Tensor], config: GPT2Config, *, ignore_heads: bool = False) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names and in our layout, without those that are no parameters.

    Args:
        tensors: as they are named in the file.
        config: of the model they are for.
        ignore_heads: leave out the heads of classifiers and their like; otherwise they are refused.

    Raises:
        CheckpointError: two tensors would get one name, there is another head, or a head that the config ties differs
            from the embedding.
    """
    plain = without_wrappers(tensors)
    return as_ours(plain, recognise(plain), config, ignore_heads=ignore_heads)


def as_ours(
    tensors: dict[str, Tensor],
    form: Format,
    config: GPT2Config,
    *,
    has_biases: bool | None = None,
    ignore_heads: bool = False,
) -> dict[str, Tensor]:
    """``translate`` for tensors whose wrappers are off and whose family is known; ``has_biases`` as ``Format.ours``."""
    ours = form.ours(_without_other_heads(tensors, ignore_heads), config.n_layer, has_biases=has_biases)
    return _with_tied_head(ours) if config.tie_word_embeddings else ours


def without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without what a wrapper around the network has put before their names.

    Raises:
        CheckpointError: two would then have one name.
    """
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bare = _WRAPPERS.sub("", name, count=1)
        if bare in plain:
            raise CheckpointError(f"{bare} is in the file twice, with and without the prefix {PREFIX!r}")
        plain[bare] = tensor
    return plain


def _without_other_heads(tensors: dict[str, Tensor], ignore: bool) -> dict[str, Tensor]:
    heads = [name for name in tensors if _OTHER_HEADS.fullmatch(name)]
    if heads and not ignore:
        raise CheckpointError(
            f"the checkpoint has another head, {listing(heads)}, which a GPT-2 that writes text has not; "
            "ignore_heads=True leaves it out (minigpt convert --ignore-heads)"
        )
    return {name: tensor for name, tensor in tensors.items() if name not in heads}


def _with_tied_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("wte.weight")
    if head is not None and embedding is not None and not _same_values(head, embedding):
        raise CheckpointError(
            "lm_head.weight differs from wte.weight though the config ties them; "
            'a whole config.json with "tie_word_embeddings": false beside it uses both'
        )
    return tensors


def _same_values(head: Tensor, embedding: Tensor) -> bool:
    # One tensor under two names has them, NaN and all.
    is_one = (head.data_ptr(), head.shape, head.stride()) == (embedding.data_ptr(), embedding.shape, embedding.stride())
    return head.dtype == embedding.dtype and (is_one or torch.equal(head, embedding))
