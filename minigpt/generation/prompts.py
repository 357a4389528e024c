"""Checks of prompts before anything is computed, and their token ids."""

import logging

from torch import Tensor

from minigpt.device import require_values
from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.generation.row import TextCodec
from minigpt.generation.settings import GenerationSettings
from minigpt.model.checks import check_gpt2, check_ids, check_mask


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
        raise GenerationError(f"tokenizer must be a minigpt.Tokenizer, got {type(tokenizer).__name__}")


def without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the ids of each prompt.

    Raises:
        GenerationError: if a prompt is empty or padded on the right, or a tensor has another shape or dtype.
    """
    check_ids("input_ids", input_ids)
    if input_ids.numel() == 0:
        raise GenerationError("the prompt is empty; start from the end-of-text token")
    if attention_mask is None:
        return input_ids.tolist()
    check_mask(attention_mask, *input_ids.shape)
    mask = attention_mask.bool().to(input_ids.device)  # (B, T)
    if not mask[:, -1].all():
        raise GenerationError("a prompt ends in padding; pad on the left, so that its last token is its last column")
    return [ids[real].tolist() for ids, real in zip(input_ids, mask, strict=True)]


def require_fits(model: GPT2, prompts: list[list[int]], settings: GenerationSettings) -> None:
    """Check prompts and settings against the model; log a warning if the window will slide.

    Raises:
        ConfigError: if the model is not a GPT2, or has no values.
        GenerationError: if an id is outside the vocabulary, or there is no room and overflow is not "slide".
    """
    check_gpt2(model)
    require_values(model.wte.weight.device)
    settings.require_known_ids(model.config.vocab_size)
    vocabulary, context = model.config.vocab_size, model.config.n_positions
    if wrong := {id for ids in prompts for id in ids if not 0 <= id < vocabulary}:
        raise GenerationError(f"token id {min(wrong)} is outside the vocabulary of {vocabulary}")
    longest, new = max(map(len, prompts)), settings.max_new_tokens
    if longest + new <= context:
        return
    if settings.overflow == "slide":
        logging.getLogger("minigpt").warning(
            "the text goes beyond the model's context of %d tokens; from there on it sees only the last of them",
            context,
        )
    else:
        way_out = f"ask for at most {context - longest}" if longest < context else "give a shorter prompt"
        raise GenerationError(
            f"a prompt of {longest} tokens and {new} new ones exceed the model's context of {context}; "
            f"{way_out}, or set overflow to slide"
        )
