"""What a pickle asks for, looked at before anything of it is made. ``torch.load`` makes what it allows at once."""

import io
import pickletools
import re
import zipfile
from pathlib import Path

MOST_PICKLE = 2**24  # bytes of pickle; a checkpoint's tensors stand beside it
OLD_PICKLES = (
    5  # at the beginning of a file that is no archive: PyTorch before 1.6 wrote numbers, names and values apart
)
ALLOWED = re.compile(
    r"collections (OrderedDict|Counter)|(builtins|__builtin__) set|torch\.nn\.parameter Parameter"
    r"|torch (Size|device|bool|(bfloat|float|complex|int|uint)\d+\w*)|torch(\.cuda)? [A-Z]\w+Storage"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|parameter|parameter_with_state)|torch\._tensor _rebuild_from_type_v2"
)  # a module and a name in it


def check_pickles(file: Path) -> None:
    """Check the pickles of a file that torch.save wrote.

    Raises:
        ValueError: as ``check_pickle``, or if the file is compressed.
        OSError, zipfile.BadZipFile: if it cannot be read.
    """
    if not zipfile.is_zipfile(file):
        with file.open("rb") as stream:
            pickles = io.BytesIO(stream.read(MOST_PICKLE))
        for _ in range(OLD_PICKLES):
            check_pickle(pickles)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its archive is compressed, which torch.save never does")
            if entry.filename.endswith(".pkl"):
                with archive.open(entry) as stream:
                    check_pickle(io.BytesIO(stream.read(MOST_PICKLE)))


def check_pickle(stream: io.BytesIO) -> None:
    """Check the pickle that begins where a stream is, to its end.

    Raises:
        ValueError: if it is damaged or too large, asks for a class or function that no checkpoint needs, or for memory
            that it does not fill.
    """
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL" and not ALLOWED.fullmatch(str(argument)):
            raise ValueError(f"it asks for {str(argument).replace(' ', '.'):.100}, which no checkpoint needs")
        if "PUT" in opcode.name and isinstance(argument, int) and argument > stream.tell():
            raise ValueError("it asks for memory that it does not fill")
