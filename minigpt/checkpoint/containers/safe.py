"""safetensors: a header in JSON, then the tensors, which are mapped into memory and not read."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from minigpt.checkpoint.containers.contents import Contents
from minigpt.errors import CheckpointError
from minigpt.json_file import MOST_BYTES, parse_object


def read_safetensors(file: Path) -> Contents:
    """Every tensor of the file; its pages are read when first used.

    Raises:
        CheckpointError: the file is cut short, or its header is too long, no header, names a tensor twice, or describes
            tensors that overlap, leave gaps or exceed the file.
    """
    try:
        parse_object(_header(file))  # the library itself takes the last of two entries with one name
        with safe_open(file, framework="pt") as opened:
            return Contents({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _header(file: Path) -> bytes:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MOST_BYTES:
            raise ValueError(f"its header claims {length:,} bytes, and more than {MOST_BYTES:,} are not read")
        return opened.read(length)
