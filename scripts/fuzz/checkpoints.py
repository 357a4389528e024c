"""Do damaged and hostile files get past the readers? Mutations of small checkpoints, each read as a user would.

python scripts/fuzz/checkpoints.py --mutations 100000 --json docs/results/fuzz.json

Every mutation must load, or raise a MiniGPTError of one line. It must do so within five seconds and the memory limit
below, and without opening a file outside its folder. Batches run in processes of their own, so that a crash
is seen and counted. A mutation is made again by its number. Linux only: memory is limited and measured by the system.
"""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import typer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import minigpt
from minigpt.bench.worker import peak_mb
from minigpt.measure.environment import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, show
from fuzz.mutations import TARGETS

SECONDS, TICKS = 5, 10  # that a reader may take, and into how many parts the clock divides them
MEMORY_MB = 256  # that a batch may grow by, over what its process starts with; the files are of 10 KB
BATCH = 1000
READERS = ("safetensors", "tokenizers", "numpy")  # the packages, besides PyTorch, that take a file apart

SHAPE: dict[str, Any] = dict(vocab_size=300, n_positions=8, n_embd=4, n_layer=1, n_head=2, eos_token_id=0)


class Hang(BaseException):
    """Five seconds are over. No Exception, so that no reader takes it for a damaged file."""


def main(mutations: int = 100_000, json_file: JsonFile = None, first: int = 0) -> None:
    """Print, and with --json write, how many were loaded and refused; exit status 1 where anything else happened."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    escaped: list[dict[str, Any]] = []
    grown_mb = slowest = 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        write_seeds(Path(folder) / "seeds")
        for start in range(first, first + mutations, BATCH):
            numbers = range(start, min(start + BATCH, first + mutations))
            found = in_a_process(numbers, Path(folder))
            counts.update(found["counts"])
            escaped += found["escaped"]
            grown_mb, slowest = max(grown_mb, found["grown_mb"]), max(slowest, found["slowest_cpu_s"])
            print(f"{numbers.stop:,} mutations, {len(escaped)} escaped", file=sys.stderr)
    result = {
        "mutations": mutations,
        "escaped": escaped,
        "outcomes": dict(sorted(counts.items())),
        "slowest_cpu_s": round(slowest, 3),
        "largest_growth_of_a_batch_mb": round(grown_mb, 1),
        "seconds": round(time.perf_counter() - started),
        "measured_on": environment(1, *READERS),
    }
    show(result, json_file)
    raise typer.Exit(1 if escaped else 0)


def in_a_process(numbers: range, folder: Path) -> dict[str, Any]:
    """What came of these mutations; of a process that died, which one it died of."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_batch, args=(numbers, folder, theirs))
    process.start()
    theirs.close()
    found = _died_of(numbers.start)
    with contextlib.suppress(EOFError):
        while not isinstance(told := ours.recv(), dict):
            found = _died_of(told)
        found = told
    process.join()
    return found


def _died_of(number: int) -> dict[str, Any]:
    escaped = [{"number": number, "what": "the process died of it"}]
    return {"counts": {}, "escaped": escaped, "grown_mb": 0.0, "slowest_cpu_s": 0.0}


def _batch(numbers: range, folder: Path, report: Connection) -> None:
    limit_and_watch()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that panics says so there
    before = peak_mb()
    counts, escaped, slowest = Counter[str](), [], 0.0
    for number in numbers:
        report.send(number)
        began = time.process_time()
        target, outcome, escape = one(number, folder)
        slowest = max(slowest, time.process_time() - began)
        counts[f"{target}: {outcome}"] += 1
        escaped += [{"number": number, "target": target, "what": escape}] if escape else []
    grown = peak_mb() - before
    if grown > MEMORY_MB:
        escaped.append({"number": numbers.start, "what": f"the batch grew by {grown:.0f} MB"})
    report.send({"counts": counts, "escaped": escaped, "grown_mb": grown, "slowest_cpu_s": slowest})


