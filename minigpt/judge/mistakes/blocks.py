"""Mistakes in blocks: where norms and residuals are, which blocks there are, and the MLP's activation."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.judge.mistakes.mistake import Mistake, Swaps

Step = Callable[[Any, Tensor], Tensor]
OWN = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf", "silu": "SiLU", "swish": "SiLU", "relu": "ReLU"}
EXACT = ("gelu",)
TANH = ("gelu_new", "gelu_pytorch_tanh")


class ReorderedBlock(nn.Module):
    """A block whose parts are put together in another way.

    Args:
        block: the one whose norms, attention and MLP it takes.
        step: a function of this block and the residual stream (B, T, C), to the stream after it.
    """

    def __init__(self, block: Any, step: Step) -> None:
        super().__init__()
        self.ln_1, self.attn = block.ln_1, block.attn
        self.ln_2, self.mlp = block.ln_2, block.mlp
        self.step = step

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: object = None) -> Tensor:
        """Return the stream (B, T, C) after this block, of a whole text."""
        return self.step(self, x)


def post_norm(block: Any, x: Tensor) -> Tensor:
    x = block.ln_1(x + block.attn(x))
    return block.ln_2(x + block.mlp(x))


def residual_of_norm(block: Any, x: Tensor) -> Tensor:
    x = block.ln_1(x)
    x = block.ln_2(x + block.attn(x))
    return x + block.mlp(x)


def norm_of_outputs(block: Any, x: Tensor) -> Tensor:
    x = x + block.ln_1(block.attn(x))
    return x + block.ln_2(block.mlp(x))


def parallel(block: Any, x: Tensor) -> Tensor:
    return x + block.attn(block.ln_1(x)) + block.mlp(block.ln_2(x))


def parallel_one_norm(block: Any, x: Tensor) -> Tensor:
    y = block.ln_1(x)
    return x + block.attn(y) + block.mlp(y)


def no_attention_residual(block: Any, x: Tensor) -> Tensor:
    x = block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_2(x))


def no_mlp_residual(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_1(x))
    return block.mlp(block.ln_2(x))


def no_residuals(block: Any, x: Tensor) -> Tensor:
    return block.mlp(block.ln_2(block.attn(block.ln_1(x))))


def early_mlp_residual(block: Any, x: Tensor) -> Tensor:
    y = x + block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_2(y))


def mlp_of_attention(block: Any, x: Tensor) -> Tensor:
    y = block.attn(block.ln_1(x))
    return x + y + block.mlp(block.ln_2(y))


def twice_attention(block: Any, x: Tensor) -> Tensor:
    x = x + 2 * block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_2(x))


def mlp_first(block: Any, x: Tensor) -> Tensor:
    x = x + block.mlp(block.ln_2(x))
    return x + block.attn(block.ln_1(x))


def no_ln_1(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(x)
    return x + block.mlp(block.ln_2(x))


def no_ln_2(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_1(x))
    return x + block.mlp(x)


def exchanged_norms(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_2(x))
    return x + block.mlp(block.ln_1(x))


def ln_1_twice(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_1(x))


def ln_2_twice(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_2(x))
    return x + block.mlp(block.ln_2(x))


def no_attention(block: Any, x: Tensor) -> Tensor:
    return x + block.mlp(block.ln_2(x))


def no_mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.attn(block.ln_1(x))


def blockwise(words: str, step: Step) -> Mistake:
    """Return a mistake that puts the parts of every block together in another way."""

    def put(model: Any, swaps: Swaps) -> None:
        blocks = [ReorderedBlock(block, step) for block in model.h]
        swaps.set(model, "h", nn.ModuleList(blocks))

    return Mistake(words, put)


def wrong_residuals() -> Iterator[Mistake]:
    """Yield mistakes in norms and residuals of a block."""
    yield blockwise("norms after the residual (post-norm)", post_norm)
    yield blockwise("residuals taken after the norm", residual_of_norm)
    yield blockwise("norms of what attention and MLP write, not of what they read", norm_of_outputs)
    yield blockwise("attention and MLP in parallel, each behind its norm", parallel)
    yield blockwise("attention and MLP in parallel behind ln_1", parallel_one_norm)
    yield blockwise("no residual around attention", no_attention_residual)
    yield blockwise("no residual around the MLP", no_mlp_residual)
    yield blockwise("no residuals", no_residuals)
    yield blockwise("the residual of the MLP taken before attention", early_mlp_residual)
    yield blockwise("an MLP that reads attention's output without the residual", mlp_of_attention)
    yield blockwise("attention's output added twice", twice_attention)
    yield blockwise("the MLP before attention", mlp_first)
    yield blockwise("no ln_1", no_ln_1)
    yield blockwise("no ln_2", no_ln_2)
    yield blockwise("ln_1 and ln_2 exchanged", exchanged_norms)
    yield blockwise("ln_1 in place of ln_2", ln_1_twice)
    yield blockwise("ln_2 in place of ln_1", ln_2_twice)
    yield blockwise("no attention", no_attention)
    yield blockwise("no MLP", no_mlp)


# Which blocks there are


def ordered(words: str, order: Sequence[int]) -> Mistake:
    """Return a mistake in the order of the blocks."""

    def put(model: Any, swaps: Swaps) -> None:
        blocks = [model.h[layer] for layer in order]
        swaps.set(model, "h", nn.ModuleList(blocks))

    return Mistake(words, put, moves_blocks=True)


def wrong_orders(depth: int) -> Iterator[Mistake]:
    """Yield mistakes in which blocks there are, and in which order."""
    layers = list(range(depth))
    last = depth - 1
    if depth > 1:
        yield ordered("the blocks in reverse order", layers[::-1])
        yield ordered("the last block missing", layers[:-1])
        yield ordered("the first block missing", layers[1:])
        yield ordered("the weights of block 0 in every block", [0] * depth)
        yield ordered(f"the weights of block {last} in every block", [last] * depth)
    if depth > 2:
        yield ordered("the blocks from block 1 on, and block 0 last", [*layers[1:], 0])
        yield ordered("block 0 missing, and the last block twice", [*layers[1:], last])
    by_name = sorted(layers, key=str)
    if by_name != layers:
        yield ordered("the blocks in the order of their names: h.1, h.10, h.11, h.2", by_name)
    for layer in layers:
        yield ordered(f"block {layer} twice", [*layers[: layer + 1], *layers[layer:]])
    for layer in layers[1:-1]:
        yield ordered(f"block {layer} missing", [*layers[:layer], *layers[layer + 1 :]])
    for layer in layers[1:]:
        exchanged = [*layers]
        exchanged[layer - 1], exchanged[layer] = layer, layer - 1
        yield ordered(f"blocks {layer - 1} and {layer} exchanged", exchanged)


def last_norm(words: str, build: Callable[[nn.Module], nn.Module]) -> Mistake:
    """Return a mistake in the last norm."""

    def put(model: Any, swaps: Swaps) -> None:
        swaps.set(model, "ln_f", build(model.ln_f))

    return Mistake(words, put)


def norm_each_block(model: Any, swaps: Swaps) -> None:
    blocks = []
    for block in model.h:
        blocks += [block, Reading(model.ln_f)]
    swaps.set(model, "h", nn.ModuleList(blocks))


class Reading(nn.Module):
    """A norm in the list of blocks."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.ln_1 = self.ln_2 = norm

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: object = None) -> Tensor:
        return self.norm(x)


