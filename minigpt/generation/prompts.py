"""Checks of a prompt before anything is computed, and its token ids."""

import logging

from torch import Tensor

from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.generation.row import TextCodec
from minigpt.generation.settings import GenerationSettings
from minigpt.model.checks import check_gpt2, check_ids, check_known, check_mask
from minigpt.placement import require_values


def prompt_ids(tokenizer: TextCodec, prompt: str) -> list[int]:
    """Return the ids of a prompt; for an empty one end-of-text, which starts a new document.

    Raises:
        GenerationError: if the prompt is empty and the vocabulary has no end-of-text, or the tokenizer is not a
            minigpt.Tokenizer.
    """
    require_codec(tokenizer)
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    end = getattr(tokenizer, "end_of_text_id", None)
    if end is None:
        raise GenerationError("the prompt is empty, and the tokenizer has no end-of-text token to start from")
    return [end]


def require_codec(tokenizer: object) -> None:
    """Check that a tokenizer has the methods of minigpt.Tokenizer; those of transformers cannot return a token's bytes.

    Raises:
        GenerationError: if it does not.
    """
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode_bytes")):
        raise GenerationError(f"the tokenizer is a {type(tokenizer).__name__}; use minigpt.Tokenizer.from_pretrained")


def require_fits(model: GPT2, input_ids: Tensor, attention_mask: Tensor | None, settings: GenerationSettings) -> None:
    """Check a batch of prompts against the model and the settings.

    Raises:
        ConfigError: if the model is not a GPT2, or it or the prompt has no values.
        GenerationError: if a prompt is empty, padded on the right, has ids outside the vocabulary, or exceeds the
            context together with its new tokens.
    """
    require_writer(model, settings)
    check_ids("input_ids", input_ids)
    for given in (input_ids, attention_mask):
        if isinstance(given, Tensor):
            require_values(given.device)
    if input_ids.numel() == 0:
        raise GenerationError("the prompt is empty; start from the end-of-text token")
    check_known(input_ids, model.config.vocab_size)
    require_room(model, _longest(input_ids, attention_mask), settings.max_new_tokens, settings.overflow)


def require_writer(model: GPT2, settings: GenerationSettings) -> None:
    """Check that the model can generate, and that it knows the ids in the settings.

    Raises:
        ConfigError: if it is not a GPT2, or has no values.
        GenerationError: if an id is outside the vocabulary.
    """
    check_gpt2(model)
    require_values(model.wte.weight.device)
    settings.require_known_ids(model.config.vocab_size)


def require_room(model: GPT2, prompt: int, new: int, overflow: str) -> None:
    """Check that the context has room for the prompt's tokens and the new ones; log a warning if the window will slide.

    Raises:
        GenerationError: if there is no room and overflow is not "slide".
    """
    context = model.config.n_positions
    if prompt + new <= context:
        return
    if overflow == "slide":
        logging.getLogger("minigpt").warning(
            "the text goes beyond the model's context of %d tokens; from there on it sees only the last of them",
            context,
        )
        return
    if prompt >= context:
        raise GenerationError(
            f"the prompt is {prompt} tokens, and the model's context of {context} leaves no room for more "
            "unless overflow is slide"
        )
    raise GenerationError(
        f"a prompt of {prompt} tokens and {new} new ones "
        f"exceed the model's context of {context}; ask for at most {context - prompt}, or set overflow to slide"
    )


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the ids of each prompt."""
    if attention_mask is None:
        return input_ids.tolist()
    return [ids[real].tolist() for ids, real in zip(input_ids, attention_mask.bool().to(input_ids.device), strict=True)]


def _longest(input_ids: Tensor, attention_mask: Tensor | None) -> int:
    """Return the number of tokens of the longest prompt, without padding."""
    batch, seq = input_ids.shape
    if attention_mask is None:
        return seq
    check_mask(attention_mask, batch, seq)
    real = attention_mask.bool()  # (B, T)
    if not real[:, -1].all():
        raise GenerationError("a prompt ends in padding; pad on the left, so that its last token is its last column")
    return int(real.sum(-1).max())