def limit_and_watch() -> None:
    """For the rest of this process: an end to its memory, no core dumps, and an eye on the files that it opens."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + 8 * MEMORY_MB * 2**20  # of addresses, of which allocators reserve more than they use
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_watch)


def one(number: int, folder: Path) -> tuple[str, str, str | None]:
    """Make and read mutation ``number``: its target, "loaded" or "refused", and what went wrong, if anything did."""
    chance = random.Random(number)
    target = sorted(TARGETS)[number % len(TARGETS)]
    seed, mutate = TARGETS[target]
    place = folder / "mutant"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "seeds" / seed, place)
    mutate(chance, place)
    return target, *watched(seed, place)


def watched(seed: str, place: Path) -> tuple[str, str | None]:
    """Read the checkpoint in ``place``: "loaded" or "refused", and what went wrong, if anything did."""
    opened: list[str] = []
    _WATCHES.append(opened)
    signal.signal(signal.SIGALRM, _Clock())
    signal.setitimer(signal.ITIMER_REAL, SECONDS / TICKS, SECONDS / TICKS)
    try:
        outcome, escape = _read(seed, place)
    except Hang:
        outcome, escape = "hung", f"it took more than {SECONDS} s"
    except BaseException as error:
        outcome, escape = "escaped", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _WATCHES.remove(opened)
    outside = [path for path in opened if not path.startswith(str(place))]
    return outcome, escape or (f"it opened {outside[0]}" if outside else None)


def _read(seed: str, place: Path) -> tuple[str, str | None]:
    try:
        if seed.startswith("tokenizer"):
            minigpt.Tokenizer.from_pretrained(place).encode("the dog")
        else:
            model = minigpt.from_pretrained(place if seed != "openai" else place / "gpt2.npz", device="cpu")
            float(sum(parameter.detach().double().sum() for parameter in model.parameters()))  # every page can be read
    except minigpt.MiniGPTError as error:
        return "refused", "its message has several lines" if "\n" in str(error) else None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the tokenizers library panics at some files
            raise
        return "refused", None
    return "loaded", None


# Seeds


def write_seeds(folder: Path) -> None:
    """A small checkpoint of every family, and a tokenizer in both of its forms."""
    torch.manual_seed(0)
    model = minigpt.GPT2(minigpt.GPT2Config(**SHAPE))
    minigpt.save_pretrained(model, folder / "single")
    minigpt.save_pretrained(model, folder / "sharded", max_shard_bytes=2000)
    state = {f"transformer.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    for name, content in (("bin", state), ("legacy", state), ("nested", {"model": state, "iter_num": 3})):
        (folder / name).mkdir()
        shutil.copy(folder / "single" / "config.json", folder / name)
        torch.save(content, folder / name / "pytorch_model.bin", _use_new_zipfile_serialization=name != "legacy")
    (folder / "openai").mkdir()
    shape = dict(n_vocab=300, n_ctx=8, n_embd=4, n_head=2, n_layer=1)
    (folder / "openai" / "hparams.json").write_text(json.dumps(shape))
    np.savez(folder / "openai" / "gpt2.npz", **_openai_arrays(model))
    backend = _tokenizer()
    (folder / "tokenizer").mkdir()
    backend.save(str(folder / "tokenizer" / "tokenizer.json"), pretty=False)
    (folder / "tokenizer, original").mkdir()
    backend.model.save(str(folder / "tokenizer, original"))


def _openai_arrays(model: minigpt.GPT2) -> dict[str, Any]:
    arrays = {}
    for name, tensor in model.named_parameters():
        part = name.replace("h.0", "h0").replace(".", "/")
        leaf = "g" if "ln_" in name else "w"
        part = part.replace("/weight", "" if part.startswith("w") else f"/{leaf}").replace("/bias", "/b")
        arrays[f"model/{part}"] = tensor.detach().numpy()[None] if part.endswith("/w") else tensor.detach().numpy()
    return arrays


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<|endoftext|>", *alphabet, "th", "the"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return backend


# Watches

_WATCHES: list[list[str]] = []
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(minigpt.__file__).parent), "/proc/", "/sys/", "/dev/null")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _WATCHES and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        if not path.startswith(_INSTALLED):
            _WATCHES[-1].append(path)


class _Clock:
    """Counts ticks, and not time: of those that fall into a pause, when the process is stopped, it hears but one."""

    def __init__(self) -> None:
        self.ticks = 0

    def __call__(self, *_: object) -> None:
        self.ticks += 1
        if self.ticks == TICKS:
            raise Hang


if __name__ == "__main__":
    typer.run(main)
