"""A model of a published size with random weights is judged block by block: its verdicts, time and peak of memory.

    python scripts/bench/large.py /tmp/llama-7b --shape llama-7b --memory 8GB --json docs/results/large-llama-7b.json

Writes the model into the folder, shard by shard, unless it is there. The norm of the sites is swapped in at all of
them and judged, as a user does it. Then the original is kept in a record. Last a norm with another eps at one site is
judged against the record; the report must name the site. Each command runs in a process of its own, whose peak of
memory is what ``/usr/bin/time -v`` shows. Exit status 1: a verdict is another one, or the site is not named.
"""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from safetensors.torch import save_file

import minigpt
from minigpt.bench.generate import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of scripts

from bench.results import JsonFile, keep, show

SHARD = 2 * 10**9  # bytes
LLAMA_7B = transformers.LlamaConfig()  # its default sizes are those of Llama 7B
QWEN3_8B = transformers.Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


def qwen2(vocab_size: int, width: int, inner: int, heads: int, groups: int) -> Any:
    """Return the config of a Qwen2 of 24 layers.

    Args:
        inner: the width inside of an MLP.
        groups: the heads of keys and values.
    """
    return transformers.Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=24,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=True,
    )


GPT2_XL = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
SHAPES: dict[str, tuple[Any, torch.dtype, str, str]] = {  # config, dtype, the sites' own norm, and a site
    "llama-7b": (LLAMA_7B, torch.bfloat16, "rms", "model.layers.0.input_layernorm"),
    "qwen3-8b": (QWEN3_8B, torch.bfloat16, "rms", "model.layers.0.input_layernorm"),
    "qwen2-0.5b": (qwen2(151936, 896, 4864, 14, 2), torch.bfloat16, "rms", "model.layers.0.input_layernorm"),
    "qwen2-0.3b": (qwen2(32000, 1024, 2816, 16, 4), torch.bfloat16, "rms", "model.layers.0.input_layernorm"),
    "gpt2-xl": (GPT2_XL, torch.float32, "fused", "h.0.ln_1"),
}
WRONG_EPS = '''"""The norms of a site with an eps of 1e-3."""

import torch
from torch import nn

EPS = 1e-3


class WrongRMSNorm(nn.RMSNorm):
    exact = "rms_norm"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, EPS)


class WrongLayerNorm(nn.LayerNorm):
    exact = "layer_norm"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, EPS)
'''

Shape = Annotated[str, typer.Option(help=", ".join(SHAPES))]
Memory = Annotated[str, typer.Option(help="What the model may take, as parity --memory takes it.")]


def main(folder: Path, shape: Shape = "llama-7b", memory: Memory = "8GB", json_file: JsonFile = None) -> None:
    """Write the model, judge it, keep it, judge it against what is kept, and print figures of each."""
    config, dtype, norm, site = SHAPES[shape]
    if not (folder / "config.json").exists():
        # In a process of its own: what this one holds would count as the peak of each command that it starts.
        writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(config, dtype, folder))
        writer.start()
        writer.join()
    wrong, record = folder / "wrong_eps.py", folder / "record.truth"
    wrong.write_text(WRONG_EPS, encoding="utf-8")
    name = "WrongRMSNorm" if norm == "rms" else "WrongLayerNorm"
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    results: dict[str, Any] = {
        "environment": environment("transformers", "accelerate", "safetensors"),
        "model": {"shape": shape, "architecture": config.model_type, "bytes": weights, "dtype": str(dtype)},
        "memory": memory,
    }
    right = run("parity", "--model", folder, "--norm", norm, "--memory", memory)
    results["all norms swapped"] = right
    keep(results, json_file)
    kept = run("parity", "--model", folder, "--memory", memory, "--record", record)
    results["the original kept in a record"] = kept | {"record_bytes": record.stat().st_size}
    keep(results, json_file)
    planted = run(
        *("parity", "--original", record, "--model", folder, "--memory", memory),
        *("--norm", f"{wrong}:{name}", "--sites", site),
    )
    is_named = site in " ".join(planted["reasons"])
    results["another eps at one site"] = planted | {"site": site, "is_named": is_named}
    record.unlink(missing_ok=True)
    show(results, json_file)
    is_right = right["verdict"] == "pass" and planted["verdict"] == "fail" and is_named
    raise typer.Exit(int(not is_right))


def write_model(config: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write a model with random weights, one shard in memory at a time, and the demo's tokenizer beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards(config, dtype), 1):
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(minigpt.__file__).parent / "demo" / name, folder)
    config.dtype = dtype
    config.architectures = [type(empty_model(config)).__name__]
    config.save_pretrained(folder)


def empty_model(config: Any) -> Any:
    """Return the modules of a model without values."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def shards(config: Any, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield weights by their names, at most SHARD bytes at once."""
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, parameter in empty_model(config).named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
            value = torch.randn(parameter.shape, generator=generator) * 0.1 + 1
        else:
            value = torch.randn(parameter.shape, generator=generator) * 0.02
        value = value.to(dtype)
        if shard and size + value.nbytes > SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = value
        size += value.nbytes
    yield shard


def run(*words: object) -> dict[str, Any]:
    """Run a command of minigpt; return what its report says, if it judges, its time, and its peak of memory."""
    command = [sys.executable, "-m", "minigpt", *map(str, words)]
    judges = "--norm" in words
    if judges:
        command += ["--json", "-"]
    print("$ minigpt", *words, file=sys.stderr, flush=True)
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output = process.stdout.read() if process.stdout is not None else ""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise SystemExit(process.returncode)
    figures: dict[str, Any] = {}
    if judges:
        report = json.loads(output)
        for name in ("verdict", "reasons", "notes"):
            figures[name] = report[name]
        figures["ratio"] = report["logits"]["ratio"]
    figures["seconds"] = round(seconds, 1)
    figures["processor_seconds"] = round(usage.ru_utime + usage.ru_stime, 1)
    figures["peak_bytes"] = usage.ru_maxrss * 1024  # Linux counts in KiB
    return figures


if __name__ == "__main__":
    typer.run(main)
