"""Time every level of instructions beside other programs, on files of one model, and judge what each program computes.

    python scripts/bench/levels.py judge WORK --json levels.json
    python scripts/bench/levels.py measure WORK avx2=DIRECTORY bf16=DIRECTORY --json levels.json

The folder WORK gets a model of GPT-2 124M's shape with random weights, and its GGUF files. OpenVINO's are exported once
into WORK/openvino, where ``optimum-intel[openvino]`` and ``nncf`` are installed; KIND is fp32, and then int8:

    optimum-cli export openvino -m WORK/model --task text-generation-with-past --weight-format KIND WORK/openvino/KIND

A directory holds packages for a level. llama_cpp was built with ``CMAKE_ARGS`` of the level, for example
``-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON``. The other programs take the best level
of the processor, so they are timed at that level alone.

``judge`` keeps two figures of each program and kind: the error of the logits, in errors of transformers at float32, and
the mean KL divergence. GenAI's pipeline has no logits, so OpenVINO is judged by the exported file with the same
properties, one token at a time. The pipeline's log-probabilities of next tokens are as far off in float32 (to 2 %) and
bfloat16; with int8 they are some 1.4 times as far off, since it rounds its cache in another way.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

import torch
import typer
from bench.others import write_ctranslate2, write_gguf
from bench.results import JsonFile, keep
from elsewhere.programs.llama_cpp import quantized
from torch import Tensor

import minigpt
from minigpt import engines
from minigpt.bench.programs import open_model
from minigpt.engine import kernel
from minigpt.engine.step import StepKernel

OURS = {"float32": "--dtype float32", "bfloat16": "--dtype bfloat16", "int8": "--quantize int8"}
SHAPES = {
    "one text": "--repeats 5",
    "8 texts": "--batch 8 --same-length --new-tokens 32 --repeats 3",
    "16 texts": "--batch 16 --same-length --new-tokens 32 --repeats 3",
    "reading 512": "--prompt-tokens 512 --new-tokens 2 --draft none --repeats 3",
}
MEDIANS = ("prefill_ms", "total_ms")


class Peer(NamedTuple):
    """Another program on a file of the model.

    Attributes:
        ours: our kind, with which it is timed in turns.
        program, kind: in the words of others.py; {} is WORK.
    """

    ours: str
    program: str
    kind: str


PEERS = {
    "llama.cpp F32": Peer("float32", "llama.cpp", "{}/f32.gguf"),
    "OpenVINO, hint f32": Peer("float32", "openvino", "{}/openvino/fp32:f32"),
    "transformers float32": Peer("float32", "transformers", "float32"),
    "CTranslate2 float32": Peer("float32", "ctranslate2", "float32"),
    "llama.cpp BF16": Peer("bfloat16", "llama.cpp", "{}/bf16.gguf"),
    "OpenVINO by default": Peer("bfloat16", "openvino", "{}/openvino/fp32"),
    "transformers bfloat16": Peer("bfloat16", "transformers", "bfloat16"),
    "llama.cpp Q8_0": Peer("int8", "llama.cpp", "{}/q8_0.gguf"),
    "llama.cpp Q4_K_M": Peer("int8", "llama.cpp", "{}/Q4_K_M.gguf"),
    "llama.cpp Q4_0": Peer("int8", "llama.cpp", "{}/Q4_0.gguf"),
    "OpenVINO int8": Peer("int8", "openvino", "{}/openvino/int8"),
    "CTranslate2 int8": Peer("int8", "ctranslate2", "int8"),
}
app = typer.Typer()


@app.command()
def judge(work: Path, json_file: JsonFile = None) -> None:
    """Write the files that are missing, and judge every program and kind that has no figures yet."""
    if not (work / "model").exists():
        torch.manual_seed(0)
        minigpt.save_pretrained(minigpt.GPT2(minigpt.GPT2Config.preset("gpt2")), work / "model")
    for kind in ("f32", "bf16", "q8_0"):
        if not (work / f"{kind}.gguf").exists():
            write_gguf(work / "model", kind).rename(work / f"{kind}.gguf")
    for kind in ("Q4_0", "Q4_K_M"):
        if not (work / f"{kind}.gguf").exists():
            quantized(work / "f32.gguf", kind)
    record, results = work / "original.safetensors", kept(json_file)
    if not record.exists():
        minigpt.Original(work / "model", dtype="float32", device="cpu").save(record)
    original = minigpt.Original.load(record)
    for name, candidate in candidates(work, set(results["parity"])):
        report = original.judge(lambda ids, candidate=candidate: candidate(ids), diagnose=False).to_dict()
        results["parity"][name] = {"ratio": report["logits"]["ratio"], "kl": report["distribution"]["kl_mean"]}
        print(name, results["parity"][name])
        keep(results, json_file)


def candidates(work: Path, judged: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield ours by kind and the others by name, each open for the judge, but for those that are judged."""
    for kind in OURS:
        if kind not in judged:
            yield kind, by_kernel(open_model(str(work / "model"), kind))
    for name, peer in PEERS.items():
        if name in judged:
            continue
        place, _, hint = peer.kind.format(work).partition(":")
        if peer.program == "llama.cpp":
            yield name, engines.gguf(place, flash_attn="auto")
        elif peer.program == "openvino":
            hints = {"INFERENCE_PRECISION_HINT": hint} if hint else {}
            engine = engines.openvino(f"{place}/openvino_model.xml", **hints)
            engine.by_one = True  # GenAI reads the keys and values of a prompt too from its cache, which is rounded
            yield name, engine
        elif peer.program == "ctranslate2":
            folder = write_ctranslate2(str(work / "model"), peer.kind)
            yield name, engines.ctranslate2(folder, compute_type=peer.kind)
        else:
            from transformers import AutoModelForCausalLM

            yield name, AutoModelForCausalLM.from_pretrained(work / "model", dtype=peer.kind)


