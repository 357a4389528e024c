"""Mistakes that are the same model of transformers by another config: rotary positions, windows, caps, factors."""

import math
from collections.abc import Iterator
from typing import Any

from minigpt.judge.mistakes.blocks import OWN
from minigpt.judge.mistakes.changed import configured
from minigpt.judge.mistakes.mistake import OF_OTHER, Mistake
from minigpt.shape import value_in

NEVER = 2**30  # tokens that no text has
THETAS = (1e4, 5e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7)
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
LENGTHS = (2048, 4096, 8192, 32768)
ROTATED_SHARES = (0.25, 0.5, 0.75, 1.0)
WINDOWS = ("sliding_window", "window_size", "sliding_window_size", "attention_window_size", "attention_chunk_size")
CAPS = {
    "attn_logit_softcapping": "scores",
    "final_logit_softcapping": "logits", "logits_soft_cap": "logits", "output_logit_soft_cap": "logits",
}  # fmt: skip
WITH_WINDOW = {"sliding_attention", "chunked_attention"}
SEEING = {"full_attention", *WITH_WINDOW}  # layers that differ by what they see alone
MULTIPLIERS = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
    "lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "embedding_scale",
    "routed_scaling_factor", "router_scaling_factor", "route_scale", "attention_value_scale", "residual_scale",
)  # fmt: skip
OTHER_ACTIVATIONS = {  # the names of transformers
    "gelu": "the exact GELU in place of {}",
    "gelu_pytorch_tanh": "the tanh GELU in place of {}",
    "quick_gelu": "the sigmoid GELU, x sigmoid(1.702 x), in place of {}",
    "silu": "SiLU in place of {}",
    "relu": "ReLU in place of {}",
    "relu2": "squared ReLU in place of {}",
    "linear": "no activation in the MLP",
    "tanh": "tanh alone as the activation",
    "sigmoid": "the sigmoid alone as the activation",
}
OF_MLP = ("hidden_act", "hidden_activation", "activation_function", "activation", "ffn_act")


def number(value: float) -> str:
    """Return a number with commas: 10,000."""
    return f"{value:,.12g}"


def setting(words: str, **fields: Any) -> Mistake:
    """Return the mistake of a config with other values."""

    def change(config: Any) -> None:
        for name, value in fields.items():
            setattr(config, name, value)

    return configured(words, change)


# Rotary positions


def ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters of rotary positions, by kind of layer where each has its own; "" where all have one."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        return {"": rope}
    return {kind: of_kind for kind, of_kind in rope.items() if isinstance(of_kind, dict)}


def with_rope(words: str, kind: str, fields: dict[str, Any]) -> Mistake:
    """Return the mistake of other rotary positions in a kind of layers; None takes a field away."""

    def change(config: Any) -> None:
        old = ropes(config)
        new = {name: value for name, value in {**old[kind], **fields}.items() if value is not None}
        config.rope_parameters = new if kind == "" else {**config.rope_parameters, kind: new}
        for name in config.__dict__.keys() & fields.keys():  # which some configs have beside it
            setattr(config, name, fields[name])

    return configured(words + (f" in layers of {kind.replace('_', ' ')}" if kind else ""), change)


@OF_OTHER.add
def wrong_ropes(model: Any) -> Iterator[Mistake]:
    """Yield mistakes in the rotary positions of each kind of layers."""
    config = model.config.get_text_config()
    for kind, rope in ropes(config).items():
        yield from wrong_bases(config, kind, rope)
        if rope["rope_type"] != "default":
            yield from wrong_scaling(model, config, kind, rope)
    thetas = {rope.get("rope_theta") for rope in ropes(config).values()}
    if len(thetas) > 1:
        for theta in sorted({*THETAS} - thetas):

            def change(config: Any, theta: float = theta) -> None:
                config.rope_parameters = {kind: {**rope, "rope_theta": theta} for kind, rope in ropes(config).items()}

            yield configured(f"rope theta {number(theta)} in every layer", change)


def wrong_bases(config: Any, kind: str, rope: dict[str, Any]) -> Iterator[Mistake]:
    """Yield mistakes in the base of the angles, and in how much of a head is rotated."""
    theta, part = rope.get("rope_theta"), rope.get("partial_rotary_factor", 1.0)
    if theta is not None:
        others = {of_kind.get("rope_theta") for of_kind in ropes(config).values()}
        for other in sorted({*THETAS, *others} - {theta, None}):
            words = f"rope theta {number(other)} in place of {number(theta)}"
            yield with_rope(words, kind, {"rope_theta": other})
        if part < 1:
            words = "rotary frequencies over the whole head in place of its rotated part"
            yield with_rope(words, kind, {"rope_theta": theta**part})
    for other in sorted({*ROTATED_SHARES, part / 2, min(1.0, 2 * part)} - {part}):
        if part < 1:
            words = f"{number(other)} of a head rotated in place of {number(part)}"
            yield with_rope(words, kind, {"partial_rotary_factor": other})


