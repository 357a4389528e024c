"""The gradient of the loss of the texts, for every Parameter and the embedded input, and the backward of each norm.

T tokens, V vocabulary, C embedding.
"""

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
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


def backward_ratio(
    norm: nn.Module, call: Callable[[Tensor], Tensor], x: Float[Tensor, "1 seq embd"], eps: float
) -> float:
    """Return how many times the error of PyTorch's LayerNorm a norm's gradients are off: of input, scale and shift.

    All get the same input and the same random gradient of the output; the truth is float64.

    Args:
        call: computes the norm as the model does.
    """
    above = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    roles = {role: own for role in ("weight", "bias") if isinstance(own := getattr(norm, role, None), nn.Parameter)}

    def exact(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def gradients(normalize: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            y = normalize(*leaves)
        found = (
            torch.autograd.grad(y, leaves, above.to(y), allow_unused=True) if y.requires_grad else [None] * len(leaves)
        )
        return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]

    values = [x, *(own.detach() for own in roles.values())]
    normalize = exact if "weight" in roles or "bias" not in roles else lambda x, bias: exact(x, None, bias)
    true_gradients = gradients(normalize, [value.double().requires_grad_() for value in values])
    noisy = gradients(normalize, [value.clone().requires_grad_() for value in values])
    were_trained = {role: own.requires_grad for role, own in roles.items()}
    try:
        leaves = [x.clone().requires_grad_(), *(own.requires_grad_(True) for own in roles.values())]
        found = gradients(lambda x, *_: call(x), leaves)
    finally:
        for role, own in roles.items():
            own.requires_grad_(were_trained[role])
    errors = zip(found, noisy, true_gradients, strict=True)
    return max(over_noise(_relative(one, truth), _relative(noise, truth), 1.0) for one, noise, truth in errors)


def _relative(value: Tensor, truth: Tensor) -> float:
    distance = Distance()
    distance.add(value, truth)
    return distance.relative
