"""Which call of the library multiplies a row, or some, by GPT-2 124M's weights soonest on this processor?

python scripts/bench_products.py --json docs/results/products-cpu.json
python scripts/bench_products.py --rows 64

For every weight of a block and for the head, every call that ``engine.product.product`` and ``engine.layout.lay_out``
can choose from, taken in turns over weights that no cache holds, beside the sum over as many bytes: nothing can be
faster. Each product is held to float64 before it is timed.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import typer
from results import JsonFile, show
from torch import Tensor, nn

from minigpt import GPT2Config
from minigpt.engine.packed import PackedLinear
from minigpt.engine.product import in_slabs, onednn_linear, product, sideways, straight
from minigpt.engine.strips import StripedLinear
from minigpt.measure.environment import environment
from minigpt.measure.stopwatch import Spread, in_turns, wall_seconds
from minigpt.processor import PACKABLE

BEYOND_CACHES = 2**27  # bytes of different weights, so that each comes from memory
CPU = torch.device("cpu")


def main(json_file: JsonFile = None, dtype: str = "float32", rows: int = 1, repeats: int = 15) -> None:
    """Print, and with --json write, GB of weights a second, multiplied by ``rows`` rows.

    The median of ``repeats`` interleaved runs, and the percentiles beside it.
    """
    config = GPT2Config.preset("gpt2")
    width, inner = config.n_embd, config.inner_size
    shapes = {
        "c_attn": (width, 3 * width), "attn.c_proj": (width, width),
        "c_fc": (width, inner), "mlp.c_proj": (inner, width), "head": (width, config.vocab_size),
    }  # fmt: skip
    torch.manual_seed(0)
    measured = {name: _measured(shape, getattr(torch, dtype), rows, repeats) for name, shape in shapes.items()}
    results = {"measured_on": environment(torch.get_num_threads()), "dtype": dtype, "rows": rows, "gb_s": measured}
    show(results, json_file)


@torch.inference_mode()
def _measured(shape: tuple[int, int], dtype: torch.dtype, rows: int, repeats: int) -> dict[str, dict[str, float]]:
    count = max(2, BEYOND_CACHES // (shape[0] * shape[1] * dtype.itemsize))
    weights = [torch.randn(shape).to(dtype) for _ in range(count)]  # (in, out)
    x, bias = torch.randn(1, rows, shape[0]).to(dtype), torch.randn(shape[1]).to(dtype)
    calls = {"sum": [torch.ones(weight.nbytes // 4).sum for weight in weights]} | _products(x, weights, bias)
    seconds = in_turns({name: _in_a_row(ready) for name, ready in calls.items()}, range(repeats + 1))
    size = weights[0].nbytes
    return {name: _gigabytes_a_second(times[1:], size) for name, times in seconds.items()}  # the first are warming up


def _products(x: Tensor, weights: list[Tensor], bias: Tensor) -> dict[str, list[Any]]:
    """By the name of a way of multiplying: one call for every weight, which by now lies as that way wants it."""
    by_rows = [weight.t().contiguous() for weight in weights]
    ways: dict[str, list[Any]] = {
        "product": [functools.partial(product, x, weight, bias) for weight in weights],
        "product by rows": [functools.partial(product, x, rows.t(), bias) for rows in by_rows],
        "W^T x^T": [functools.partial(sideways, x[0], weight, bias) for weight in weights],
        "x W": [functools.partial(straight, x[0], weight, bias) for weight in weights],
        "F.linear by rows": [functools.partial(F.linear, x[0], rows, bias) for rows in by_rows],
    }
    if x.dtype in PACKABLE:
        ways["oneDNN"] = [functools.partial(onednn_linear, x, weight.t(), bias) for weight in weights]
        ways["oneDNN by rows"] = [functools.partial(onednn_linear, x, rows, bias) for rows in by_rows]
        ways["packed"] = [functools.partial(PackedLinear(rows, nn.Parameter(bias), x.shape[1]), x) for rows in by_rows]
    if x.dtype == torch.float32 and x.shape[1] == 1:
        ways["slabs"] = [functools.partial(in_slabs, x[0], weight, bias) for weight in weights]
    if x.dtype in StripedLinear.dtypes:
        ways["strips"] = [functools.partial(StripedLinear(rows, nn.Parameter(bias.clone()), 1), x) for rows in by_rows]
    truth = x[0].double() @ weights[0].double() + bias
    for name, calls in ways.items():
        error = (calls[0]().double() - truth).norm() / truth.norm()
        assert error < 2 * torch.finfo(x.dtype).eps + 2e-6, f"{name} is off by {error:.2g}"  # added up in float32
    return ways


def _in_a_row(calls: list[Any]) -> Callable[[], float]:
    turn = itertools.cycle(calls)
    return lambda: wall_seconds(lambda: next(turn)(), len(calls), CPU)


def _gigabytes_a_second(seconds: list[float], size: int) -> dict[str, float]:
    spread = Spread.of([size / time / 1e9 for time in seconds])
    return {name: float(f"{value:.3g}") for name, value in vars(spread).items()}


if __name__ == "__main__":
    typer.run(main)
