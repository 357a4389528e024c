"""The loop: read the prompt once (prefill), then one step a token, each row stopping on its own.

B batch, T tokens of the prompt, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.generation.processors import warp_by
from minigpt.generation.settings import GenerationSettings, parse_settings
from minigpt.generation.text import TextAssembler
from minigpt.generation.unused import without_unused_ids
from minigpt.model import GPT2
from minigpt.placement import require_values


@runtime_checkable
class TextCodec(Protocol):
    """What text generation asks of a tokenizer."""

    @property
    def end_of_text_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode_bytes(self, ids: list[int]) -> bytes: ...


def generate(
    model: GPT2,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: TextCodec | None = None,
    **settings: Any,
) -> Int[Tensor, "batch total"]:
    """The prompts and what the model adds to them: (B, T + new) token ids.

    Args:
        input_ids: (B, T) prompts, padded on the left where their lengths differ.
        attention_mask: (B, T), 0 for padding; None where there is none.
        tokenizer: needed for ``stop_strings`` only, to see the text.
        settings: those of ``GenerationSettings``: max_new_tokens (required), do_sample, temperature, top_k, top_p,
            seed, eos_token_id, pad_token_id, stop_strings. A row that has ended is filled with pad_token_id;
            generation ends when all have.

    Raises:
        GenerationError: a setting is out of range, a prompt is empty or padded on the right, an id is outside the
            vocabulary, or prompt and new tokens together exceed the context. Nothing has been computed then.
    """
    chosen = parse_settings(**settings)
    if chosen.stop_texts and tokenizer is None:
        raise GenerationError("stop_strings need the tokenizer as well, to see the text that is being written")
    new = list(decode(model, input_ids, attention_mask, chosen, tokenizer))  # each (B,)
    return torch.cat([input_ids, torch.stack(new, dim=1)], dim=1)


def stream(model: GPT2, tokenizer: TextCodec, prompt: str, **settings: Any) -> Iterator[str]:
    """What the model adds to ``prompt``, as pieces of text while they are decoded.

    Pieces are whole characters. A stop string ends the text before it and is never shown, not even in part. An empty
    prompt starts from end-of-text, as a new document does.

    Raises:
        GenerationError: as ``generate``, at the call and not at the first piece.
    """
    chosen = parse_settings(**settings)
    input_ids = torch.tensor([prompt_ids(tokenizer, prompt)], device=model.wte.weight.device)  # (1, T)
    require_fits(model, input_ids, None, chosen)
    return _pieces(model, tokenizer, input_ids, chosen)


def prompt_ids(tokenizer: TextCodec, prompt: str) -> list[int]:
    """The ids of a prompt; those of an empty one are end-of-text, from which a new document starts.

    Raises:
        GenerationError: the prompt is empty and the vocabulary has no end-of-text.
    """
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    if tokenizer.end_of_text_id is None:
        raise GenerationError("the prompt is empty, and the tokenizer has no end-of-text token to start from")
    return [tokenizer.end_of_text_id]


@torch.inference_mode()
def decode(
    model: GPT2,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None,
    settings: GenerationSettings,
    tokenizer: TextCodec | None = None,
) -> Iterator[Int[Tensor, " batch"]]:
    """The new tokens of all rows (B,), step by step, until every row has ended or max_new_tokens are made.

    Raises:
        GenerationError: as ``generate``, before the first step.
    """
    require_fits(model, input_ids, attention_mask, settings)
    batch, seq = input_ids.shape
    cache = model.new_cache(batch, seq + settings.max_new_tokens - 1)  # the last token is never read again
    draw = [_generator(settings.seed, row, input_ids.device) for row in range(batch)] if settings.samples else None
    ends = torch.tensor(settings.end_ids(model.config), device=input_ids.device)
    texts = [TextAssembler(settings.stop_texts) for _ in range(batch)] if settings.stop_texts else []
    ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)

    logits = last_logits(model, input_ids, attention_mask, cache)
    for step in range(settings.max_new_tokens):
        drawn = next_tokens(logits, settings, draw)  # (B,)
        tokens = drawn.masked_fill(ended, settings.fill_id(model.config))
        yield tokens
        ended = ended | torch.isin(tokens, ends)
        if texts and tokenizer is not None:
            ended = ended | _reached_stop(texts, tokens, ended, tokenizer)
        if step + 1 == settings.max_new_tokens or ended.all():
            return
        logits = last_logits(model, drawn[:, None], None, cache)  # what fills a row need not be in the vocabulary


def last_logits(
    model: GPT2, input_ids: Int[Tensor, "batch seq"], attention_mask: Tensor | None, cache: Any
) -> Float[Tensor, "batch vocab"]:
    """Logits after the last token alone: the head, the widest product of all, is spared the others."""
    hidden = model.hidden_states(input_ids, attention_mask, cache=cache)  # (B, T, C)
    return without_unused_ids(model.head(hidden[:, -1:])[:, 0].float(), model.config.used_vocab_size)


def next_tokens(
    logits: Float[Tensor, "batch vocab"], settings: GenerationSettings, draw: list[torch.Generator] | None
) -> Int[Tensor, " batch"]:
    """The next token of each row: the likeliest, or one drawn with the row's own generator.

    Raises:
        GenerationError: the model has computed NaN, so that no token is the likeliest.
    """
    if logits.isnan().any():
        raise GenerationError(
            "the model's logits are NaN; its weights, its norms or its dtype cannot compute this prompt"
        )
    if draw is None:
        return logits.argmax(-1)
    shifted = logits - logits.amax(-1, keepdim=True)  # the same distribution, and finite at any temperature
    probabilities = warp_by(shifted, settings).softmax(-1)  # (B, V)
    return torch.cat(
        [row.multinomial(1, generator=generator) for row, generator in zip(probabilities, draw, strict=True)]
    )


def require_fits(model: GPT2, input_ids: Tensor, attention_mask: Tensor | None, settings: GenerationSettings) -> None:
    """Refuse what could not be finished, before any work.

    Raises:
        GenerationError: a prompt is empty, padded on the right, or no rows of ids of the vocabulary, or with its new
            tokens exceeds the context.
    """
    require_values(model.wte.weight.device)
    if input_ids.ndim != 2 or input_ids.is_floating_point():
        raise GenerationError(
            f"input_ids must be whole numbers, (batch, seq), not {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if input_ids.numel() == 0:
        raise GenerationError("the prompt is empty; start from the end-of-text token")
    model.require_known(input_ids)
    prompt, context = input_ids.shape[1], model.config.n_positions
    if attention_mask is not None:
        if attention_mask.shape == input_ids.shape and not attention_mask[:, -1].all():
            raise GenerationError(
                "a prompt ends in padding; pad on the left, so that its last token is its last column"
            )
        prompt = int(attention_mask.bool().sum(-1).max())
    if prompt >= context:
        raise GenerationError(
            f"the prompt is {prompt} tokens, and the model's context of {context} leaves no room for more"
        )
    if prompt + settings.max_new_tokens > context:
        raise GenerationError(
            f"a prompt of {prompt} tokens and {settings.max_new_tokens} new ones "
            f"exceed the model's context of {context}; ask for at most {context - prompt}"
        )


def _pieces(model: GPT2, tokenizer: TextCodec, input_ids: Tensor, settings: GenerationSettings) -> Iterator[str]:
    text, ends = TextAssembler(settings.stop_texts), settings.end_ids(model.config)
    for tokens in decode(model, input_ids, None, settings):
        if int(tokens) in ends:
            break
        if piece := text.add(tokenizer.decode_bytes([int(tokens)])):
            yield piece
        if text.stopped:
            return
    if piece := text.add(b"", final=True):
        yield piece


def _reached_stop(texts: list[TextAssembler], tokens: Tensor, ended: Tensor, tokenizer: TextCodec) -> Tensor:
    for text, token, over in zip(texts, tokens.tolist(), ended.tolist(), strict=True):
        if not over:
            text.add(tokenizer.decode_bytes([token]))
    return torch.tensor([text.stopped for text in texts], device=tokens.device)


def _generator(seed: int | None, row: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed + row)
    return generator
