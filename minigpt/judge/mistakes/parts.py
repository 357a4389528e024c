"""Mistakes in the modules of a model of transformers: rotation, heads, norms of queries and keys, experts, weights.

B batch, T tokens, H heads, D width of a head.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.errors import raised
from minigpt.host import host_of
from minigpt.judge.mistakes.attention import EXCHANGED, OF_SCORES, ORDERS, PLACE, SPLIT_BY_RESHAPE, STEPS, score
from minigpt.judge.mistakes.blocks import WIRINGS
from minigpt.judge.mistakes.changed import call_instead, calls, code_of
from minigpt.judge.mistakes.configs import NEIGHBOURS, NORMALIZED, NOT_NORMALIZED, OF_HALVES, ropes, window_of
from minigpt.judge.mistakes.mistake import OF_OTHER, Mistake, MistakePart, Swaps
from minigpt.judge.mistakes.norms import places_of
from minigpt.judge.mistakes.rounding import HALF_FORMATS, Rounds
from minigpt.norms.formulas import formula, right_parts
from minigpt.norms.record import NormSite
from minigpt.norms.registry import KINDS

ROTATE = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
NO_MASK = "no causal mask"
ATTEND = "ALL_ATTENTION_FUNCTIONS"
SCALES = ("scaling", "scale_attn", "inv_norm_factor", "norm_factor", "softmax_scale")
NORMS_OF_HEADS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
SEPARATE = ("q_proj", "k_proj", "v_proj")
OUT = ("o_proj", "out_proj", "dense")
GATES = (("gate_proj", "up_proj"), ("w1", "w3"))


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
            found = pairs_of(right)
            if not found or pairs not in ("", found):
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
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
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


@OF_OTHER.add
def missing_norms(model: Any) -> Iterator[Mistake]:
    """Yield norms that are left out, by what they are called, and the last one twice."""
    host = host_of(model)
    outside = [site for site in host.sites if not any(site.startswith(f"{block}.") for block in host.blocks)]
    for place, sites in places_of(host.sites).items():
        is_last = sites == outside[-1:]

        def put(model: Any, swaps: Swaps, sites: list[str] = sites) -> None:
            for site in sites:
                owner, _, name = site.rpartition(".")
                swaps.set(host_of(model).root.get_submodule(owner), name, nn.Identity())

        yield Mistake("no last norm" if is_last else f"no {place.removeprefix('every ')}", put)
    if outside:

        def twice(model: Any, swaps: Swaps) -> None:
            owner, _, name = outside[-1].rpartition(".")
            parent = host_of(model).root.get_submodule(owner)
            norm = getattr(parent, name)
            swaps.set(parent, name, nn.Sequential(norm, norm))

        yield Mistake("the last norm twice", twice)


# Blocks, experts, embedding and head

BLOCK_PARTS = {"input_layernorm", "post_attention_layernorm", "mlp"}


@OF_OTHER.add
def wrong_blocks(model: Any) -> Iterator[Mistake]:
    """Yield the other ways to put together a block of two norms, attention and MLP."""
    host = host_of(model)
    for block in host.blocks:
        parts = {
            name for name, part in host.root.get_submodule(block).named_children() if not isinstance(part, nn.Dropout)
        }
        if parts not in (BLOCK_PARTS | {"self_attn"}, BLOCK_PARTS | {"attention"}):
            return
    for words, step in WIRINGS.items():
        if words in ("no ln_1", "no ln_2"):  # as any norm that is left out
            continue

        def put(model: Any, swaps: Swaps, step: Any = step) -> None:
            host = host_of(model)
            for path in host.blocks:
                block: Any = host.root.get_submodule(path)

                def forward(x: Tensor, block: Any = block, **options: Any) -> Tensor:
                    attention = block.self_attn if hasattr(block, "self_attn") else block.attention
                    parts = SimpleNamespace(
                        ln_1=block.input_layernorm,
                        ln_2=block.post_attention_layernorm,
                        attn=lambda y: attention(y, **options)[0],
                        mlp=block.mlp,
                    )
                    return step(parts, x)

                swaps.set(block, "forward", forward)

        yield Mistake(
            words.replace("ln_1", "input_layernorm").replace("ln_2", "post_attention_layernorm"),
            put,
            part=MistakePart.WIRING,
        )


def routing(words: str, weigh: Callable[[Tensor, Tensor], Tensor]) -> Mistake:
    """Return the mistake of other weights of the experts: of the router's logits, and the chosen experts."""

    def put(model: Any, swaps: Swaps) -> None:
        for module in model.modules():
            if type(module).__name__.endswith("Router"):

                def forward(x: Tensor, module: Any = module, right: Any = module.forward) -> Any:
                    returned, weights, chosen = right(x)  # older versions return probabilities first
                    logits = F.linear(x.flatten(0, -2), module.weight, getattr(module, "bias", None))
                    return returned, weigh(logits, chosen).to(weights.dtype), chosen

                swaps.set(module, "forward", forward)

    return Mistake(words, put)


