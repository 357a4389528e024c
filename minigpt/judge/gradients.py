"""The gradient of the loss of the texts, for every Parameter and the embedded input.

T tokens, V vocabulary, C embedding.
"""

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.errors import GenerationError
from minigpt.judge.measures import Distance, over_noise
from minigpt.report.parity_report import Fields

if TYPE_CHECKING:
    from minigpt.judge.original import Original

EMBEDDED = "inputs_embeds"  # what transformers calls the embedded tokens, before their positions are added


def gradients_of(model: nn.Module, original: "Original", prefix: str = "") -> dict[str, Tensor]:
    """Return the gradient of the mean loss of all tokens of the original's texts, by Parameter.

    ``inputs_embeds`` is the embedded input, (tokens of all texts, C).

    Args:
        model: a function of ids to logits, or to an object with ``logits``; its own gradients are left as they are.
        prefix: what its Parameters' names begin with, beside the checkpoint's.

    Raises:
        GenerationError: if no text has two tokens.
    """
    parameters = {name: own for name, own in model.named_parameters() if own.is_floating_point()}
    texts = [text.ids for text in original.texts if len(text.ids) > 1]
    if not texts:
        raise GenerationError("gradients need a loss, but no text has two tokens")
    tokens, embedded = sum(len(ids) - 1 for ids in texts), []
    sums = {name: torch.zeros_like(own) for name, own in parameters.items()}
    were_trained = {name: own.requires_grad for name, own in parameters.items()}
    inputs: list[Any] = []
    hook = model.get_submodule(f"{prefix}wte").register_forward_hook(lambda _, __, output: inputs.append(output))
    try:
        for own in parameters.values():
            own.requires_grad_(True)
        with torch.enable_grad():
            for ids in texts:
                inputs.clear()
                loss = _loss(model, original.tensor(ids)) / tokens
                found = torch.autograd.grad(loss, [*parameters.values(), inputs[0]], allow_unused=True)
                embedded.append(found[-1][0])  # (T, C)
                for total, gradient in zip(sums.values(), found[:-1], strict=True):
                    total += 0 if gradient is None else gradient
    finally:
        hook.remove()
        for name, own in parameters.items():
            own.requires_grad_(were_trained[name])
    return {name.removeprefix(prefix): total for name, total in sums.items()} | {EMBEDDED: torch.cat(embedded)}


def _loss(model: Callable[[Tensor], Any], ids: Tensor) -> Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)[0, :-1]  # (T - 1, V)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[0, 1:], reduction="sum")


def gradient_errors(gradients: dict[str, Tensor], original: "Original") -> list[Fields]:
    """Return the relative error of each gradient beside transformers' own at the dtype, the worst ratio first.

    The noise of a gradient is at least the median of all: of few numbers it may be small by chance.
    """
    least = statistics.median(original.gradient_noise.values())
    rows = []
    for name, exact in (original.gradients or {}).items():
        if name in gradients:
            error, noise = _relative(gradients[name], exact), max(original.gradient_noise[name], least)
            ratio = over_noise(error, noise, 1.0)
            rows.append(Fields(parameter=name, relative_error=error, noise=noise, ratio=ratio))
    return sorted(rows, key=lambda row: -row.ratio if row.ratio == row.ratio else -torch.inf)


def _relative(value: Tensor, truth: Tensor) -> float:
    distance = Distance()
    distance.add(value, truth)
    return distance.relative