def wrong_scaling(model: Any, config: Any, kind: str, rope: dict[str, Any]) -> Iterator[Mistake]:
    """Yield mistakes in the scaling of rotary positions."""
    form, factor, theta = rope["rope_type"], rope.get("factor"), rope.get("rope_theta")
    keep = {"rope_theta": theta, "partial_rotary_factor": rope.get("partial_rotary_factor")}
    clean = {**dict.fromkeys(rope), **keep}
    yield with_rope(f"no rope scaling in place of {form}", kind, {**clean, "rope_type": "default"})
    if factor is not None:
        for other in sorted({*FACTORS, factor**2, 1 / factor} - {factor}):
            yield with_rope(f"a rope factor of {number(other)} in place of {number(factor)}", kind, {"factor": other})
        if form != "linear":
            linear = {**clean, "rope_type": "linear", "factor": factor}
            yield with_rope(f"linear rope scaling in place of {form}", kind, linear)
    length = rope.get("original_max_position_embeddings")
    whole = config.max_position_embeddings
    if length is not None:
        for other in sorted({*LENGTHS, whole, int(whole / (factor or 1)), length // 2, length * 2} - {length, 0}):
            words = f"an original length of {number(other)} in place of {number(length)} in the rope scaling"
            yield with_rope(words, kind, {"original_max_position_embeddings": other})
    for name, usual in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0), ("beta_fast", 32.0), ("beta_slow", 1.0)):
        if rope.get(name, usual) != usual:
            words = f"{name} {number(usual)} in place of {number(rope[name])} in the rope scaling"
            yield with_rope(words, kind, {name: usual})
    if form == "yarn":
        truncates = rope.get("truncate", True)
        words = "YaRN's range of frequencies " + ("not rounded to whole numbers" if truncates else "rounded outwards")
        yield with_rope(words, kind, {"truncate": not truncates})
    if form == "longrope":
        short, long = rope["short_factor"], rope["long_factor"]
        yield with_rope("longrope's short factors for long texts too", kind, {"long_factor": short})
        yield with_rope("longrope's long factors for short texts too", kind, {"short_factor": long})
    if form in ("yarn", "longrope"):
        name = {"yarn": "YaRN", "longrope": "longrope"}[form]
        scaling = f"{kind}_attention_scaling" if kind else "attention_scaling"
        right = next((vars(module)[scaling] for module in model.modules() if scaling in vars(module)), 1.0)
        plain = 0.1 * math.log(factor) + 1 if factor and form == "yarn" else right
        others = {
            f"no attention factor of {name}": 1.0,
            f"{name}'s attention factor squared": right**2,
            f"the root of {name}'s attention factor": right**0.5,
            "YaRN's attention factor by its factor alone, 0.1 ln(factor) + 1": plain,
        }
        for words, other in others.items():
            if not math.isclose(other, right):
                yield with_rope(words, kind, {"attention_factor": other})


@OF_OTHER.add
def wrong_layers_with_positions(model: Any) -> Iterator[Mistake]:
    """Yield rotary positions in layers that have none."""
    config = model.config.get_text_config()
    layers = getattr(config, "no_rope_layers", None)
    if layers and len({*layers}) > 1:
        yield setting("rotary positions in every layer", no_rope_layers=[1] * len(layers))
        yield setting("layers without rotary positions shifted by one", no_rope_layers=layers[-1:] + layers[:-1])
        yield setting(
            "rotary positions in the layers without, and none in the others", no_rope_layers=[1 - x for x in layers]
        )
    if getattr(config, "rope_interleave", None) is not None:
        words = NEIGHBOURS if not config.rope_interleave else OF_HALVES
        yield setting(words, rope_interleave=not config.rope_interleave)


NEIGHBOURS = "rotary pairs of neighbours, (2 i, 2 i + 1), in place of halves, (i, i + D / 2)"
OF_HALVES = "rotary pairs of halves, (i, i + D / 2), in place of neighbours, (2 i, 2 i + 1)"


# Windows


def window_of(config: Any) -> int | None:
    """Return how many tokens a token sees in some layer; None if it sees all before it."""
    windows = [value_in(config, name) for name in WINDOWS]
    return next((window for window in windows if isinstance(window, int) and 1 < window < NEVER), None)