@OF_OTHER.add
def wrong_routing(model: Any) -> Iterator[Mistake]:
    """Yield mistakes in the experts' weights, of a router that returns its logits, the weights and the choice."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    if not routers or any(hasattr(router, "e_score_correction_bias") for router in routers):
        return
    if not hasattr(model.config.get_text_config(), "norm_topk_prob"):
        yield routing(NOT_NORMALIZED, lambda logits, chosen: logits.softmax(-1).gather(-1, chosen))
        yield routing(NORMALIZED, lambda logits, chosen: logits.gather(-1, chosen).softmax(-1))
    yield routing(
        "a sigmoid in place of the experts' softmax", lambda logits, chosen: logits.sigmoid().gather(-1, chosen)
    )
    yield routing(
        "every chosen expert with the same weight",
        lambda logits, chosen: torch.full_like(logits.gather(-1, chosen), 1 / chosen.shape[-1]),
    )


@OF_OTHER.add
def wrong_embedding(model: Any) -> Iterator[Mistake]:
    """Yield another factor of the token embedding."""
    width = model.config.get_text_config().hidden_size
    own = float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))

    def scaled(words: str, factor: float) -> Mistake:
        def put(model: Any, swaps: Swaps) -> None:
            embedding = model.get_input_embeddings()
            right = embedding.forward
            swaps.set(embedding, "forward", lambda ids: factor * right(ids))

        return Mistake(words, put)

    if own == 1:
        yield scaled("the token embedding scaled by sqrt(n_embd)", width**0.5)
    else:
        yield scaled(f"the token embedding not scaled by {own:g}", 1 / own)
        yield scaled(f"the token embedding scaled by {own:g} twice", own)


@OF_OTHER.add
def wrong_head(model: Any) -> Iterator[Mistake]:
    """Yield a head that is tied though it has a matrix of its own, and one without its bias."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return
    if head.weight is not embedding.weight and head.weight.shape == embedding.weight.shape:

        def put(model: Any, swaps: Swaps) -> None:
            swaps.set(model.get_output_embeddings(), "weight", model.get_input_embeddings().weight)

        yield Mistake("a head tied to the token embedding in place of the checkpoint's own", put)
    if getattr(head, "bias", None) is not None:
        yield Mistake(
            "no bias in the head", lambda model, swaps: swaps.set(model.get_output_embeddings(), "bias", None)
        )


# Weights


