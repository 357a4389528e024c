"""Mistakes in the modules of a model of transformers: norms, blocks, experts, embedding, head and weights."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.host import host_of
from minigpt.judge.mistakes.attention import EXCHANGED, ORDERS, PLACE
from minigpt.judge.mistakes.blocks import WIRINGS
from minigpt.judge.mistakes.configs import NORMALIZED, NOT_NORMALIZED
from minigpt.judge.mistakes.mistake import OF_OTHER, Mistake, MistakePart, Swaps
from minigpt.judge.mistakes.norms import places_of
from minigpt.shape import value_in

SEPARATE = ("q_proj", "k_proj", "v_proj")
GATES = (("gate_proj", "up_proj"), ("w1", "w3"))


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
    scale = float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))

    def scaled(words: str, factor: float) -> Mistake:
        def put(model: Any, swaps: Swaps) -> None:
            embedding = model.get_input_embeddings()
            right = embedding.forward
            swaps.set(embedding, "forward", lambda ids: factor * right(ids))

        return Mistake(words, put)

    if scale == 1:
        yield scaled("the token embedding scaled by sqrt(n_embd)", width**0.5)
    else:
        yield scaled(f"the token embedding not scaled by {scale:g}", 1 / scale)
        yield scaled(f"the token embedding scaled by {scale:g} twice", scale)


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
    heads = value_in(config, "num_attention_heads", default=1)
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