@OF_OTHER.add
def wrong_windows(model: Any) -> Iterator[Mistake]:
    """Yield mistakes in how far tokens see, and in which layers."""
    config = model.config.get_text_config()
    for name in WINDOWS:
        window = value_in(config, name)
        if not isinstance(window, int) or not 1 < window < NEVER:
            continue
        kind = "chunks" if "chunk" in name else "a sliding window"
        yield setting("no sliding window" if "window" in name else "no chunks of attention", **{name: NEVER})
        for other in (window - 1, window + 1, window // 2, 2 * window):
            yield setting(f"{kind} of {number(other)} in place of {number(window)}", **{name: other})
    types = getattr(config, "layer_types", None) or []
    seeing, several = {*types} <= SEEING, len({*types}) > 1
    if seeing and several:
        last, first = types[-1:] + types[:-1], types[1:] + types[:1]
        yield setting("the layers with a sliding window shifted by one, to the next", layer_types=last)
        if first != last:
            yield setting("the layers with a sliding window shifted by one, to the one before", layer_types=first)
        sees = next(iter({*types} & WITH_WINDOW))
        exchanged = ["full_attention" if kind == sees else sees for kind in types]
        if exchanged not in (first, last):
            yield setting(
                "full attention in the layers with a sliding window, and a window in the others", layer_types=exchanged
            )
        yield setting("a sliding window in every layer", layer_types=[sees] * len(types))
        if len(ropes(config)) > 1:
            yield setting("every layer as one of full attention", layer_types=["full_attention"] * len(types))


# Caps, factors, activation, experts


@OF_OTHER.add
def wrong_caps(model: Any) -> Iterator[Mistake]:
    config = model.config.get_text_config()
    caps = {name: getattr(config, name) for name in CAPS if getattr(config, name, None)}
    for name, cap in caps.items():
        yield setting(f"no soft cap of the {CAPS[name]}", **{name: None})
        for other in {20.0, 30.0, 50.0, *caps.values()} - {cap}:
            yield setting(
                f"a soft cap of {number(other)} in place of {number(cap)} of the {CAPS[name]}", **{name: other}
            )
    if len({*caps.values()}) == 2:
        exchanged = dict(zip(caps, [*caps.values()][::-1], strict=True))
        yield setting("the soft caps of scores and logits exchanged", **exchanged)
    if getattr(config, "clip_qkv", None):
        yield setting("q, k and v not clipped", clip_qkv=None)


@OF_OTHER.add
def wrong_multipliers(model: Any) -> Iterator[Mistake]:
    config = model.config.get_text_config()
    for name in MULTIPLIERS:
        value = getattr(config, name, None)
        if isinstance(value, float | int) and value not in (0, 1):
            yield setting(f"no {name}: 1 in place of {number(value)}", **{name: 1.0})
            yield setting(f"{name} squared", **{name: float(value) ** 2})
            yield setting(f"1 / {name} in place of {name}", **{name: 1 / value})


@OF_OTHER.add
def wrong_activations(model: Any) -> Iterator[Mistake]:
    config = model.config.get_text_config()
    for name in OF_MLP:
        right = getattr(config, name, None)
        if not isinstance(right, str):
            continue
        short = OWN.get(right, {"relu2": "squared ReLU"}.get(right, right))
        for other, words in OTHER_ACTIVATIONS.items():
            if OWN.get(other, other) != OWN.get(right, right):
                yield setting(words.format(short), **{name: other})


@OF_OTHER.add
def wrong_residuals(model: Any) -> Iterator[Mistake]:
    config = model.config.get_text_config()
    for name in ("use_parallel_residual", "parallel_attn"):
        is_parallel = getattr(config, name, None)
        if is_parallel is not None:
            words = "attention and MLP one after the other, not in parallel" if is_parallel else PARALLEL
            yield setting(words, **{name: not is_parallel})


PARALLEL = "attention and MLP in parallel, each behind its norm"


@OF_OTHER.add
def wrong_experts(model: Any) -> Iterator[Mistake]:
    config = model.config.get_text_config()
    is_normalized = getattr(config, "norm_topk_prob", None)
    if is_normalized is not None:
        yield setting(NOT_NORMALIZED if is_normalized else NORMALIZED, norm_topk_prob=not is_normalized)
    for name in ("num_experts_per_tok", "moe_topk"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            for other in {1, count - 1, count + 1, 2 * count} - {0, count}:
                yield setting(f"{other} experts a token in place of {count}", **{name: other})
    for name in ("n_group", "topk_group"):
        if (getattr(config, name, None) or 1) > 1:
            yield setting(f"{name} 1 in place of {getattr(config, name)} for experts", **{name: 1})


NOT_NORMALIZED = "the experts' weights not normalized"
NORMALIZED = "the experts' weights normalized, as by a softmax after the choice"


@OF_OTHER.add
def wrong_heads(model: Any) -> Iterator[Mistake]:
    """Yield other numbers of heads, of another width."""
    config = model.config.get_text_config()
    heads, groups = value_in(config, "num_attention_heads"), value_in(config, "num_key_value_heads")
    if not isinstance(heads, int):
        return
    size = value_in(config, "head_dim", default=config.hidden_size // heads)
    is_computed = isinstance(getattr(type(config), "head_dim", None), property)
    for times in (2, 0.5):
        others = {"num_attention_heads": heads * times, "head_dim": size / times}
        if isinstance(groups, int):
            others["num_key_value_heads"] = groups * times
        if all(value == int(value) and value >= 1 for value in others.values()):
            fields = {name: int(value) for name, value in others.items()}
            if is_computed or value_in(config, "head_dim") is None:
                del fields["head_dim"]
            yield setting(f"{int(heads * times)} heads in place of {heads}", **fields)
