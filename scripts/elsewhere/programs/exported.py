"""transformers' GPT-2 as an ONNX file, by torch's exporter."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

PACKAGES = ["onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0"]


class Logits(nn.Module):
    """The logits alone, of ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def model_of(folder: Path, **how: Any) -> GPT2LMHeadModel:
    """Return transformers' model of the demo."""
    return GPT2LMHeadModel.from_pretrained(folder / "demo", **how).eval()


def export(folder: Path) -> Path:
    """Write the demo as an ONNX file that takes ids (B, T), if it is not there; return its path."""
    file = folder / "gpt2.onnx"
    if not file.exists():
        ids = torch.zeros(2, 8, dtype=torch.long)
        sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")},)
        torch.onnx.export(Logits(model_of(folder)), (ids,), str(file), dynamic_shapes=sizes, dynamo=True, verbose=False)
    return file
