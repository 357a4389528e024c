"""Mistakes in the heads of a model of transformers: rotation, attention, norms of queries and keys.

B batch, T tokens, H heads, D width of a head.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.errors import raised
from minigpt.host import host_of
from minigpt.judge.mistakes.attention import OF_SCORES, SPLIT_BY_RESHAPE, STEPS, score
from minigpt.judge.mistakes.changed import call_instead, calls, code_of
from minigpt.judge.mistakes.configs import NEIGHBOURS, OF_HALVES, ropes, window_of
from minigpt.judge.mistakes.mistake import OF_OTHER, Mistake, MistakePart, Swaps
from minigpt.judge.mistakes.rounding import HALF_FORMATS, Rounds
from minigpt.norms.formulas import formula, right_parts
from minigpt.norms.record import NormSite
from minigpt.norms.registry import KINDS
from minigpt.shape import value_in

ROTATE = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
NO_MASK = "no causal mask"
ATTEND = "ALL_ATTENTION_FUNCTIONS"
NORMS_OF_HEADS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


def attentions(model: nn.Module) -> list[Any]:
    """Return the modules that attend through transformers' table of functions."""
    return [module for module in model.modules() if calls(module, ATTEND)]


# Rotation


def rotate_of(model: nn.Module) -> tuple[str, Any]:
    """Return the name of the function that rotates queries and keys, and the function; "" and None without one."""
    for module in attentions(model):
        for name in ROTATE:
            if calls(module, name):
                return name, code_of(module).__globals__[name]
    return "", None


def pairs_of(rotate: Any) -> str:
    """Return whether it turns "halves" or "neighbours" as pairs; "" if it takes something else."""
    row = torch.arange(8.0)[None, None, None]
    with contextlib.suppress(raised()):
        turned = rotate(row, row, torch.zeros(1, 1, 8), torch.ones(1, 1, 8))[0]
        return {-4.0: "halves", -1.0: "neighbours"}.get(float(turned.flatten()[0]), "")
    return ""


def turning(words: str, pairs: str = "", **about: Any) -> Callable[[Any], Any]:
    """Decorate a function in place of the rotation: of the right one, queries, keys (B, H, T, D), cosines and sines.

    Args:
        pairs: the right pairs for which it is a mistake; any without.
    """

    def add(wrong: Any) -> Any:
        @OF_OTHER.add
        def of(model: Any) -> Iterator[Mistake]:
            name, right = rotate_of(model)
            right_pairs = pairs_of(right)
            if not right_pairs or pairs not in ("", right_pairs):
                return

            def put(model: Any, swaps: Swaps) -> None:
                for module in attentions(model):
                    if calls(module, name):
                        call_instead(module, swaps, name, lambda right: partial(wrong, right))

            yield Mistake(words, put, **about)

        return wrong

    return add


def of_rotated(change: Callable[[Tensor], Tensor], cos: Tensor, *parts: Tensor) -> list[Tensor]:
    """Change the part of queries and keys that is rotated."""
    width = cos.shape[-1]
    return [torch.cat([change(x[..., :width]), x[..., width:]], dim=-1) for x in parts]


def apart(x: Tensor) -> Tensor:
    """Put neighbours half a width apart."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)


def together(x: Tensor) -> Tensor:
    """Put halves side by side."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


