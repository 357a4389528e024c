"""Do damaged and hostile files get past the readers? Mutations of small checkpoints, each read as a user would.

python scripts/fuzz_checkpoints.py --mutations 100000 --json docs/results/fuzz.json

Every mutation must be loaded, or refused by a MiniGPTError of one line; within five seconds; with no more memory than
the limit below; and without opening a file outside its folder. Batches run in processes of their own, so that a crash
is seen and counted. A mutation is made again by its number. Linux only: memory is limited and measured by the system.
"""

import copy
import io
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import typer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import minigpt

SECONDS = 5
MEMORY_MB = 256  # that a batch may grow by, over what its process starts with; the files are of 10 KB
BATCH = 1000

SHAPE: dict[str, Any] = dict(vocab_size=300, n_positions=8, n_embd=4, n_layer=1, n_head=2, eos_token_id=0)
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**12, 10**400, -(2**63), 0.5, -1.5, 1e308, float("nan"),
    "", "F32", "BF16", "I64", "F4", "gpt2", "gelu", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, [], [[]], {},
    [0], [-1], [2**40, 2**40], [10**12], [0, 0], [0, 2**63], [4, 3], {"a": 1}, ["a", "b"], "\n", "狗",
]  # fmt: skip

Mutator = Callable[[random.Random, Path], None]


class Hang(BaseException):
    """Five seconds are over. No Exception, so that no reader takes it for a damaged file."""


def main(mutations: int = 100_000, json_file: str | None = typer.Option(None, "--json"), first: int = 0) -> None:
    """Print, and with --json write, how many were loaded and refused; exit status 1 where anything else happened."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    escaped: list[dict[str, Any]] = []
    peak_mb = slowest = 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        write_seeds(Path(folder) / "seeds")
        for start in range(first, first + mutations, BATCH):
            numbers = range(start, min(start + BATCH, first + mutations))
            found = in_a_process(numbers, Path(folder))
            counts.update(found["counts"])
            escaped += found["escaped"]
            peak_mb, slowest = max(peak_mb, found["grown_mb"]), max(slowest, found["slowest_s"])
            print(f"{numbers.stop:,} mutations, {len(escaped)} escaped", file=sys.stderr)
    result = {
        "mutations": mutations,
        "escaped": escaped,
        "outcomes": dict(sorted(counts.items())),
        "slowest_s": round(slowest, 3),
        "largest_growth_of_a_batch_mb": round(peak_mb, 1),
        "seconds": round(time.perf_counter() - started),
        "measured_on": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "safetensors", "tokenizers", "numpy", "minigpt")},
        },
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if json_file:
        Path(json_file).write_text(text, encoding="utf-8")
    raise typer.Exit(1 if escaped else 0)


def in_a_process(numbers: range, folder: Path) -> dict[str, Any]:
    """What came of these mutations; of a process that died, which one it died of."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_batch, args=(numbers, folder, theirs))
    process.start()
    theirs.close()
    last: Any = numbers.start
    found: dict[str, Any] = {"counts": {}, "escaped": [], "grown_mb": 0.0, "slowest_s": 0.0}
    try:
        while not isinstance(last := ours.recv(), dict):
            found["escaped"] = [{"number": last, "what": "the process died of it"}]
        found = last
    except EOFError:
        pass
    process.join()
    return found


def _batch(numbers: range, folder: Path, report: Connection) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + 8 * MEMORY_MB * 2**20  # of addresses, of which allocators reserve more than they use
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that panics says so there
    sys.addaudithook(_watch)
    before = _peak_mb()
    counts, escaped, slowest = Counter[str](), [], 0.0
    for number in numbers:
        report.send(number)
        began = time.perf_counter()
        target, outcome, escape = one(number, folder)
        slowest = max(slowest, time.perf_counter() - began)
        counts[f"{target}: {outcome}"] += 1
        escaped += [{"number": number, "target": target, "what": escape}] if escape else []
    grown = _peak_mb() - before
    if grown > MEMORY_MB:
        escaped.append({"number": numbers.start, "what": f"the batch grew by {grown:.0f} MB"})
    report.send({"counts": counts, "escaped": escaped, "grown_mb": grown, "slowest_s": slowest})


def one(number: int, folder: Path) -> tuple[str, str, str | None]:
    """Make and read mutation ``number``: its target, "loaded" or "refused", and what went wrong, if anything did."""
    chance = random.Random(number)
    target = sorted(TARGETS)[number % len(TARGETS)]
    seed, mutate = TARGETS[target]
    place = folder / "mutant"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "seeds" / seed, place)
    mutate(chance, place)
    opened: list[str] = []
    _WATCHES.append(opened)
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
        _WATCHES.remove(opened)
    outside = [path for path in opened if not path.startswith(str(place))]
    return target, outcome, escape or (f"it opened {outside[0]}" if outside else None)


def _read(seed: str, place: Path) -> tuple[str, str | None]:
    try:
        if seed.startswith("tokenizer"):
            minigpt.Tokenizer.from_pretrained(place).encode("the dog")
        else:
            model = minigpt.from_pretrained(place if seed != "openai" else place / "gpt2.npz", device="cpu")
            float(sum(parameter.double().sum() for parameter in model.parameters()))  # every page can be read
    except minigpt.MiniGPTError as error:
        return "refused", "its message has several lines" if "\n" in str(error) else None
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


