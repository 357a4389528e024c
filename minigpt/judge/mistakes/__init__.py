"""The mistakes that people make in a GPT-2, a line each, and those that can be made in any language model."""

from collections.abc import Iterator
from typing import Any

from minigpt.judge.mistakes.attention import wrong_attention
from minigpt.judge.mistakes.blocks import wrong_activations, wrong_last_norms, wrong_orders, wrong_residuals
from minigpt.judge.mistakes.mistake import Mistake, Swaps
from minigpt.judge.mistakes.norms import wrong_norms
from minigpt.judge.mistakes.rounding import rounded_matrices, rounded_values, rounded_weights
from minigpt.judge.mistakes.text import unknown_logits, wrong_embeddings, wrong_ids, wrong_logits, wrong_positions
from minigpt.judge.mistakes.weights import wrong_biases, wrong_transposes
from minigpt.shape import Shape

__all__ = ["Mistake", "Swaps", "mistakes_of"]


def mistakes_of(model: Any) -> Iterator[Mistake]:
    """Yield the mistakes that can be put into a model, the most usual first.

    Args:
        model: a ``minigpt.GPT2`` in float64 and reference arithmetic; or a model of transformers, for which there are
            the mistakes that need no network of ours.
    """
    if hasattr(model, "norm_modules"):
        yield from _of_gpt2(model)
    else:
        yield from wrong_norms(model)
        yield from _of_text(Shape.of(model.config))
        yield from rounded_matrices()


def _of_gpt2(model: Any) -> Iterator[Mistake]:
    config = model.config
    yield from wrong_activations(config)
    yield from wrong_attention(config)
    yield from wrong_biases()
    yield from wrong_transposes(config)
    yield from wrong_positions()
    yield from wrong_embeddings(config)
    yield from wrong_residuals()
    yield from wrong_last_norms()
    yield from wrong_orders(config.n_layer)
    yield from wrong_norms(model)
    yield from _of_text(Shape.of(config))
    yield from rounded_weights()
    yield from rounded_values("GELU" if "gelu" in config.activation_function else "the activation")


def _of_text(shape: Shape) -> Iterator[Mistake]:
    begins = {}
    if shape.eos_token_ids:
        begins["an end-of-text token"] = shape.eos_token_ids[0]
    if shape.bos_token_id not in (None, *begins.values()):
        begins["a BOS token"] = shape.bos_token_id
    if 0 not in begins.values():
        begins["id 0"] = 0
    yield from wrong_ids(shape.vocab_size, begins)
    yield from wrong_logits(shape.n_embd)
    yield from unknown_logits()