def wrong_last_norms() -> Iterator[Mistake]:
    """Yield mistakes in the place of the last norm."""
    yield last_norm("no last norm", lambda norm: nn.Identity())
    yield last_norm("the last norm twice", lambda norm: nn.Sequential(norm, norm))
    yield Mistake("the last norm after every block too", norm_each_block, moves_blocks=True)


# The activation


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_without_cube(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x))


def gelu_without_root(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(x + 0.044715 * x**3))


def gelu_without_half(x: Tensor) -> Tensor:
    return 2 * tanh_gelu(x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def linear(x: Tensor) -> Tensor:
    return x


def activating(words: str, function: Callable[[Tensor], Tensor]) -> Mistake:
    """Return a mistake in the MLP's activation."""

    def put(model: Any, swaps: Swaps) -> None:
        for block in model.h:
            swaps.set(block.mlp, "act", function)

    return Mistake(words, put)


def twice_activated(model: Any, swaps: Swaps) -> None:
    for block in model.h:
        act = block.mlp.act
        swaps.set(block.mlp, "act", partial(_twice, act))


def _twice(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return act(act(x))


def wrong_activations(config: Any) -> Iterator[Mistake]:
    """Yield activations that are not the config's."""
    name = config.activation_function
    own = f" in place of {OWN.get(name, name)}"
    if name not in EXACT:
        yield activating("the exact GELU" + own, F.gelu)
    if name not in TANH:
        yield activating("the tanh GELU" + own, tanh_gelu)
    yield activating("the sigmoid GELU, x sigmoid(1.702 x)," + own, quick_gelu)
    yield activating("ReLU" + own, F.relu)
    yield activating("SiLU" + own, F.silu)
    yield activating("tanh alone as the activation", torch.tanh)
    yield activating("no activation in the MLP", linear)
    yield activating("squared ReLU" + own, squared_relu)
    yield activating("a leaky ReLU" + own, F.leaky_relu)
    yield activating("ELU" + own, F.elu)
    yield activating("the tanh GELU without its cubic term", gelu_without_cube)
    yield activating("the tanh GELU without sqrt(2 / pi)", gelu_without_root)
    yield activating("the tanh GELU without the factor 0.5", gelu_without_half)
    yield Mistake("the activation applied twice", twice_activated)
