"""Fit swapped norms: give them the Parameters with which they come closest to the norms that they replace.

B batch, T tokens, C embedding.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt.errors import CheckpointError, GenerationError, NormError, listing
from minigpt.files import read_text
from minigpt.host import hooked, host_of, install, unwrapped
from minigpt.inputs import check_context, check_ids, check_known
from minigpt.norms.foreign.adapt import AdaptedNorm, OnePlusNorm, inner_norm, plain_norm
from minigpt.norms.foreign.construct import naming, title
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.record import record_of
from minigpt.offload import plain_copy, require_unsharded
from minigpt.swap.sites import build_like, host_with_norms, match_sites, originals, require_own_parameters, share

LEAST_TOKENS = 64  # with fewer, two numbers a channel follow the noise
MOST_FIT_ROWS = 16  # of a text, each as long as the context
SCAN = [2.0**power for power in range(-8, 5)]  # factors that a single number is tried with
SCAN_TOKENS = 1024


class Explained(NamedTuple):
    """The share of the variance of the original norm's output that a norm explains (R squared): 1 is all of it.

    Attributes:
        before: with the Parameters that the norm had.
        after: with the fitted ones.
    """

    before: float
    after: float


class Encodes(Protocol):
    """The methods of a tokenizer that ``fit_on_text`` calls."""

    def encode(self, text: str) -> list[int]: ...


@torch.no_grad()
def fit_norms(
    model: nn.Module, input_ids: Int[Tensor, "batch seq"], sites: str | Iterable[str] = "*"
) -> dict[str, Explained]:
    """Fit the swapped norms at ``sites`` to the LayerNorms that they replace; return how well each explains its own.

    The swapped model reads the text once, in eval mode. A norm is fitted when the data reaches it, so the norms before
    it are fitted already. Its target is what the original norm returns for the same input. Scale and shift are least
    squares in closed form. Other Parameters, for example DyT's alpha, are searched for, with the best scale and shift
    at each value. ``frozen`` norms take their deviations first. A norm that already equals the original one keeps its
    Parameters.

    Norms that nobody swapped are left out of the result, if there are others.

    The checkpoint's Parameters are not changed. The fitted norm gets its own, and ``swap_norms`` restores the others.

    Args:
        input_ids: (B, T) token ids without padding; position 0 counts as a text's first.
        sites: as for ``swap_norms``.

    Raises:
        ConfigError: if the model has no norm sites.
        NormError: if a pattern matches no site, there are fewer than 64 tokens, or a norm cannot be fitted. Such a norm
            has no Parameters, all its rows are equal, its output for a token depends on other tokens, or it replaces a
            norm that is not a LayerNorm in the checkpoint itself, or the model is sharded. Nothing has been changed
            then.
        GenerationError: if an id is outside the vocabulary, or there are more tokens than the context has.
    """
    host = host_with_norms(model)
    require_unsharded(model)
    chosen = match_sites(model, sites)
    check_ids("input_ids", input_ids)
    seq = input_ids.shape[1]
    if input_ids.numel() < LEAST_TOKENS or seq < 2:
        raise NormError(
            f"the text must have at least {LEAST_TOKENS} tokens to fit norms on, in rows of 2 or more, "
            f"got {tuple(input_ids.shape)}"
        )
    check_known(input_ids, len(host.weight))
    check_context(None, None, seq, seq, host.shape.n_positions)
    present = {site: unwrapped(model.get_submodule(site)) for site in chosen}
    swapped: list[str] = []
    for site, norm in present.items():
        record = record_of(norm)
        if record.site is not None or record.trained is not None:  # it is no LayerNorm in the checkpoint itself
            swapped.append(site)
    targets: dict[str, nn.Module] = {}
    for site, norm in present.items():
        require_own_parameters(site, norm, host)
        if site in swapped or not swapped or host.site_of(norm).kind != "other":
            targets[site] = original_norm(norm, model)
    fits: dict[str, Explained] = {}
    for site, fit in fit_to(model, input_ids, targets).items():
        is_own = site not in swapped and fit.before == fit.after
        if not (swapped and is_own):
            fits[site] = fit
    return fits


@torch.no_grad()
def fit_to(
    model: nn.Module, input_ids: Int[Tensor, "batch seq"], targets: Mapping[str, nn.Module]
) -> dict[str, Explained]:
    """Fit the norms at the sites of ``targets`` to the norms that it holds. Arguments are not checked."""
    present: dict[str, nn.Module] = {}
    fittings: dict[str, Fitting] = {}
    for site, target in targets.items():
        present[site] = model.get_submodule(site)
        fittings[site] = Fitting(site, unwrapped(present[site]), target)
    modes = [(part, part.training) for part in model.modules()]
    try:
        install(model, fittings)
        model.train(False)
        with hooked(model):
            host_of(model).run(input_ids)
    finally:
        install(model, present)
        for part, mode in modes:
            part.training = mode
    fits: dict[str, Explained] = {}
    off: list[str] = []
    for site, fitting in fittings.items():
        if fitting.explained is None:
            off.append(site)
        else:
            fits[site] = fitting.explained
    if off and not fits:
        raise NormError(f"the model does not run {listing(off)}, so nothing is fitted; is its adapter off?")
    if off:
        logging.getLogger("minigpt").warning("the model does not run %s, so nothing is fitted there", listing(off))
    for fitting in fittings.values():
        if fitting.trial is not None:
            _adopt(fitting.norm, fitting.trial)
    return fits


def fit_on_text(
    model: nn.Module, tokenizer: Encodes, file: str | Path, sites: str | Iterable[str] = "*"
) -> dict[str, Explained]:
    """``fit_norms`` on the beginning of a UTF-8 text file: at most 16 rows as long as the model's context.

    Raises:
        GenerationError: if the file cannot be read.
        NormError: as ``fit_norms``.
    """
    return fit_norms(model, rows_to_fit_on(model, tokens_to_fit_on(tokenizer, file)), sites)


def tokens_to_fit_on(tokenizer: Encodes | None, file: str | Path) -> list[int]:
    """Return the tokens of a UTF-8 text file.

    Raises:
        CheckpointError: if the checkpoint has no tokenizer.
        GenerationError: if the file cannot be read.
        NormError: if it has fewer than 64 tokens.
    """
    if tokenizer is None:
        raise CheckpointError(f"{file} needs a tokenizer, and the checkpoint has none")
    ids = tokenizer.encode(read_text(Path(file), GenerationError))
    if len(ids) < LEAST_TOKENS:
        raise NormError(f"{file} must have at least {LEAST_TOKENS} tokens, got {len(ids)}")
    return ids


def rows_to_fit_on(model: nn.Module, ids: Sequence[int]) -> Int[Tensor, "batch seq"]:
    """Return the first tokens of a text as at most 16 rows, as long as the model's context or the text."""
    host = host_of(model)
    length = min(len(ids), host.shape.window)
    count = min(len(ids) // length, MOST_FIT_ROWS)
    rows = torch.tensor(ids[: count * length]).view(count, length)
    return rows.to(host.device)


class Fitting(nn.Module):
    """Takes a norm's site while the model reads the text once."""

    explained: Explained | None = None  # if it was run

    def __init__(self, site: str, norm: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.original = original
        inner = inner_norm(norm)
        if isinstance(inner, AdaptedNorm):
            inner = inner.norm
        self.title = f"{site} ({title(inner)})"
        self.trial: nn.Module | None = None  # a fitted copy of the norm, if it was fitted

    def forward(self, x: Float[Tensor, "batch seq *row"]) -> Float[Tensor, "batch seq *row"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        with naming(self.norm):
            output = self._fit(x.to(wide))
        return output.to(x.dtype)

    def _fit(self, x: Float[Tensor, "batch seq *row"]) -> Float[Tensor, "batch seq *row"]:
        """Fit a copy of the norm; return its output for ``x``."""
        trial = plain_norm(plain_copy(self.norm)).to(x.dtype)
        original = copy.deepcopy(self.original).to(x.dtype)
        if _equals(_rows(x).double().mean(0), x, 8 * torch.finfo(x.dtype).eps):
            raise NormError(f"{self.title} cannot be fitted: all rows that it is given are equal; take another text")
        target = original(x)
        if isinstance(trial, FrozenLayerNorm):
            trial.is_first = None  # of the rows that were read before
            if trial.calibration is None:
                trial.calibrate(x)
        present = trial(x)
        before = r_squared(present, target)
        if _equals(present, target, 8 * torch.finfo(x.dtype).eps):
            self.explained = Explained(before, before)  # it is the original norm
            return present
        trained = record_of(self.norm).trained
        if trained:
            raise NormError(
                f"{self.title} cannot be fitted: the checkpoint has {trained} there, and no LayerNorm to fit to"
            )
        alone = trial(x[-1:, :2].clone())  # two tokens without the others
        if not _equals(alone, present[-1:, :2], 1e-3):
            raise NormError(f"{self.title} cannot be fitted: its output depends on the batch or is not finite")
        if isinstance(trial, FrozenLayerNorm):
            trial.calibrate(x)
        _fit_parameters(trial, x, target, self.title)
        output = trial(x)
        self.explained = Explained(before, r_squared(output, target))
        self.trial = trial
        return output


def _fit_parameters(trial: nn.Module, x: Tensor, target: Tensor, name: str) -> None:
    """Give a norm the Parameters with which it comes closest to ``target``.

    Args:
        name: of the norm, in an error.

    Raises:
        NormError: if it has none.
    """
    affine = _affine_of(trial)
    if affine:
        bare = _bare(trial, x[:1])
        if not _equals(_scaled(bare, affine), trial(x[:1]), 1e-4):
            affine = {}
    others: list[nn.Parameter] = []
    for role, parameter in trial.named_parameters():
        if parameter.is_floating_point() and role not in affine:
            others.append(parameter)
    if not (affine or others):
        raise NormError(f"{name} has no Parameters to fit; keep its scale and shift")
    if others:
        _search(trial, x, target, others, affine)
    best = _least_squares(affine, _bare(trial, x), target)
    for role, value in best.items():
        affine[role].copy_(value)


def r_squared(output: Float[Tensor, "batch seq *row"], target: Float[Tensor, "batch seq *row"]) -> float:
    """Return the share of the variance of ``target`` over the tokens that ``output`` explains (R squared)."""
    unexplained = _error(output, target) / _variation(target)
    return float(1 - unexplained)


def original_norm(norm: nn.Module, model: nn.Module) -> nn.Module:
    """Return the norm that a norm of ``model`` replaces, on the checkpoint's Parameters.

    Raises:
        NormError: if that is neither a LayerNorm nor an RMSNorm, or its Parameters are not its own.
    """
    host = host_of(model)
    norm = unwrapped(norm)
    require_own_parameters(title(inner_norm(norm)), norm, host)
    kind = host.site_of(norm).kind
    if kind == "other":
        raise NormError(f"{title(norm)} replaces a norm that is neither a LayerNorm nor an RMSNorm")
    name = {"layer_norm": "fused", "rms_norm": "rms"}[kind]
    original = build_like(norm, name, host)
    return plain_norm(share(original, norm, host))


def separate(norm: nn.Module) -> None:
    """Give a norm its own scale and shift in place of the checkpoint's, which it remembers."""
    shared = record_of(norm).originals = originals(norm)
    for role, parameter in shared.items():
        if getattr(norm, role, None) is parameter:
            values = parameter.detach().clone()
            setattr(norm, role, nn.Parameter(values, requires_grad=parameter.requires_grad))


def _adopt(norm: nn.Module, trial: nn.Module) -> None:
    """Give a norm the fitted values, as its own Parameters."""
    separate(norm)
    fitted = dict(trial.named_parameters())
    adds_one = isinstance(norm, OnePlusNorm)
    for name, parameter in norm.named_parameters():
        inside = name.removeprefix("norm.") if adds_one else name
        parameter.copy_(fitted[inside])
    if adds_one:
        norm.weight.copy_(fitted["weight"] - 1)
    inner = inner_norm(norm)
    if isinstance(inner, FrozenLayerNorm) and isinstance(trial, FrozenLayerNorm) and trial.calibration is not None:
        inner.calibration = trial.calibration.to(norm.get_parameter("weight").dtype)


def _error(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squared differences, in float64."""
    return (output.double() - target.double()).square().sum()


def _rows(x: Float[Tensor, "*dims embd"]) -> Float[Tensor, "rows embd"]:
    """Return the rows of a norm's input or output: one a token, or one a token and head."""
    return x.flatten(0, -2)


def _variation(target: Tensor) -> Tensor:
    """Return the sum of squared differences from the mean row."""
    return _error(target, _rows(target).double().mean(0))


def _equals(output: Tensor, target: Tensor, relative: float) -> bool:
    energy = target.double().square().sum()
    return bool(_error(output, target) <= relative**2 * energy)


def _affine_of(trial: nn.Module) -> dict[str, nn.Parameter]:
    """Return a norm's own scale and shift, as far as it has them."""
    affine: dict[str, nn.Parameter] = {}
    for name, parameter in trial.named_parameters():
        if name in ("weight", "bias"):
            affine[name] = parameter
    return affine


def _bare(trial: nn.Module, x: Tensor) -> Tensor:
    """Return what a norm computes before its scale and shift."""
    neutral: dict[str, Tensor] = {}
    for role, parameter in _affine_of(trial).items():
        neutral[role] = torch.full_like(parameter, role == "weight")
    return torch.func.functional_call(trial, neutral, (x,))


def _scaled(bare: Tensor, affine: Mapping[str, Tensor]) -> Tensor:
    return bare * affine.get("weight", 1) + affine.get("bias", 0)


def _least_squares(affine: Mapping[str, Tensor], bare: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the scale and shift (C), of those in ``affine``, with which ``bare`` comes closest to ``target``."""
    u = _rows(bare).double()
    y = _rows(target).double()
    u_mean = y_mean = torch.zeros_like(u[0])
    if "bias" in affine:
        u_mean = u.mean(0)
        y_mean = y.mean(0)
    du = u - u_mean
    dy = y - y_mean
    scale = torch.ones_like(u_mean)
    if "weight" in affine:
        variance = du.square().sum(0)
        is_varied = variance > 1e-12 * u.square().sum(0)
        covariance = (du * dy).sum(0)
        scale = torch.where(is_varied, covariance / variance, affine["weight"].double())
    best = {"weight": scale, "bias": y_mean - scale * u_mean}
    return {role: best[role].to(bare.dtype) for role in affine}


def _scan(number: nn.Parameter, loss: Callable[[], Tensor]) -> None:
    """Multiply a single number by the factor with the smallest loss."""
    start = number.clone()
    losses: dict[float, float] = {}
    for factor in SCAN:
        number.copy_(start * factor)
        losses[factor] = float(loss().nan_to_num(torch.inf))
    best = min(losses, key=lambda factor: losses[factor])
    number.copy_(start * best)


def _search(
    trial: nn.Module, x: Tensor, target: Tensor, others: list[nn.Parameter], affine: Mapping[str, Tensor]
) -> None:
    """Move the Parameters ``others`` to where the norm, with its best scale and shift, explains most.

    Each single number is first tried with factors from 1/256 to 16, since far from its best value a tanh is flat. Then
    L-BFGS moves all. Scale and shift are eliminated (variable projection, Golub & Pereyra 1973): at their best values
    the loss does not depend on them to first order, so its gradient is that with both held.
    """

    def loss(x: Tensor, target: Tensor) -> Tensor:
        bare = _bare(trial, x) if affine else trial(x)
        with torch.no_grad():
            fitted = _least_squares(affine, bare, target)
        return (_scaled(bare, fitted) - target).square().mean()

    stride = max(1, len(_rows(x)) // SCAN_TOKENS)
    few_x = _rows(x)[::stride][None]  # (1, about 1,024, C)
    few_targets = _rows(target)[::stride][None]
    for parameter in others:
        if parameter.numel() == 1 and parameter.item() != 0:
            _scan(parameter, lambda: loss(few_x, few_targets))
    best = float("inf")
    values = [parameter.detach().clone() for parameter in others]
    per_element = float(_variation(target)) / target.numel()

    def closure() -> float:
        nonlocal best, values
        optimizer.zero_grad()
        with torch.enable_grad():
            share = loss(x, target) / per_element
        if share.requires_grad:
            share.backward()
        error = share.item()
        if error < best:
            best = error
            values = [parameter.detach().clone() for parameter in others]
        return error

    for parameter in trial.parameters():
        parameter.requires_grad_(False)
    for parameter in others:
        parameter.requires_grad_(True)
    optimizer = torch.optim.LBFGS(others, max_iter=20, tolerance_change=1e-7, line_search_fn="strong_wolfe")
    optimizer.step(closure)
    for parameter, value in zip(others, values, strict=True):
        parameter.copy_(value)
