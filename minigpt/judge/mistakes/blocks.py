"""Mistakes in blocks: where norms and residuals are, which blocks there are, and the MLP's activation."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.judge.mistakes.mistake import OF_GPT2, Mistake, MistakePart, Put, Swaps, mistake

Step = Callable[[Any, Tensor], Tensor]
Activation = Callable[[Tensor], Tensor]
FORMS = {
    "tanh": "0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))",
    "erf": "0.5 * x * (1 + erf(x / sqrt(2)))",
    "SiLU": "x * sigmoid(x)",
    "ReLU": "max(x, 0)",
}
OWN = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf", "silu": "SiLU", "swish": "SiLU", "relu": "ReLU"}


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


def reordered(step: Step) -> Put:
    """Return what puts the parts of every block together in another way."""

    def put(model: Any, swaps: Swaps) -> None:
        blocks = [ReorderedBlock(block, step) for block in model.h]
        swaps.set(model, "h", nn.ModuleList(blocks))

    return put


WIRINGS: dict[str, Step] = {}


def blockwise(words: str) -> Callable[[Step], Step]:
    """Decorate a way to put the parts of every block together."""

    def add(step: Step) -> Step:
        WIRINGS[words] = step
        return mistake(words, into=reordered, part=MistakePart.WIRING)(step)

    return add


@blockwise("norms after the residual (post-norm)")
def post_norm(block: Any, x: Tensor) -> Tensor:
    x = block.ln_1(x + block.attn(x))
    return block.ln_2(x + block.mlp(x))


@blockwise("residuals taken after the norm")
def residual_of_norm(block: Any, x: Tensor) -> Tensor:
    x = block.ln_1(x)
    x = block.ln_2(x + block.attn(x))
    return x + block.mlp(x)


@blockwise("norms of what attention and MLP write, not of what they read")
def norm_of_outputs(block: Any, x: Tensor) -> Tensor:
    x = x + block.ln_1(block.attn(x))
    return x + block.ln_2(block.mlp(x))


@blockwise("attention and MLP in parallel, each behind its norm")
def parallel(block: Any, x: Tensor) -> Tensor:
    return x + block.attn(block.ln_1(x)) + block.mlp(block.ln_2(x))


@blockwise("attention and MLP in parallel behind ln_1")
def parallel_one_norm(block: Any, x: Tensor) -> Tensor:
    y = block.ln_1(x)
    return x + block.attn(y) + block.mlp(y)


@blockwise("no residual around attention")
def no_attention_residual(block: Any, x: Tensor) -> Tensor:
    x = block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_2(x))


@blockwise("no residual around the MLP")
def no_mlp_residual(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_1(x))
    return block.mlp(block.ln_2(x))


@blockwise("no residuals")
def no_residuals(block: Any, x: Tensor) -> Tensor:
    return block.mlp(block.ln_2(block.attn(block.ln_1(x))))


@blockwise("the residual of the MLP taken before attention")
def early_mlp_residual(block: Any, x: Tensor) -> Tensor:
    y = x + block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_2(y))


@blockwise("an MLP that reads attention's output without the residual")
def mlp_of_attention(block: Any, x: Tensor) -> Tensor:
    y = block.attn(block.ln_1(x))
    return x + y + block.mlp(block.ln_2(y))


@blockwise("the stream added to itself in place of attention's output: x + x")
def stream_for_attention(block: Any, x: Tensor) -> Tensor:
    x = x + x
    return x + block.mlp(block.ln_2(x))


@blockwise("the stream added to itself in place of the MLP's output: x + x")
def stream_for_mlp(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_1(x))
    return x + x


@blockwise("attention's output added twice")
def twice_attention(block: Any, x: Tensor) -> Tensor:
    x = x + 2 * block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_2(x))


@blockwise("the MLP before attention")
def mlp_first(block: Any, x: Tensor) -> Tensor:
    x = x + block.mlp(block.ln_2(x))
    return x + block.attn(block.ln_1(x))


@blockwise("no ln_1")
def no_ln_1(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(x)
    return x + block.mlp(block.ln_2(x))


@blockwise("no ln_2")
def no_ln_2(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_1(x))
    return x + block.mlp(x)


@blockwise("ln_1 and ln_2 exchanged")
def exchanged_norms(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_2(x))
    return x + block.mlp(block.ln_1(x))


@blockwise("ln_1 in place of ln_2")
def ln_1_twice(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_1(x))
    return x + block.mlp(block.ln_1(x))


@blockwise("ln_2 in place of ln_1")
def ln_2_twice(block: Any, x: Tensor) -> Tensor:
    x = x + block.attn(block.ln_2(x))
    return x + block.mlp(block.ln_2(x))


@blockwise("no attention")
def no_attention(block: Any, x: Tensor) -> Tensor:
    return x + block.mlp(block.ln_2(x))


@blockwise("no MLP")
def no_mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.attn(block.ln_1(x))


# Which blocks there are


def ordered(words: str, order: Sequence[int], rank: int = 0) -> Mistake:
    """Return a mistake in the order of the blocks."""

    def put(model: Any, swaps: Swaps) -> None:
        blocks = [model.h[layer] for layer in order]
        swaps.set(model, "h", nn.ModuleList(blocks))

    return Mistake(words, put, moves_blocks=True, rank=rank)


@OF_GPT2.add
def wrong_orders(config: Any) -> Iterator[Mistake]:
    """Yield mistakes in which blocks there are, and in which order."""
    layers = list(range(config.n_layer))
    last = config.n_layer - 1
    if last > 0:
        yield ordered("the blocks in reverse order", layers[::-1])
        yield ordered("the last block missing", layers[:-1])
        yield ordered("the first block missing", layers[1:])
        yield ordered("the weights of block 0 in every block", [0] * len(layers))
        yield ordered(f"the weights of block {last} in every block", [last] * len(layers))
    if last > 1:
        yield ordered("the blocks from block 1 on, and block 0 last", [*layers[1:], 0])
        yield ordered("block 0 missing, and the last block twice", [*layers[1:], last])
        yield ordered("the last block alone: every block reads the embeddings", [last])
    by_name = sorted(layers, key=str)
    if by_name != layers:
        yield ordered("the blocks in the order of their names: h.1, h.10, h.11, h.2", by_name)
    for layer in layers:
        yield ordered(f"block {layer} twice", [*layers[: layer + 1], *layers[layer:]], rank=1)
    for layer in layers[1:-1]:
        yield ordered(f"block {layer} missing", [*layers[:layer], *layers[layer + 1 :]], rank=1)
    for layer in layers[1:]:
        exchanged = [*layers]
        exchanged[layer - 1], exchanged[layer] = layer, layer - 1
        yield ordered(f"blocks {layer - 1} and {layer} exchanged", exchanged, rank=1)


@mistake("no last norm", part=MistakePart.LAST_NORM)
def no_last_norm(model: Any, swaps: Swaps) -> None:
    swaps.set(model, "ln_f", nn.Identity())


@mistake("the last norm twice", part=MistakePart.LAST_NORM)
def last_norm_twice(model: Any, swaps: Swaps) -> None:
    swaps.set(model, "ln_f", nn.Sequential(model.ln_f, model.ln_f))


class NormBlock(nn.Module):
    """A norm in the list of blocks."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.ln_1 = self.ln_2 = norm

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: object = None) -> Tensor:
        return self.norm(x)


