"""Rewrite a model's weights so that its norms do less, with the same logits: fold scales and shifts, centre writers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.inputs import check_gpt2, check_weights
from minigpt.model import GPT2
from minigpt.model.mlp import Conv1D
from minigpt.norms.foreign.construct import naming
from minigpt.norms.record import record_of
from minigpt.offload import plain_copy
from minigpt.swap.sites import require_own_parameters

# C embedding, V vocabulary


@torch.no_grad()
def fold_norms(model: GPT2) -> GPT2:
    """Fold every norm's scale and shift into the next layer, in place; return ``model``, whose logits are unchanged.

    A norm returns ``s * weight + bias`` with ``s`` the standardized row, and the next layer is affine, so::

        (s * weight + bias) W + b  =  s (weight[:, None] * W) + (bias W + b)

    The only error is rounding to the model's dtype. Afterwards every ``ln_1`` and ``ln_2`` has weight 1 and bias 0.
    ``ln_f`` has weight 1: its scale is in the head, which is untied from the token embedding. A GPT-2's head has no
    bias that could take a shift, so ``ln_f`` keeps its own, divided by the scale. The folded model is still a GPT-2,
    and ``save_pretrained`` writes it. A dimension of ``ln_f`` whose scale is 0, or too small to divide the shift by,
    keeps scale and shift.

    Raises:
        ConfigError: if the model is not a GPT2.
        NormError: if a norm is not ``s * weight + bias``, the next layer is not a Conv1D, or the model is on meta.
            Also if a folded weight is too large for the dtype. Nothing is changed then.
    """
    check_gpt2(model)
    check_weights(model, "fold", NormError)
    for site, norm in model.norm_modules().items():
        require_own_parameters(site, norm)
        _require_affine(norm, site)
    layers: dict[str, str] = {}  # the one after each norm
    for i in range(model.config.n_layer):
        layers[f"h.{i}.ln_1"] = f"h.{i}.attn.c_attn"
        layers[f"h.{i}.ln_2"] = f"h.{i}.mlp.c_fc"
    _require_conv1d(model, layers.values())
    for site, layer in layers.items():
        folded = _folded(model.get_submodule(site), model.get_submodule(layer))
        _require_finite(layer, *folded)
    head = model.wte if model.config.tie_word_embeddings else model.lm_head
    _require_finite("lm_head", _folded_head(model.ln_f, head))
    for site, layer in layers.items():
        _fold_into_conv1d(model.get_submodule(site), model.get_submodule(layer))
    for norm in model.norm_modules().values():
        record_of(norm).originals.clear()  # what the folded layers fit is the present norm
    _untie(model)
    _fold_scale_into_head(model.ln_f, model.lm_head)
    return model


@torch.no_grad()
def center_writers(model: GPT2) -> GPT2:
    """Centre every layer that writes to the residual stream, in place; return ``model``, whose logits are unchanged.

    The norms are folded first. Then the token and position embeddings and both ``c_proj`` of each block lose the mean
    over their outputs, so every row of the residual stream has mean 0. LayerNorm subtracts that mean anyway. Without
    one, LayerNorm and RMSNorm are the same function (arXiv 2305.14858), and ``swap_norms(model, "rms")`` changes no
    logit beyond rounding. The centred model is still a GPT-2, with its own head, and ``save_pretrained`` writes it.

    Raises:
        ConfigError: if the model is not a GPT2.
        NormError: if a norm does not ignore the mean of its rows, as RMSNorm does not, a layer is not a Conv1D, or
            ``fold_norms`` cannot fold the model. Nothing is changed then.
    """
    check_gpt2(model)
    check_weights(model, "centre", NormError)
    for site, norm in model.norm_modules().items():
        _require_free_of_mean(norm, site, model.wte.weight)
    writers: list[str] = []
    for i in range(model.config.n_layer):
        writers += [f"h.{i}.attn.c_proj", f"h.{i}.mlp.c_proj"]
    _require_conv1d(model, writers)
    fold_norms(model)
    for name in ["wte", "wpe", *writers]:
        for written in model.get_submodule(name).parameters(recurse=False):  # (..., C)
            exact = written.double()
            written.copy_(exact - exact.mean(-1, keepdim=True))
    return model


def _require_free_of_mean(norm: nn.Module, site: str, embedding: Tensor) -> None:
    """Check that a norm returns the same when every element of a row grows by the same amount."""
    rows = _rows_of(embedding).double()
    with naming(norm):
        bare = plain_copy(norm).eval().double()
        output = bare(rows)
        moved = bare(rows + 1)
    change = (output - moved).abs().max()
    if not change <= 1e-5 * output.abs().max():  # NaN is a change too
        raise NormError(f"{site} ({type(norm).__name__}) must subtract the mean of its rows for a model to be centred")


def _require_conv1d(model: GPT2, names: Iterable[str]) -> None:
    """Check that layers hold their weights as (in, out), which others do not."""
    for name in names:
        module = model.get_submodule(name)
        if not isinstance(module, Conv1D):
            raise NormError(f"{name} must be a Conv1D, got a {type(module).__name__}")
        require_own_parameters(name, module)


def _folded(norm: Any, layer: Any) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a layer that takes what its norm standardizes."""
    shift = norm.bias.double() @ layer.weight.double()  # (C) @ (C, out)
    bias = layer.bias.double() + shift
    return norm.weight[:, None] * layer.weight, bias.to(layer.bias.dtype)


