"""Ways to damage a checkpoint's files, from single bytes to structures: what checkpoints.py feeds the readers.

A target is the name of a small checkpoint to start from, and a mutator that damages one of its files by chance.
"""

import copy
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**12, 10**400, -(2**63), 0.5, -1.5, 1e308, float("nan"),
    "", "F32", "BF16", "I64", "F4", "gpt2", "gelu", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, [], [[]], {},
    [0], [-1], [2**40, 2**40], [10**12], [0, 0], [0, 2**63], [4, 3], {"a": 1}, ["a", "b"], "\n", "狗",
]  # fmt: skip

Mutator = Callable[[random.Random, Path], None]


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
