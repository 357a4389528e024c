"""PyTorch's .bin, .pt and .pth: a pickle that names tensors. Only ``torch.load(weights_only=True)`` ever reads one.

A pickle is a program. Before that restricted interpreter runs it, its instructions are looked through, and none is run:
it may call nothing but what puts tensors together, so that neither code nor a wish for memory gets further.
"""

import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from minigpt.checkpoint.containers.contents import Contents
from minigpt.checkpoint.containers.nesting import Sizes
from minigpt.checkpoint.containers.zipped import require_one_directory, require_sound
from minigpt.errors import CheckpointError
from minigpt.json_file import MOST_BYTES

_BUILDS_TENSORS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch (\w+Storage|Size|device)"
    r"|torch (b?float|double|half|u?int|long|short|bool)\d*|torch\.nn\.parameter Parameter"
)
_NESTS = ("model", "model_state_dict", "state_dict")  # where trainers put the weights beside their own state
_CONFIG = "model_args"  # where nanoGPT puts the shape


def read_pickled(file: Path) -> Contents:
    """The tensors of a state dict, or of a trainer's checkpoint that holds one; mapped into memory where it can be.

    Raises:
        CheckpointError: it is damaged, would call anything else than what builds tensors, or holds no state dict.
    """
    try:
        zipped = _is_zip(file)
        require_harmless = _require_harmless_parts if zipped else _require_harmless_pickles
        require_harmless(file)
        return _contents(torch.load(file, map_location="cpu", weights_only=True, mmap=zipped))
    except Exception as error:  # of every kind: the bytes of a stranger are interpreted here
        reason = " ".join(_reason(error).split()) or type(error).__name__
        raise CheckpointError(f"{file} is not a PyTorch file of plain tensors: {reason[:300]}") from error


def _reason(error: Exception) -> str:
    """Of the restricted interpreter what it met, and not its advice to run the file without restrictions."""
    met = str(error).partition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    return met or (str(error) if not isinstance(error, pickle.UnpicklingError) else "its pickle is damaged")


def _is_zip(file: Path) -> bool:
    """Whether it is an archive, as PyTorch writes since 1.6."""
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


def _require_harmless_pickles(file: Path) -> None:
    with file.open("rb") as opened:
        for _ in range(5):  # magic number, protocol, system, tensors, keys; then bare bytes
            _require_builds_tensors_only(opened)


def _require_harmless_parts(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        require_sound(archive, file.stat().st_size, most_growth=1)
        require_one_directory(archive, file)
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{part.filename!r} in it is compressed, as PyTorch never writes it")
            if part.filename.endswith(".pkl"):
                if part.file_size > MOST_BYTES:
                    raise ValueError(
                        f"its pickle is {part.file_size:,} bytes long; more than {MOST_BYTES:,} are not read"
                    )
                with archive.open(part) as opened:
                    _require_builds_tensors_only(opened)


def _require_builds_tensors_only(opened: IO[bytes]) -> None:
    for called in _called(opened):
        if not _BUILDS_TENSORS.fullmatch(called):
            raise ValueError(
                f"it would call {called.replace(' ', '.')!r}, which no weights need; nothing of it was run"
            )


def _called(opened: IO[bytes]) -> Iterator[str]:
    """ "module name" of every function or class that the next pickle asks for."""
    strings: list[str] = []
    by_stack, sizes = False, Sizes()
    for operation, argument, position in pickletools.genops(opened):
        if position is not None and position > MOST_BYTES:
            raise ValueError(f"its pickle is longer than {MOST_BYTES:,} bytes")
        sizes.follow(operation, argument)
        if operation.name in ("GLOBAL", "INST"):
            yield str(argument)
        elif operation.name == "STACK_GLOBAL":
            yield " ".join(strings[-2:])  # most likely, but it may have remembered others
            by_stack = True
        elif operation.name in ("EXT1", "EXT2", "EXT4"):
            yield f"extension {argument}"
        elif isinstance(argument, str):
            strings = [*strings[-1:], argument]
    if by_stack:
        raise ValueError("it calls what its stack names, as pickles of protocol 4 do; torch.save writes protocol 2")


def _contents(loaded: Any) -> Contents:
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds a {type(loaded).__name__}, and no state dict")
    fields = loaded.get(_CONFIG)
    if fields is not None and not isinstance(fields, Mapping):
        raise ValueError(f"its {_CONFIG} is a {type(fields).__name__}")
    state = next((loaded[name] for name in _NESTS if isinstance(loaded.get(name), Mapping)), loaded)
    return Contents({str(name): _plain(name, value) for name, value in state.items()}, fields)


def _plain(name: object, value: Any) -> Tensor:
    """The tensor without what clings to it."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{str(name)[:96]!r} in it is a {type(value).__name__} and no tensor")
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise ValueError(f"{str(name)[:96]!r} in it is no plain tensor")
    if value.nbytes > value.untyped_storage().nbytes():
        raise ValueError(f"{str(name)[:96]!r} in it is larger than the part of the file that holds it")
    return value.detach()