def by_kernel(model: minigpt.GPT2) -> Callable[[Tensor], Tensor]:
    """Return ids (1, T) -> logits (1, T, V) as ours are written: by the kernel, which a forward pass does not take."""
    step = StepKernel(model)

    def logits_of(ids: Tensor) -> Tensor:
        tokens = ids[0].tolist()
        cache = model.new_cache(1, len(tokens)).store.zero_()
        return step(tokens, [0] * len(tokens), range(len(tokens)), cache)[None]

    return logits_of


@app.command()
def measure(
    work: Path, levels: list[str], shape: list[str] | None = None, repeats: int = 0, json_file: JsonFile = None
) -> None:
    """Print medians: tokens a second, and the milliseconds of a step after the first token and of the prompt."""
    results, best = kept(json_file) | {"rows": []}, kernel.functions().levels[0]
    for level, folders in (level.split("=") for level in levels):
        path = os.pathsep.join(filter(None, [folders, os.environ.get("PYTHONPATH")]))
        for words in shape or SHAPES:
            for kind, options in OURS.items():
                names = {}
                for name, peer in PEERS.items():
                    if peer.ours == kind and (level == best or peer.program == "llama.cpp"):
                        names[f"{peer.program}:{peer.kind.format(work)}"] = name
                plan = f"--model {work / 'model'} {options} {SHAPES[words]} --json -".split()
                plan += ["--against", ",".join(names)] + (["--repeats", str(repeats)] if repeats else [])
                done = subprocess.run(
                    [sys.executable, str(Path(__file__).with_name("others.py")), *plan],
                    check=True, env=os.environ | {"MINIGPT_KERNEL": level, "PYTHONPATH": path}, stdout=subprocess.PIPE,
                )  # fmt: skip
                report = json.loads(done.stdout)
                for one in report["contestants"]:
                    name = names.get(f"{one['name']}:{one['kind']}", one["name"])
                    figures = figures_of(one, report)
                    results["rows"].append({"level": level, "shape": words, "kind": kind, "name": name} | figures)
                    print(level, words, kind, name, {name: round(value or 0, 2) for name, value in figures.items()})
                results["environment"] = {k: v for k, v in report["environment"].items() if k != "decoding"}
                keep(results, json_file)


def figures_of(contestant: dict[str, Any], report: dict[str, Any]) -> dict[str, float | None]:
    """Return what is kept of a contestant's figures."""
    figures = {name: contestant[name]["median"] for name in MEDIANS}
    figures |= {name: contestant[name] for name in ("tokens_per_second", "acceptance")}
    rate = contestant["decode_tokens_per_second"]
    figures["step_ms"] = 1000 * report["plan"]["batch"] / rate
    figures["share_of_memory"] = rate / report["limit"]["by_memory"]
    return figures


def kept(file: Path | None) -> dict[str, Any]:
    """Return the results that a file has, if there is one."""
    empty = {"environment": {}, "parity": {}, "rows": []}
    return empty | (json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else {})


if __name__ == "__main__":
    app()
