"""The readers fuzzed by coverage: what reaches a line of minigpt not reached before is kept, and damaged further.

python scripts/fuzz/by_coverage.py --runs 20000 --json docs/results/fuzz-atheris.json

It holds the readers to what checkpoints.py holds them to, and starts from its seeds. An input is one file of a
small checkpoint, after a byte that says which; every other change is made by the mutators of mutations.py, so that
headers, JSON and archives stay whole enough to be read far into. Only Python is seen by coverage: not what safetensors
and tokenizers are compiled from. Linux only, with ``pip install 'minigpt[fuzz]'``.
"""

import importlib
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
from base64 import b64encode
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, show
from fuzz.mutations import Mutator, bytes_of, damaged_bytes, header_of, json_of, parts_of_zip

try:
    atheris = importlib.import_module("atheris")
except ModuleNotFoundError:
    print("error: this needs atheris: pip install 'minigpt[fuzz]'", file=sys.stderr)
    raise SystemExit(2) from None

with atheris.instrument_imports(include=["minigpt"]):
    from fuzz import checkpoints as fuzz

    import minigpt.checkpoint
    import minigpt.tokenizer  # noqa: F401

MOST_BYTES = 2**16
FRESH = 0.25  # of the inputs start from a seed: libFuzzer drops a seed whose lines another of the same folder reaches

FILES: list[tuple[str, str, Mutator]] = [
    ("single", "config.json", json_of("config.json")),
    ("single", "model.safetensors", header_of("model.safetensors")),
    ("sharded", "model.safetensors.index.json", json_of("model.safetensors.index.json")),
    ("bin", "pytorch_model.bin", parts_of_zip("*.bin")),
    ("nested", "pytorch_model.bin", parts_of_zip("*.bin")),
    ("legacy", "pytorch_model.bin", bytes_of("*.bin")),
    ("openai", "gpt2.npz", parts_of_zip("*.npz")),
    ("openai", "hparams.json", json_of("hparams.json")),
    ("tokenizer", "tokenizer.json", json_of("tokenizer.json")),
    ("tokenizer, original", "vocab.json", json_of("vocab.json")),
    ("tokenizer, original", "merges.txt", bytes_of("merges.txt")),
]


def main(runs: int = 20_000, json_file: JsonFile = None, seed: int = 1) -> None:
    """Print, and with --json write, how many were loaded and refused; exit status 1 where anything else happened."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        write_corpus(folder)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_fuzz, args=(runs, seed, folder, theirs))
        process.start()
        theirs.close()
        found = _report(ours, folder)
        process.join()
        log = (folder / "log").read_text(errors="replace")
    reached = [dict(zip(("edges", "features", "inputs kept"), map(int, line), strict=True)) for line in _REACHED(log)]
    result = {
        **found,
        "reached": {"by the seeds": reached[0], "in the end": reached[-1]} if reached else log[-500:],
        "seconds": round(time.perf_counter() - started),
        "measured_on": fuzz.environment(1, *fuzz.READERS, "atheris"),
    }
    show(result, json_file)
    raise typer.Exit(1 if found["escaped"] else 0)


_REACHED = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)").findall


def write_corpus(folder: Path) -> None:
    """The small checkpoints, and the one file of each that is damaged, as inputs."""
    fuzz.write_seeds(folder / "seeds")
    (folder / "corpus").mkdir()
    for number, (seed, name, _) in enumerate(FILES):
        content = (folder / "seeds" / seed / name).read_bytes()
        (folder / "corpus" / str(number)).write_bytes(bytes([number]) + content)


def _report(ours: Connection, folder: Path) -> dict[str, Any]:
    """What the process that fuzzes says when it is done; of one that died, what it died of."""
    try:
        return ours.recv()
    except EOFError:
        died_of = b64encode((folder / "last").read_bytes()).decode() if (folder / "last").exists() else None
        return {"executions": None, "escaped": [{"what": "the process died of it", "input": died_of}]}


def _fuzz(runs: int, seed: int, folder: Path, report: Connection) -> None:
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
    fuzz.limit_and_watch()
    before = fuzz.peak_mb()
    counts, escaped, slowest = Counter[str](), [], 0.0
    seeds = [path.read_bytes() for path in sorted((folder / "corpus").iterdir())]

    def execute(data: bytes) -> None:
        nonlocal slowest
        (folder / "last").write_bytes(data)
        began = time.process_time()
        target, outcome, escape = read(data, folder)
        slowest = max(slowest, time.process_time() - began)
        counts[f"{target}: {outcome}"] += 1
        if escape:
            escaped.append({"target": target, "what": escape, "input": b64encode(data).decode()})
        if counts.total() == runs:
            grown = fuzz.peak_mb() - before  # with the inputs that were kept, and what coverage itself takes
            if grown > fuzz.MEMORY_MB:
                escaped.append({"what": f"the process grew by {grown:.0f} MB"})
            found = {"executions": runs, "escaped": escaped, "outcomes": dict(sorted(counts.items()))}
            report.send(found | {"slowest_cpu_s": round(slowest, 3), "growth_mb": round(grown, 1)})
            os._exit(0)

    def mutate(data: bytes, most_bytes: int, number: int) -> bytes:
        chance = random.Random(number)
        start = chance.choice(seeds) if chance.random() < FRESH else data
        return mutated(chance, start, most_bytes, folder / "scratch")

    options = [f"-seed={seed}", f"-max_len={MOST_BYTES}", "-len_control=0", "-rss_limit_mb=0", "-timeout=0"]
    options.append(f"-artifact_prefix={folder}/")
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus")], execute, custom_mutator=mutate)
    atheris.Fuzz()


def read(data: bytes, folder: Path) -> tuple[str, str, str | None]:
    """Put an input into its checkpoint and read that: which file, what came of it, and what went wrong, if anything."""
    seed, name, _ = _file(data)
    place = folder / "mutant"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "seeds" / seed, place)
    (place / name).write_bytes(data[1:])
    return f"{seed}/{name}", *fuzz.watched(seed, place)


def mutated(chance: random.Random, data: bytes, most_bytes: int, scratch: Path) -> bytes:
    """An input of the same file: changed by libFuzzer, or as a whole structure where it still is one."""
    if chance.random() < 0.5 or not data:
        return data[:1] + atheris.Mutate(data[1:], most_bytes - 1)
    _, name, mutator = _file(data)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    (scratch / name).write_bytes(data[1:])
    try:
        mutator(chance, scratch)
    except Exception:  # no longer JSON, or no archive
        return (data[:1] + damaged_bytes(chance, data[1:]))[:most_bytes]
    return (data[:1] + (scratch / name).read_bytes())[:most_bytes]


def _file(data: bytes) -> tuple[str, str, Mutator]:
    return FILES[(data[0] if data else 0) % len(FILES)]


if __name__ == "__main__":
    typer.run(main)
