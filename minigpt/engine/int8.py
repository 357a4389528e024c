"""Weights in eight bits, so that decoding reads a quarter of them; everything else stays as exact as it was.

C embedding, V vocabulary, R rows: every token of a batch is one.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from minigpt.engine.packed import Holder, affine_layers, held
from minigpt.engine.pages import MappedFiles
from minigpt.engine.root import GPT2
from minigpt.errors import ConfigError
from minigpt.model.checks import check_gpt2

ENGINE = "fbgemm"  # PyTorch's integer products for x86
MOST = 127  # the largest weight: both signs have as many steps
AT_ONCE = 4096  # channels rounded at a time, so that it takes no room to speak of


class Int8Linear(Holder):
    """``y = x W^T + b`` with every row of ``W``, an output channel, held as integers of -127 to 127 times a scale.

    Only the weights are rounded. An input row is split in two, the whole steps of its largest value's 127th and what is
    left over in steps 254 times as fine, and both go through the same integer product: so it is good to 16 bits, twice
    as many as bfloat16 has. Integers add up to the same in any order, so a row never depends on its batch mates. On a
    processor without VNNI, whose 16-bit sums would overflow, it is good to 14.

    Args:
        rows: (out, in), the weight of ``F.linear``.
        bias: (out), or None.

    Raises:
        ConfigError: a weight is not finite, or this PyTorch has no integer products.
    """

    def __init__(self, rows: Float[Tensor, "out inp"], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias
        self.shape = tuple(rows.shape)
        self.steps = 127 if torch.cpu._is_vnni_supported() else 63
        self.hold(prepacked(rows))

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        rows = x.reshape(-1, x.shape[-1]).float()  # (R, in)
        step = rows.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny) / self.steps  # (R, 1)
        scaled = rows / step
        coarse = scaled.round()
        fine = (scaled - coarse).mul_(2 * self.steps)
        both = self.product(torch.cat((coarse, fine)))  # (2 R, out)
        y = torch.add(*both.chunk(2), alpha=1 / (2 * self.steps))  # (R, out)
        y = y.mul_(step) if self.bias is None else torch.addcmul(self.bias, y, step)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def product(self, whole: Float[Tensor, "rows inp"]) -> Float[Tensor, "rows out"]:
        """``whole W^T`` for whole numbers of at most ``steps``."""
        if torch.compiler.is_compiling():
            return torch.ops.minigpt.int8_product(whole, self.number, self.shape[0], self.steps + 1)
        return _integer_product(whole, self.steps + 1, self.packed)

    def __getstate__(self) -> dict[str, Any]:
        rows = torch.ops.quantized.linear_unpack(self.packed)[0]  # what is packed cannot be sent to another process
        return {**vars(self), "packed": (rows.int_repr(), rows.q_per_channel_scales())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "packed": _packed(*state["packed"])})

    def check_applicable(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse what would take the layer to another device, where there is no such product."""
        if not (there := fn(torch.empty(0, device="cpu"))).is_cpu:
            raise ConfigError(f"weights in eight bits are for the CPU, and cannot move to {there.device}")

    def extra_repr(self) -> str:
        return "{1}, {0}, int8".format(*self.shape)


def _integer_product(whole: Tensor, zero: int, packed: torch.ScriptObject) -> Tensor:
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(whole, 1.0, zero, packed)


torch.library.define("minigpt::int8_product", "(Tensor whole, int layer, int out, int zero) -> Tensor")


@torch.library.impl("minigpt::int8_product", "cpu")
def _int8_product(whole: Tensor, layer: int, out: int, zero: int) -> Tensor:
    return _integer_product(whole, zero, held(layer))


@torch.library.register_fake("minigpt::int8_product")
def _int8_product_shape(whole: Tensor, layer: int, out: int, zero: int) -> Tensor:
    return whole.new_empty(len(whole), out)


@torch.no_grad()
def quantize_int8(model: GPT2) -> GPT2:
    """Put an ``Int8Linear`` in place of every affine layer and the head; return ``model``.

    Embeddings, norms and biases stay as they are. The model is for inference then: the weights of the checkpoint are
    gone. A layer with hooks, or with a forward of somebody else's, stays as it is.

    Raises:
        ConfigError: if the model is not a GPT2 on the CPU in "fast" arithmetic with weights as they were loaded, a
            weight is not finite, or this PyTorch has no integer products.
    """
    check_gpt2(model)
    check_roundable(model.arithmetic)
    if model.quantize is not None or model.fast_head is not None:
        raise ConfigError("weights must be as they were loaded to be quantized, got packed or quantized ones")
    if not model.wte.weight.is_cpu:
        raise ConfigError(f"weights of eight bits are for the CPU, got {model.wte.weight.device}")
    files = MappedFiles()
    model.fast_head = Int8Linear(model.head_rows(), None).train(model.training)
    files.give_back(model.head_rows())
    if not model.config.tie_word_embeddings:
        del model.lm_head
    for name in affine_layers(model):
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, Int8Linear(layer.weight.t(), layer.bias).train(layer.training))
        files.give_back(layer.weight)
    model.quantize = "int8"
    return model.requires_grad_(False)


def check_roundable(arithmetic: str) -> None:
    """Check that the arithmetic is not "reference": rounded weights cannot give the reference's bits."""
    if arithmetic == "reference":
        raise ConfigError('quantize="int8" needs arithmetic="fast": rounded weights cannot give the reference\'s bits')


def prepacked(rows: Float[Tensor, "out inp"]) -> torch.ScriptObject:
    """The weight as the integer kernels read it: each row rounded to 127 steps of its largest value.

    Raises:
        ConfigError: a value is not finite, or the processor has no such kernels.
    """
    if ENGINE not in torch.backends.quantized.supported_engines:
        raise ConfigError(f'quantize="int8" needs PyTorch\'s {ENGINE} kernels, which are for x86 processors only')
    integers = torch.empty(rows.shape, dtype=torch.int8, device="cpu")  # (out, in)
    scale = torch.empty(len(rows), dtype=torch.float32, device="cpu")  # (out)
    for at in range(0, len(rows), AT_ONCE):
        some = rows[at : at + AT_ONCE].detach().float()
        steps = some.abs().amax(1).clamp_min(torch.finfo(some.dtype).tiny) / MOST
        integers[at : at + AT_ONCE], scale[at : at + AT_ONCE] = (some / steps[:, None]).round(), steps
    if not scale.isfinite().all():
        raise ConfigError("a weight is not finite, so it cannot be held in eight bits")
    return _packed(integers, scale)


def _packed(integers: Int8[Tensor, "out inp"], scale: Float[Tensor, " out"]) -> torch.ScriptObject:
    with warnings.catch_warnings():  # that PyTorch means to move its quantized tensors elsewhere
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(scale), dtype=torch.long, device="cpu")
        make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
        quantized = make(integers, scale.double(), zeros, 0)
    chosen, torch.backends.quantized.engine = torch.backends.quantized.engine, ENGINE
    try:
        return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = chosen