@mistake("the last norm after every block too", moves_blocks=True)
def norm_each_block(model: Any, swaps: Swaps) -> None:
    blocks = []
    for block in model.h:
        blocks += [block, NormBlock(model.ln_f)]
    swaps.set(model, "h", nn.ModuleList(blocks))


# The activation


def activating(words: str, *, unless: Sequence[str] = (), form: str = "") -> Callable[[Activation], Activation]:
    """Decorate a function in place of the MLP's activation.

    Args:
        words: with "{}" for the right one.
        unless: names of the right one, in a config, that are this function.
        form: the function of x as code.
    """

    def add(function: Activation) -> Activation:
        def put(model: Any, swaps: Swaps) -> None:
            for block in model.h:
                swaps.set(block.mlp, "act", function)

        @OF_GPT2.add
        def of(config: Any) -> Iterator[Mistake]:
            name = config.activation_function
            if name not in unless:
                activation = OWN.get(name, name)
                cure = ""
                if form and activation in FORMS:
                    cure = f"Write {FORMS[activation]} in place of {form}."
                yield Mistake(words.format(activation), put, cure=cure)

        return function

    return add


activating("the exact GELU in place of {}", unless=["gelu"], form=FORMS["erf"])(F.gelu)
activating("ReLU in place of {}", form=FORMS["ReLU"])(F.relu)
activating("SiLU in place of {}", form=FORMS["SiLU"])(F.silu)
activating("tanh alone as the activation")(torch.tanh)
activating("a leaky ReLU in place of {}")(F.leaky_relu)
activating("ELU in place of {}")(F.elu)


@activating("the tanh GELU in place of {}", unless=["gelu_new", "gelu_pytorch_tanh"], form=FORMS["tanh"])
def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@activating("the sigmoid GELU, x sigmoid(1.702 x), in place of {}", form="x * sigmoid(1.702 * x)")
def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


@activating("no activation in the MLP")
def linear(x: Tensor) -> Tensor:
    return x


@activating("squared ReLU in place of {}")
def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


@activating("the tanh GELU without its cubic term")
def gelu_without_cube(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x))


@activating("the tanh GELU without sqrt(2 / pi)")
def gelu_without_root(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(x + 0.044715 * x**3))


@activating("the tanh GELU with x^2 in place of x^3")
def gelu_with_square(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**2)))


@activating("the tanh GELU with sqrt(2 / pi) and 0.044715 exchanged")
def gelu_with_exchanged_constants(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.044715 * (x + math.sqrt(2 / math.pi) * x**3)))


@activating("the tanh GELU without the factor 0.5")
def gelu_without_half(x: Tensor) -> Tensor:
    return 2 * tanh_gelu(x)


@mistake("the activation applied twice")
def twice_activated(model: Any, swaps: Swaps) -> None:
    for block in model.h:
        act = block.mlp.act
        swaps.set(block.mlp, "act", lambda x, act=act: act(act(x)))
