"""The gradient of the loss of some texts, for every Parameter and the embedded input.

T tokens, V vocabulary, C embedding.
"""

import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from minigpt.errors import ConfigError, GenerationError, NormError, listing
from minigpt.host import hooked, uncompiled
from minigpt.norms.foreign.locate import last_line
from minigpt.offload import is_sharded
from minigpt.report.fields import GradientError
from minigpt.report.noise import noise_ratio

EMBEDDED = "inputs_embeds"  # what transformers calls the embedded tokens, before their positions are added


def gradients_of(
    model: nn.Module, texts: Sequence[Int[Tensor, "1 seq"]], embedding: str, prefix: str = ""
) -> dict[str, Tensor]:
    """Return the gradient of the mean loss of all tokens of the texts, by Parameter.

    ``inputs_embeds`` is the embedded input, (tokens of all texts, C); it is missing if the model embeds tokens
    elsewhere. The model's own gradients are left as they are.

    Args:
        model: computes logits of ids, or an object with ``logits``.
        embedding: the path of the token embedding, behind ``prefix``.
        prefix: what its Parameters' names begin with, before the checkpoint's names.

    Raises:
        ConfigError: if Parameters are sharded, are on several devices, or have no values here.
        GenerationError: if no text has two tokens.
        NormError: if no gradient reaches the embedded input, or PyTorch cannot compute gradients of what the model
            does.
    """
    texts = [ids for ids in texts if ids.shape[1] > 1]
    if not texts:
        raise GenerationError("gradients need a loss, but no text has two tokens")
    parameters = trainable(model, texts[0].device)
    tokens, embedded = sum(ids.shape[1] - 1 for ids in texts), []
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    inputs: list[Any] = []
    hook = model.get_submodule(prefix + embedding).register_forward_hook(lambda _, __, output: inputs.append(output))
    problem = None
    try:
        with training(parameters.values()), hooked(model):
            for ids in texts:
                inputs.clear()
                loss = _loss(model, ids) / tokens
                if not loss.requires_grad:
                    problem = "the model computes its logits without gradients, as under torch.no_grad"
                    break
                watched = [*parameters.values(), *inputs[:1]]
                gradients = torch.autograd.grad(loss, watched, allow_unused=True)
                for total, gradient in zip(sums.values(), gradients, strict=False):
                    total += 0 if gradient is None else gradient
                if not inputs:
                    continue
                if gradients[-1] is None:
                    problem = "no gradient of the loss reaches the embedded input"
                    break
                embedded.append(gradients[-1][0])  # (T, C)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # tensors are of inference mode, or changed in place
        problem = last_line(error)
    finally:
        hook.remove()
    if problem is not None:
        raise NormError(
            f"the gradients cannot be compared: {problem}; a torch.no_grad, an inference mode or a detach, e.g. in a "
            "norm, is the usual cause"
        )
    of_parameters = {name.removeprefix(prefix): total for name, total in sums.items()}
    return of_parameters | ({EMBEDDED: torch.cat(embedded)} if embedded else {})


def trainable(model: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """Return the Parameters that may have a gradient, by the names that they have without ``torch.compile``.

    Raises:
        ConfigError: if one is sharded, or some are not on this device.
    """
    parameters = {}
    elsewhere = defaultdict[str, list[str]](list)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if is_sharded(parameter):
            raise ConfigError(
                f"need every Parameter in this process, and {uncompiled(name)} is sharded", argument="gradients"
            )
        parameters[uncompiled(name)] = parameter
        if parameter.device != device:
            elsewhere[str(parameter.device)].append(uncompiled(name))
    for where, names in elsewhere.items():
        place = "offloaded" if where == "meta" else f"on {where}"
        raise ConfigError(
            f"need all Parameters on {device}, and {listing(names)} of this model are {place}; load it without "
            "device_map to compare them",
            argument="gradients",
        )
    return parameters


@contextlib.contextmanager
def training(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Compute gradients for these Parameters in the block."""
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for parameter, was_trained in zip(parameters, before, strict=True):
            parameter.requires_grad_(was_trained)


def _loss(model: Callable[[Tensor], Any], ids: Tensor) -> Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)[0, :-1]  # (T - 1, V)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[0, 1:], reduction="sum")


def relative_errors(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each gradient that is known, by Parameter.

    Raises:
        ConfigError: if one has another shape than the original's, as of a weight that is stored transposed.
    """
    errors: dict[str, float] = {}
    for name, true in exact.items():
        if name not in gradients:
            continue
        gradient = gradients[name]
        if gradient.shape != true.shape:
            raise ConfigError(
                f"need Parameters of the original's shapes, and {name} has {tuple(gradient.shape)} in place of "
                f"{tuple(true.shape)}",
                argument="gradients",
            )
        errors[name] = relative_error(gradient, true)
    return errors


def largest_errors(draws: Iterable[Mapping[str, Tensor]], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest relative error of each gradient among those of several right programs, by Parameter.

    The rounding of one token moves all gradients before it, so the errors of one program are small or large together.
    A right program may be twice as far off as another one by chance.
    """
    largest: dict[str, float] = {}
    for gradients in draws:
        for name, error in relative_errors(gradients, exact).items():
            largest[name] = max(error, largest.get(name, 0.0))
    return largest


def gradient_rows(errors: Mapping[str, float], floor: Mapping[str, float]) -> list[GradientError]:
    """Return the error of each gradient, and transformers' own at the dtype, the worst ratio first.

    The noise of a gradient is at least the median of all: of few numbers it may be small by chance.
    """
    least = statistics.median(floor.values())
    rows: list[GradientError] = []
    for name, error in errors.items():
        noise = max(floor[name], least)
        rows.append(GradientError(name, error, noise, noise_ratio(error, noise)))
    return sorted(rows, key=worst_first)


def worst_first(row: GradientError) -> tuple[float, str]:
    """Return what sorts the larger ratio first, and NaN before any."""
    order = -torch.inf if math.isnan(row.ratio) else -row.ratio
    return order, row.parameter


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the RMS of the difference over the RMS of the truth: 0 where both are 0."""
    truth = truth.double()
    error = (value.double() - truth).square().sum()
    return float((error / truth.square().sum()).sqrt()) if error != 0 else 0.0
