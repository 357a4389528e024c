"""Time every level of instructions beside llama.cpp, built for the same level: one text, 16 texts, a prompt of 512.

    python scripts/bench/levels.py avx2=DIRECTORY avx512=DIRECTORY --json levels.json

A directory holds the package llama_cpp; it was built with ``CMAKE_ARGS`` of the level, for example
``-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import typer
from results import JsonFile, keep

KINDS = {
    "float32": ("--dtype float32", "f32"),
    "bfloat16": ("--dtype bfloat16", "bf16"),
    "int8": ("--quantize int8", "q8_0"),
}
SHAPES = {
    "one text": "--repeats 5", "16 texts": "--batch 16 --new-tokens 32 --repeats 3",
    "reading 512": "--prompt-tokens 512 --new-tokens 2 --draft none --repeats 3",
}  # fmt: skip
MEDIANS = ("prefill_ms", "total_ms")


def main(levels: list[str], json_file: JsonFile = None) -> None:
    """Print medians: tokens a second, and the milliseconds of a step after the first token and of the prompt."""
    results = []
    for level, folder in (level.split("=") for level in levels):
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        for shape, plan in SHAPES.items():
            for kind, (options, other) in KINDS.items():
                command = f"{options} {plan} --against llama.cpp:{other} --json -".split()
                done = subprocess.run(
                    [sys.executable, str(Path(__file__).with_name("others.py")), *command], check=True,
                    env=os.environ | {"MINIGPT_KERNEL": level, "PYTHONPATH": path}, stdout=subprocess.PIPE,
                )  # fmt: skip
                report = json.loads(done.stdout)
                limit, batch = report["limit"], report["plan"]["batch"]
                for one in report["contestants"]:
                    figures = {name: one[name]["median"] for name in MEDIANS}
                    figures |= {name: one[name] for name in ("tokens_per_second", "acceptance")}
                    figures["step_ms"] = 1000 * batch / one["decode_tokens_per_second"]
                    figures["share_of_memory"] = one["decode_tokens_per_second"] / limit["by_memory"]
                    results.append({"level": level, "shape": shape, "kind": kind, "name": one["name"]} | figures)
                    print(
                        level, shape, kind, one["name"], {name: round(value or 0, 2) for name, value in figures.items()}
                    )
                environment = {k: v for k, v in report["environment"].items() if k != "decoding"}
                keep({"environment": environment, "rows": results}, json_file)


if __name__ == "__main__":
    typer.run(main)
