"""transformers' GPT-2 by PyTorch's own tools: torch.compile, AOTInductor, torchao."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from elsewhere.gpt2 import Row
from elsewhere.programs.exported import Logits, model_of
from torch import Tensor

PACKAGES = ["torchao==0.18.0"]


def rows(folder: Path) -> Iterator[Row]:
    yield Row("torch.compile", "float32", partial(compiled, folder, torch.float32), "torch")
    fused = "fused chains stay in float32"
    yield Row("torch.compile", "bfloat16, at float32", partial(compiled, folder, torch.bfloat16), "torch", fused)
    yield Row("torch.compile", "bfloat16", partial(compiled, folder, torch.bfloat16), "torch", dtype="bfloat16")
    yield Row("AOTInductor", "float32", partial(packaged, folder), "torch")
    head = "the head alone is rounded: Conv1D is left out"
    yield Row("torchao", "int8 weights", partial(quantized, folder), "torchao", head)


def compiled(folder: Path, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the compiled model as a function."""
    model: Any = torch.compile(Logits(model_of(folder, dtype=dtype)), dynamic=True)
    return lambda ids: model(ids)


def packaged(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the model as AOTInductor packs it."""
    sizes = ({0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seq", min=2, max=256)},)
    ids = torch.zeros(2, 8, dtype=torch.long)
    exported = torch.export.export(Logits(model_of(folder)), (ids,), dynamic_shapes=sizes)
    file = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "gpt2.pt2"))
    model: Any = torch._inductor.aoti_load_package(file)
    return lambda ids: model(ids.contiguous())


def quantized(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the model with torchao's weights of eight bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = model_of(folder)
    quantize_(model, Int8WeightOnlyConfig())
    return Logits(model).forward