def _fold_into_conv1d(norm: Any, layer: Any) -> None:
    weight, bias = _folded(norm, layer)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    norm.weight.fill_(1)
    norm.bias.zero_()


def _untie(model: GPT2) -> None:
    """Give the head its own copy of the token embedding."""
    if not model.config.tie_word_embeddings:
        return
    model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
    tied = model.wte.weight  # (V, C)
    vocab_size, width = tied.shape
    head = nn.Linear(width, vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(tied.clone(), requires_grad=tied.requires_grad)
    model.lm_head = head.train(model.training)


def _scale_of_head(norm: Any) -> Tensor:
    """Return what of the last norm's scale goes into the head (C): 1 where the shift cannot be divided by it."""
    shift = norm.bias / norm.weight
    is_divisible = (norm.weight != 0) & shift.isfinite()
    return torch.where(is_divisible, norm.weight, 1)


def _folded_head(norm: Any, head: Any) -> Tensor:
    return head.weight * _scale_of_head(norm)  # (V, C)


def _fold_scale_into_head(norm: Any, head: nn.Linear) -> None:
    scale = _scale_of_head(norm)
    head.weight.copy_(_folded_head(norm, head))
    norm.weight.div_(scale)
    norm.bias.div_(scale)


def _require_finite(name: str, *folded: Tensor) -> None:
    if not all(tensor.isfinite().all() for tensor in folded):
        raise NormError(f"the norm before {name} does not fit into it in {folded[0].dtype}; fold in a wider dtype")


def _require_affine(norm: Any, site: str) -> None:
    """Check that a norm scales by its weight and shifts by its bias. Some multiply by 1 + weight, for example."""
    if getattr(norm, "weight", None) is None or getattr(norm, "bias", None) is None:
        raise NormError(f"{site} ({type(norm).__name__}) must have a weight and a bias to fold")
    bare = plain_copy(norm).eval()
    rows = _rows_of(norm.weight)
    whole = bare(rows).double()  # (8, C)
    bare.weight.fill_(1)
    bare.bias.zero_()
    standard = bare(rows).double()
    shift = norm.bias.double()
    scaled = standard * norm.weight.double()
    error = (whole - (scaled + shift)).abs()
    rounding = 8 * torch.finfo(rows.dtype).eps * (scaled.abs() + shift.abs())
    if not (error <= rounding).all():
        raise NormError(f"{site} ({type(norm).__name__}) must scale by its weight and shift by its bias to fold")


def _rows_of(like: Tensor) -> Tensor:
    """Return eight random rows (8, C) to try a norm on."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(8, like.shape[-1], generator=generator, dtype=torch.float32, device="cpu")
    return rows.to(like)
