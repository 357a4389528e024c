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
from minigpt.device import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, show
from fuzz.mutations import TARGETS

SECONDS = 5  # that a reader may take
MEMORY_MB = 2048  # of addresses, beyond what a process starts with; allocators reserve more than they use
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
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        write_seeds(Path(folder) / "seeds")
        for start in range(first, first + mutations, BATCH):
            numbers = range(start, min(start + BATCH, first + mutations))
            found = in_a_process(numbers, Path(folder))
            counts.update(found["counts"])
            escaped += found["escaped"]
            print(f"{numbers.stop:,} mutations, {len(escaped)} escaped", file=sys.stderr)
    result = {
        "mutations": mutations,
        "escaped": escaped,
        "outcomes": dict(sorted(counts.items())),
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
    told: Any = numbers.start
    with contextlib.suppress(EOFError):
        while not isinstance(told, dict):
            told = ours.recv()
    process.join()
    if isinstance(told, dict):
        return told
    return {"counts": {}, "escaped": [{"number": told, "what": "the process died of it"}]}


def _batch(numbers: range, folder: Path, report: Connection) -> None:
    limit_and_watch()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that panics says so there
    counts, escaped = Counter[str](), []
    for number in numbers:
        report.send(number)
        target, outcome, escape = one(number, folder)
        counts[f"{target}: {outcome}"] += 1
        escaped += [{"number": number, "target": target, "what": escape}] if escape else []
    report.send({"counts": counts, "escaped": escaped})


def limit_and_watch() -> None:
    """For the rest of this process: an end to its memory, no core dumps, and an eye on the files that it opens."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + MEMORY_MB * 2**20
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
    _OPENED.clear()
    signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        outcome, escape = _read(seed, place)
    except Hang:
        outcome, escape = "hung", f"it took more than {SECONDS} s"
    except BaseException as error:
        outcome, escape = "escaped", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    outside = [path for path in _OPENED if not path.startswith((str(place), *_INSTALLED))]
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

_OPENED: list[str] = []
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(minigpt.__file__).parent), "/proc/", "/sys/", "/dev/null")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _OPENED.append(os.fsdecode(arguments[0]))


def _hang(*_: object) -> None:
    raise Hang


if __name__ == "__main__":
    typer.run(main)