# Mutators


def damaged_bytes(chance: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut, doubled or put in."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        start = chance.randrange(len(changed) + 1)
        end = min(len(changed), start + chance.choice((1, 1, 2, 8, 100, 10_000)))
        piece = bytes(changed[start:end])
        cut, doubled, drowned = b"", piece * 2, chance.choice((b"\0", b"\xff")) * len(piece)
        changed[start:end] = chance.choice((chance.randbytes(len(piece)), cut, doubled, drowned, chance.randbytes(4)))
    return bytes(changed)


def damaged_json(chance: random.Random, value: Any) -> Any:
    """The same with some of its parts replaced, removed, renamed or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        value = _with_one_change(chance, value)
    return value


def _with_one_change(chance: random.Random, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return copy.deepcopy(chance.choice(VALUES))
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    action = chance.random()
    if action < 0.5:
        value[key] = _with_one_change(chance, value[key])
    elif action < 0.65:
        del value[key]
    elif isinstance(value, dict):
        other = chance.choice([*value, "n_ctx", "x", "\n", "transformer.h.99.ln_1.bias", "__metadata__", "é" * 50])
        value[other] = value.pop(key) if action < 0.8 else copy.deepcopy(value[key])
    else:
        value.insert(key, copy.deepcopy(chance.choice([value[key], *VALUES])))
    return value


def spelled(chance: random.Random, value: Any) -> bytes:
    """JSON, which now and then is damaged as text as well, or names one thing twice."""
    text = json.dumps(value)
    if chance.random() < 0.1 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + ", " + text[1:]
    data = text.encode()
    return damaged_bytes(chance, data) if chance.random() < 0.2 else data


def json_of(name: str) -> Mutator:
    def mutate(chance: random.Random, place: Path) -> None:
        path = place / name
        path.write_bytes(spelled(chance, damaged_json(chance, json.loads(path.read_bytes()))))

    return mutate


def bytes_of(pattern: str) -> Mutator:
    def mutate(chance: random.Random, place: Path) -> None:
        path = chance.choice(sorted(place.glob(pattern)))
        path.write_bytes(damaged_bytes(chance, path.read_bytes()))

    return mutate


def header_of(pattern: str) -> Mutator:
    """The header of a safetensors file, its length right or wrong."""

    def mutate(chance: random.Random, place: Path) -> None:
        path = chance.choice(sorted(place.glob(pattern)))
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = spelled(chance, damaged_json(chance, json.loads(data[8:end])))
        lengths = (len(header) + 1, 0, 2**33, 10 * 10**9, 2**63, 2**64 - 1)
        length = len(header) if chance.random() < 0.9 else chance.choice(lengths)
        path.write_bytes(length.to_bytes(8, "little") + header + data[end:])

    return mutate


def parts_of_zip(pattern: str) -> Mutator:
    """A part of a zip archive damaged and the archive made whole again, so that the damage is met further in."""

    def mutate(chance: random.Random, place: Path) -> None:
        path = next(iter(place.glob(pattern)))
        with zipfile.ZipFile(path) as archive:
            parts = {part.filename: archive.read(part) for part in archive.infolist()}
        programs = [name for name in parts if name.endswith("data.pkl")]
        name = programs[0] if programs and chance.random() < 0.8 else chance.choice(sorted(parts))
        parts[name] = damaged_bytes(chance, parts[name])
        method = zipfile.ZIP_DEFLATED if chance.random() < 0.1 else zipfile.ZIP_STORED
        again = io.BytesIO()
        with zipfile.ZipFile(again, "w", method) as archive:
            for name, data in parts.items():
                archive.writestr(name, data)
        path.write_bytes(again.getvalue())

    return mutate


TARGETS: dict[str, tuple[str, Mutator]] = {
    "config": ("single", json_of("config.json")),
    "header": ("single", header_of("model.safetensors")),
    "header of a shard": ("sharded", header_of("*.safetensors")),
    "index": ("sharded", json_of("model.safetensors.index.json")),
    "bytes of a file": ("single", bytes_of("*.safetensors")),
    "bytes of a bin": ("bin", bytes_of("*.bin")),
    "parts of a bin": ("bin", parts_of_zip("*.bin")),
    "parts of a nested bin": ("nested", parts_of_zip("*.bin")),
    "bytes of an old bin": ("legacy", bytes_of("*.bin")),
    "parts of an npz": ("openai", parts_of_zip("*.npz")),
    "bytes of an npz": ("openai", bytes_of("*.npz")),
    "hparams": ("openai", json_of("hparams.json")),
    "tokenizer.json": ("tokenizer", json_of("tokenizer.json")),
    "bytes of a tokenizer": ("tokenizer", bytes_of("tokenizer.json")),
    "vocab.json": ("tokenizer, original", json_of("vocab.json")),
    "merges.txt": ("tokenizer, original", bytes_of("merges.txt")),
}


# Watches

_WATCHES: list[list[str]] = []
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(minigpt.__file__).parent), "/proc/", "/sys/", "/dev/null")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _WATCHES and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        if not path.startswith(_INSTALLED):
            _WATCHES[-1].append(path)


def _hang(*_: object) -> None:
    raise Hang


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    typer.run(main)