def layers_of(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return the owner and the name of each matrix's layer in the blocks, by what it is called."""
    host, layers = host_of(model), dict[str, list[tuple[nn.Module, str]]]()
    for block in host.blocks:
        for owner in host.root.get_submodule(block).modules():
            for name, layer in owner.named_children():
                if isinstance(getattr(layer, "weight", None), Tensor) and layer.weight.ndim == 2:
                    layers.setdefault(name, []).append((owner, name))
    return layers


def altering_roles(
    words: str, roles: Iterable[str], role: str, change: Callable[[Any], Tensor], **about: Any
) -> Mistake:
    """Return the mistake of other weights or biases in the layers of these names."""

    def put(model: Any, swaps: Swaps) -> None:
        layers = layers_of(model)
        for name in roles:
            for owner, path in layers[name]:
                layer = getattr(owner, path)
                if getattr(layer, role, None) is not None:
                    swaps.parameter(layer, role, change(getattr(layer, role)))

    return Mistake(words, put, **about)


@OF_OTHER.add
def wrong_weights(model: Any) -> Iterator[Mistake]:
    """Yield square matrices that are not transposed, and biases that are left out."""
    layers = layers_of(model)
    square, biased, of_attention = list[str](), list[str](), set[str]()
    for name, places in layers.items():
        layer: Any = getattr(*places[0])
        if layer.weight.shape[0] == layer.weight.shape[1]:
            square.append(name)
        if getattr(layer, "bias", None) is not None:
            biased.append(name)
        if "attention" in type(places[0][0]).__name__.lower():
            of_attention.add(name)
    for name in square:
        yield altering_roles(f"{name} not transposed", [name], "weight", lambda weight: weight.T)
    if len(square) > 1:
        yield altering_roles("every square matrix not transposed", square, "weight", lambda weight: weight.T)
    for name in biased:
        yield altering_roles(f"no bias in {name}", [name], "bias", torch.zeros_like)
    groups = {
        "no biases of q, k and v": [name for name in biased if name in SEPARATE],
        "no biases in attention": [name for name in biased if name in of_attention],
        "no biases in the MLP": [name for name in biased if name not in of_attention],
        "no biases in attention and MLP": biased,
    }
    tried = list[list[str]]()
    for words, names in groups.items():
        if len(names) > 1 and names not in tried:
            tried.append(names)
            yield altering_roles(words, names, "bias", torch.zeros_like)


def exchanging(words: str, names: Sequence[str], order: Sequence[str]) -> Mistake:
    """Return the mistake of layers of one owner that stand in another order."""

    def put(model: Any, swaps: Swaps) -> None:
        for module in model.modules():
            if all(name in module._modules for name in names):
                parts = [getattr(module, name) for name in order]
                for name, part in zip(names, parts, strict=True):
                    swaps.set(module, name, part)

    return Mistake(words, put)


def reordering(words: str, name: str, order: Callable[[Tensor], Tensor]) -> Mistake:
    """Return the mistake of a matrix whose rows stand in another order, with its bias."""

    def put(model: Any, swaps: Swaps) -> None:
        for owner, path in layers_of(model)[name]:
            layer = getattr(owner, path)
            for role in ("weight", "bias"):
                if getattr(layer, role, None) is not None:
                    swaps.parameter(layer, role, order(getattr(layer, role)))

    return Mistake(words, put)


def thirds(x: Tensor, order: str) -> Tensor:
    """Read q, k and v of rows in another order."""
    parts = x.chunk(3)
    return torch.cat([parts[PLACE[name]] for name in order])


def thirds_of_head(x: Tensor, order: str, heads: int) -> Tensor:
    """Read q, k and v of rows (heads, 3, D) in another order."""
    parts = x.unflatten(0, (heads, 3, -1))
    return parts[:, [PLACE[name] for name in order]].flatten(0, 2)


BY_HEAD = "q, k and v interleaved per head, as Megatron and BLOOM store them"
IN_THIRDS = "q, k and v read one after the other, not interleaved per head"


@OF_OTHER.add
def wrong_splits(model: Any) -> Iterator[Mistake]:
    """Yield queries, keys and values, and gates, that are read one for the other, or split otherwise."""
    config, layers = model.config.get_text_config(), layers_of(model)
    heads = getattr(config, "num_attention_heads", 1)
    orders = {f"q, k and v read in the order {', '.join(order)}{EXCHANGED.get(order, '')}": order for order in ORDERS}
    if layers.keys() >= {*SEPARATE}:
        shapes = {name: getattr(*layers[f"{name}_proj"][0]).weight.shape for name in "qkv"}
        for words, order in orders.items():
            if all(shapes[name] == shapes[other] for name, other in zip("qkv", order, strict=True)):
                yield exchanging(words, SEPARATE, [f"{name}_proj" for name in order])
    for name in ("query_key_value", "qkv_proj", "Wqkv"):
        if name not in layers or len(getattr(*layers[name][0]).weight) % (3 * heads):
            continue
        is_by_head = name == "query_key_value"
        for words, order in orders.items():
            read = partial(thirds_of_head, order=order, heads=heads) if is_by_head else partial(thirds, order=order)
            yield reordering(words, name, read)
        view = (3, heads, -1) if is_by_head else (heads, 3, -1)
        words = IN_THIRDS if is_by_head else BY_HEAD
        yield reordering(words, name, lambda x, view=view: x.unflatten(0, view).transpose(0, 1).flatten(0, 2))
    exchanged = "gate and up exchanged in the MLP"
    for names in GATES:
        if layers.keys() >= {*names}:
            yield exchanging(exchanged, names, names[::-1])
    if "gate_up_proj" in layers:
        yield reordering(exchanged, "gate_up_proj", lambda x: torch.cat(x.chunk(2)[::-1]))

    def of_experts(model: Any, swaps: Swaps) -> None:
        for module in model.modules():
            fused = module._parameters.get("gate_up_proj")
            if fused is not None and fused.ndim == 3:
                swaps.parameter(module, "gate_up_proj", torch.cat(fused.chunk(2, dim=1)[::-1], dim=1))

    if any("gate_up_proj" in module._parameters for module in model.modules()):
        yield Mistake(exchanged.replace("the MLP", "the experts"), of_experts)
    if any("sinks" in module._parameters for module in model.modules()):

        def put(model: Any, swaps: Swaps) -> None:
            for module in model.modules():
                if "sinks" in module._parameters:
                    swaps.parameter(module, "sinks", torch.full_like(module.sinks, -1e4))

        yield Mistake("no attention sinks", put)
