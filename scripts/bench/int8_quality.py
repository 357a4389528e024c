"""How far do int8 weights move the next token's distribution? KL divergence to float32 of three implementations.

python scripts/bench/int8_quality.py --model demo --text held.txt [--json FILE]

They are minigpt, CTranslate2's int8 and llama.cpp's Q8_0, on the same checkpoint and text. One that is not installed is
left out.
"""

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import minigpt
from minigpt.bench.contestants import convert_for_ctranslate2
from minigpt.bench.llama import LlamaCpp, write_gguf

WINDOW = 128  # tokens of a text that are judged together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ids = minigpt.Tokenizer.from_pretrained(given.model).encode(given.text.read_text("utf-8"))
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)[: given.windows]
    truth = ours(given.model, None, windows)
    found = {"minigpt int8": divergence(truth, ours(given.model, "int8", windows))}
    with tempfile.TemporaryDirectory() as folder:
        minigpt.save_pretrained(minigpt.from_pretrained(given.model, device="cpu", dtype="float32"), folder)
        if find_spec("ctranslate2"):
            found["ctranslate2 int8"] = divergence(truth, by_ctranslate2(folder, windows))
        if find_spec("llama_cpp"):
            found["llama.cpp q8_0"] = divergence(truth, by_llama_cpp(folder, windows))
    for name, kl in found.items():
        print(f"{name:20} mean KL {kl:.3e}")
    if given.json:
        given.json.write_text(json.dumps({"model": given.model, "tokens": windows.numel(), "kl_mean": found}, indent=2))


@torch.inference_mode()
def ours(source: str, quantize: str | None, windows: Tensor) -> Tensor:
    return minigpt.from_pretrained(source, device="cpu", dtype="float32", quantize=quantize)(windows)


def by_ctranslate2(folder: str, windows: Tensor) -> Tensor:
    import ctranslate2  # pyright: ignore[reportMissingImports]

    convert_for_ctranslate2(Path(folder), "int8")
    model = ctranslate2.Generator(f"{folder}/ctranslate2-int8", device="cpu", compute_type="int8")
    logits = model.forward_batch([[f"t{token}" for token in window] for window in windows.tolist()])
    return torch.from_numpy(np.array(logits))


def by_llama_cpp(folder: str, windows: Tensor) -> Tensor:
    write_gguf(folder, "q8_0")
    rows = windows.tolist()
    logits = LlamaCpp(folder, rows, "q8_0", room=WINDOW).logits(rows, [0] * len(rows), every=True)
    return logits.view(*windows.shape, -1)


def divergence(truth: Tensor, given: Tensor) -> float:
    """Return the mean of KL(truth || given) in nats over all positions."""
    wanted, found = (logits.double().log_softmax(-1) for logits in (truth, given[..., : truth.shape[-1]]))
    return (wanted.exp() * (wanted - found)).sum(-1).mean().item()


if __name__ == "__main__":
    main()