@turning(NEIGHBOURS, "halves", cure="Rotate x[i] with x[i + D / 2] in place of x[2 * i] with x[2 * i + 1].")
@turning("rows of q and k ordered for rotary pairs of halves, and neighbours rotated", "neighbours")
def turn_neighbours(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
    q, k = of_rotated(apart, cos, q, k)
    return right(q, k, cos, sin, *rest, **options)


@turning(OF_HALVES, "neighbours", cure="Rotate x[2 * i] with x[2 * i + 1] in place of x[i] with x[i + D / 2].")
@turning("rows of q and k permuted for rotary pairs of neighbours, and halves rotated", "halves")
def turn_halves(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
    q, k = of_rotated(together, cos, q, k)
    return right(q, k, cos, sin, *rest, **options)


@turning("no rotary positions")
def turn_nothing(right: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
    return q, k


@turning("rotary positions applied twice")
def turn_twice(right: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
    return right(*right(q, k, *rest, **options), *rest, **options)


@turning("rotary positions with the sign of the sine exchanged")
def turn_back(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
    return right(q, k, cos, -sin, *rest, **options)


@turning("queries rotated, and keys not")
def turn_queries(right: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
    return right(q, k, *rest, **options)[0], k


@turning("keys rotated, and queries not")
def turn_keys(right: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
    return q, right(q, k, *rest, **options)[1]


def turn_part(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, part: int, **options: Any) -> Any:
    """Rotate the first of so many parts of a head."""
    if cos.shape[-1] != q.shape[-1]:
        raise ValueError("a part alone is rotated")
    width = cos.shape[-1] // part
    cos, sin = (torch.cat([x[..., : x.shape[-1] // 2 : part]] * 2, dim=-1) for x in (cos, sin))
    turned = right(q[..., :width], k[..., :width], cos, sin, *rest, **options)
    return tuple(torch.cat([new, old[..., width:]], dim=-1) for new, old in zip(turned, (q, k), strict=True))


turning("half of a head rotated in place of all", "halves")(partial(turn_part, part=2))
turning("a quarter of a head rotated in place of all", "halves")(partial(turn_part, part=4))


@OF_OTHER.add
def wrong_frequencies(model: Any) -> Iterator[Mistake]:
    """Yield rotary positions that are divided by a number more."""
    factors = {rope.get("factor") for rope in ropes(model.config.get_text_config()).values()}
    for factor in {2.0, 4.0, 8.0, *factors} - {None}:

        def put(model: Any, swaps: Swaps, factor: float = factor) -> None:
            for module in model.modules():
                for name, frequencies in list(module._buffers.items()):
                    if name.endswith("inv_freq") and "original" not in name and frequencies is not None:
                        swaps.set(module, name, frequencies / factor)

        yield Mistake(f"positions divided by {factor:g} more, as linear rope scaling does", put)


# Attention


class Attending:
    """A table of attention functions, each with another function around it."""

    def __init__(self, right: Any, wrong: Any) -> None:
        self.right, self.wrong = right, wrong

    def get_interface(self, *names: Any) -> Any:
        """Return what attends: a function of the module, queries (B, H, T, D), keys, values, the mask and options."""
        return partial(self.wrong, self.right.get_interface(*names))


def attending(words: str, wrong: Any, **about: Any) -> Mistake:
    """Return the mistake of a function in place of attention: of the right one, and what that takes."""

    def put(model: Any, swaps: Swaps) -> None:
        for module in attentions(model):
            call_instead(module, swaps, ATTEND, lambda right: Attending(right, wrong))

    return Mistake(words, put, **about)


def attend_tiled(right: Any, module: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
    """Let query head h read key head h % groups in place of h // (H / groups)."""
    heads, groups = q.shape[1], k.shape[1]
    order = torch.arange(heads).view(-1, groups).T.flatten()
    y, weights = right(module, q[:, order], k, *rest, **options)
    return y[:, :, order.argsort()], weights


def attend_to_all(
    right: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, **options: Any
) -> Any:
    return right(module, q, k, v, None, *rest, **options | {"is_causal": False})


def attend_scaled(right: Any, module: Any, *rest: Any, times: float, **options: Any) -> Any:
    scaling = options.get("scaling")
    if scaling is None:
        scaling = rest[0].shape[-1] ** -0.5
    return right(module, *rest, **options | {"scaling": scaling * times})


def attend_rounded(
    right: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, rounds: Rounds, **options: Any
) -> Any:
    return right(module, q, rounds(k), rounds(v), *rest, **options)


def attend_by_steps(
    right: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, steps: Any, **options: Any
) -> Any:
    """Attend to a whole text in steps, as a GPT-2 does; a window must be longer."""
    times = q.shape[1] // k.shape[1]
    scores = score(q, k.repeat_interleave(times, 1), options.get("scaling") or q.shape[-1] ** -0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    steps = STEPS | steps
    weights = steps["finish"](steps["weigh"](steps["hide"](scores)))
    return (weights @ v.repeat_interleave(times, 1)).transpose(1, 2).contiguous(), weights


def attend_farther(
    right: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, layers: int, **options: Any
) -> Any:
    """See all of a text in every second layer, in place of a window."""
    if module.layer_idx % 2 == layers:
        seq = q.shape[2]
        mask = torch.full((1, 1, seq, seq), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
    return right(module, q, k, v, mask, *rest, **options)


def reshaped_heads(x: Tensor) -> Tensor:
    """Read (B, T, H, D) as (B, H, T, D), or the other way round."""
    return x.transpose(1, 2).reshape(x.shape)


def split_by_reshape(model: Any, swaps: Swaps, *, merges: bool) -> None:
    name, _ = rotate_of(model)

    def turn(right: Any, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        return right(reshaped_heads(q), reshaped_heads(k), *rest, **options)

    def attend(right: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        y, weights = right(module, q, k, reshaped_heads(v), *rest, **options)
        return reshaped_heads(y) if merges else y, weights

    for module in attentions(model):
        call_instead(module, swaps, name, lambda right: partial(turn, right))
        call_instead(module, swaps, ATTEND, lambda right: Attending(right, attend))


@OF_OTHER.add
def wrong_steps(model: Any) -> Iterator[Mistake]:
    """Yield mistakes in mask and softmax, and in how heads are split, of a model with rotary positions."""
    if not rotate_of(model)[0]:
        return
    for merges in (False, True):
        yield Mistake(SPLIT_BY_RESHAPE, partial(split_by_reshape, merges=merges), is_causal=False)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ["one"]
    for words, steps, about in OF_SCORES:
        if words != NO_MASK:
            yield attending(words, partial(attend_by_steps, steps=steps), **about)
    if window_of(config) is not None and len({*types}) == 1:
        yield attending("a sliding window in every second layer, from the first on", partial(attend_farther, layers=1))
        yield attending("a sliding window in every second layer, from the second on", partial(attend_farther, layers=0))


@OF_OTHER.add
def wrong_attention(model: Any) -> Iterator[Mistake]:
    """Yield mistakes in grouped heads, the mask, the factor of the scores, and the precision of keys and values."""
    modules = attentions(model)
    if not modules:
        return
    config = model.config.get_text_config()
    heads, groups = value_in(config, "num_attention_heads", default=1), value_in(config, "num_key_value_heads")
    if groups is not None and 1 < groups < heads:
        cure = "Let query head h read key head h // (heads / groups) in place of h % groups."
        yield attending("heads of keys and values tiled in place of repeated", attend_tiled, cure=cure)
    yield attending(NO_MASK, attend_to_all, is_causal=False, part=MistakePart.MASK)
    width, size = config.hidden_size, getattr(modules[0], "head_dim", None) or config.hidden_size // heads
    scale = getattr(modules[0], "scaling", size**-0.5)
    scales = {  # the first words of a number stay
        size**-0.5: f"scores scaled by 1 / sqrt(head size), not by {scale:.6g} as the config asks",
        1.0: "scores that are not scaled",
        1 / size: "scores scaled twice: by 1 / D in place of 1 / sqrt(D)",
        size**0.5: "scores multiplied by sqrt(D), not divided by it",
    }
    scales.setdefault(width**-0.5, "scores scaled by 1 / sqrt(n_embd) in place of 1 / sqrt(head size)")
    scales.setdefault((width / heads) ** -0.5, "scores scaled by 1 / sqrt(n_embd / n_head)")
    for other, words in scales.items():
        if not math.isclose(other, scale):
            yield attending(words, partial(attend_scaled, times=other / scale), part=MistakePart.SCALE)
    for form, rounds, error in HALF_FORMATS:
        yield attending(f"keys and values rounded to {form}", partial(attend_rounded, rounds=rounds), error=error)


# Norms


def norm_of_heads(norm: Any, site: NormSite, *, over_all: bool) -> Callable[[Tensor], Tensor]:
    """Return a norm of queries or keys (B, H, T, D) by its formula, over each head or over all together."""
    parts = {**right_parts(site.kind, site.eps or 0.0), "dims": (0, 2) if over_all else (2,)}

    def compute(x: Tensor) -> Tensor:
        scale, shift = x.new_ones(()), x.new_zeros(())
        for role in ("weight", "bias"):
            value = getattr(norm, role, None)
            if value is not None and value.numel() != x.shape[-1]:
                value = value.view(x.shape[1], 1, -1)  # each head has its own
            if value is not None:
                scale, shift = (value + site.adds_one, shift) if role == "weight" else (scale, value)
        return formula(x, parts, scale, shift)

    return compute


@OF_OTHER.add
def wrong_norms_of_heads(model: Any) -> Iterator[Mistake]:
    """Yield norms of queries and keys that are left out, over other numbers, or on the other side of the rotation."""
    name, right = rotate_of(model)
    modules, roles = list[Any](), ("", "")
    for module in attentions(model):
        for roles_here in NORMS_OF_HEADS:
            if all(isinstance(getattr(module, role, None), nn.Module) for role in roles_here):
                modules.append(module)
                roles = roles_here
    if not modules:
        return
    first = getattr(modules[0], roles[0])
    site = host_of(model).site_of(first)

    def left_out(model: Any, swaps: Swaps) -> None:
        for module in attentions(model):
            for role in roles:
                if hasattr(module, role):
                    swaps.set(module, role, nn.Identity())

    yield Mistake("no norms of q and k", left_out)
    width = getattr(modules[0], "head_dim", None)
    if not pairs_of(right) or site.kind not in KINDS or width is None:
        return
    names = code_of(modules[0]).__code__.co_names
    is_over_all, is_after = first.weight.numel() != width, names.index(name) < names.index(roles[0])

    def moved(words: str, over_all: bool, after: bool) -> Mistake:
        def put(model: Any, swaps: Swaps) -> None:
            for module in attentions(model):
                if not hasattr(module, roles[0]):
                    continue
                norm_q, norm_k = (norm_of_heads(getattr(module, role), site, over_all=over_all) for role in roles)

                def turn(
                    right: Any, q: Tensor, k: Tensor, *rest: Any, norms: Any = (norm_q, norm_k), **options: Any
                ) -> Any:
                    of_q, of_k = norms
                    if not after:
                        return right(of_q(q), of_k(k), *rest, **options)
                    q, k = right(q, k, *rest, **options)
                    return of_q(q), of_k(k)

                call_instead(module, swaps, name, lambda right, turn=turn: partial(turn, right))
            left_out(model, swaps)

        return Mistake(words, put)

    other_side = "before" if is_after else "after"
    yield moved(f"the norms of q and k {other_side} the rotation", is_over_all, not is_after)
    over = "each head in place of all" if is_over_all else "all heads in place of each"
    yield moved(f"the norms of q and k over {over}", not is_over_all, is_after)
