"""The gradient of the loss of some texts, for every Parameter and the embedded input.

T tokens, V vocabulary, C embedding.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.errors import GenerationError
from minigpt.host import hooked, uncompiled
from minigpt.report.fields import GradientError, noise_ratio

EMBEDDED = "inputs_embeds"  # what transformers calls the embedded tokens, before their positions are added


def gradients_of(
    model: nn.Module, texts: Sequence[Int[Tensor, "1 seq"]], embedding: str, prefix: str = ""
) -> dict[str, Tensor]:
    """Return the gradient of the mean loss of all tokens of the texts, by Parameter.

    ``inputs_embeds`` is the embedded input, (tokens of all texts, C). The model's own gradients are left as they are.

    Args:
        model: computes logits of ids, or an object with ``logits``.
        embedding: the path of the token embedding, behind ``prefix``.
        prefix: what its Parameters' names begin with, beside the checkpoint's.

    Raises:
        GenerationError: if no text has two tokens.
    """
    parameters = {
        uncompiled(name): parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()
    }
    texts = [ids for ids in texts if ids.shape[1] > 1]
    if not texts:
        raise GenerationError("gradients need a loss, but no text has two tokens")
    tokens, embedded = sum(ids.shape[1] - 1 for ids in texts), []
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    were_trained = {name: parameter.requires_grad for name, parameter in parameters.items()}
    inputs: list[Any] = []
    hook = model.get_submodule(prefix + embedding).register_forward_hook(lambda _, __, output: inputs.append(output))
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad(), hooked(model):
            for ids in texts:
                inputs.clear()
                loss = _loss(model, ids) / tokens
                gradients = torch.autograd.grad(loss, [*parameters.values(), inputs[0]], allow_unused=True)
                embedded.append(gradients[-1][0])  # (T, C)
                for total, gradient in zip(sums.values(), gradients[:-1], strict=True):
                    total += 0 if gradient is None else gradient
    finally:
        hook.remove()
        for name, parameter in parameters.items():
            parameter.requires_grad_(were_trained[name])
    return {name.removeprefix(prefix): total for name, total in sums.items()} | {EMBEDDED: torch.cat(embedded)}


def _loss(model: Callable[[Tensor], Any], ids: Tensor) -> Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)[0, :-1]  # (T - 1, V)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[0, 1:], reduction="sum")


def gradient_errors(
    gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor], noise: Mapping[str, float]
) -> list[GradientError]:
    """Return the relative error of each gradient beside transformers' own at the dtype, the worst ratio first.

    The noise of a gradient is at least the median of all: of few numbers it may be small by chance.
    """
    least = statistics.median(noise.values())
    rows = []
    for name in exact.keys() & gradients.keys():
        error, floor = relative_error(gradients[name], exact[name]), max(noise[name], least)
        rows.append(GradientError(name, error, floor, noise_ratio(error, floor)))
    return sorted(rows, key=lambda row: (-row.ratio if row.ratio == row.ratio else -torch.inf, row.parameter))


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the RMS of the difference over the RMS of the truth: 0 where both are 0."""
    truth = truth.double()
    error = (value.double() - truth).square().sum()
    return float((error / truth.square().sum()).sqrt()) if error != 0 else 0.0
