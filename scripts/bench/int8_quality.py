"""How far do int8 weights move the next token's distribution? KL divergence to float32 of three implementations.

python scripts/bench/int8_quality.py --model demo --text held.txt [--json FILE]

They are minigpt, CTranslate2's int8 and llama.cpp's Q8_0, on the same checkpoint and text. One that is not installed is
left out.
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

import minigpt

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.others import LlamaCpp, write_ctranslate2
from bench.results import JsonFile, show

WINDOW = 128  # tokens of a text that are judged together


def main(
    text: Annotated[Path, typer.Option()], model: str = "demo", windows: int = 8, json_file: JsonFile = None
) -> None:
    """Print, and with --json write, the mean divergences on so many windows of a text."""
    ids = minigpt.Tokenizer.from_pretrained(model).encode(text.read_text("utf-8"))
    rows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)[:windows]
    truth = ours(model, None, rows)
    found = {"minigpt int8": divergence(truth, ours(model, "int8", rows))}
    with tempfile.TemporaryDirectory() as folder:
        minigpt.save_pretrained(minigpt.from_pretrained(model, device="cpu", dtype="float32"), folder)
        if find_spec("ctranslate2"):
            found["ctranslate2 int8"] = divergence(truth, by_ctranslate2(folder, rows))
        if find_spec("llama_cpp"):
            found["llama.cpp q8_0"] = divergence(truth, by_llama_cpp(folder, rows))
    show({"model": model, "tokens": rows.numel(), "kl_mean": found}, json_file)


@torch.inference_mode()
def ours(source: str, quantize: str | None, windows: Tensor) -> Tensor:
    return minigpt.from_pretrained(source, device="cpu", dtype="float32", quantize=quantize)(windows)


def by_ctranslate2(folder: str, windows: Tensor) -> Tensor:
    import ctranslate2  # pyright: ignore[reportMissingImports]

    model = ctranslate2.Generator(write_ctranslate2(folder, "int8"), device="cpu", compute_type="int8")
    logits = model.forward_batch([[f"t{token}" for token in window] for window in windows.tolist()])
    return torch.from_numpy(np.array(logits))


def by_llama_cpp(folder: str, windows: Tensor) -> Tensor:
    rows = windows.tolist()
    logits = LlamaCpp(folder, rows, "q8_0", room=WINDOW).logits(rows, [0] * len(rows), every=True)
    return logits.view(*windows.shape, -1)


def divergence(truth: Tensor, given: Tensor) -> float:
    """Return the mean of KL(truth || given) in nats over all positions."""
    wanted, found = (logits.double().log_softmax(-1) for logits in (truth, given[..., : truth.shape[-1]]))
    return (wanted.exp() * (wanted - found)).sum(-1).mean().item()


if __name__ == "__main__":
    typer.run(main)
