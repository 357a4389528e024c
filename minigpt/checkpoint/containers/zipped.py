"""What a zip archive must be before anything unpacks it: no larger inside than it may be, and every name once."""

import struct
import zipfile
from pathlib import Path

END, LOCATOR, WIDE_END = 22, 20, 56  # bytes of what stands at the end, backwards from a comment
LONGEST_END = END + 2**16


def require_sound(archive: zipfile.ZipFile, size: int, most_growth: int) -> None:
    """Refuse an archive of ``size`` bytes whose parts together unpack to more than ``most_growth`` times that.

    Raises:
        ValueError: they do, or two have one name.
    """
    parts = archive.infolist()
    unpacked = sum(part.file_size for part in parts)
    if unpacked > most_growth * size:
        raise ValueError(f"its {size:,} bytes unpack to {unpacked:,}; save it again uncompressed")
    if len({part.filename for part in parts}) < len(parts):
        raise ValueError("two parts of the archive have one name")


def require_one_directory(archive: zipfile.ZipFile, file: Path) -> None:
    """Refuse an archive whose parts are listed in two places, of which another reader may take the other.

    Python's takes the list that stands right before the end, wherever the end says that it begins.

    Raises:
        ValueError: the end says another place, or names an end that is not there.
    """
    with file.open("rb") as opened:
        start = max(0, opened.seek(0, 2) - LONGEST_END)
        opened.seek(start)
        end = start + opened.read().rfind(b"PK\5\6")
        before = min(end, LOCATOR + WIDE_END)
        opened.seek(end - before)
        wide, locator, last = opened.read(before - LOCATOR), opened.read(LOCATOR), opened.read(END)
    begins, is_honest = struct.unpack_from("<L", last, 16)[0], True
    if locator.startswith(b"PK\6\7"):  # for more than four gigabytes or 65,535 parts
        begins = struct.unpack_from("<Q", wide, 48)[0]
        is_honest = struct.unpack_from("<Q", locator, 8)[0] == end - before
    if begins != archive.start_dir or not is_honest:
        raise ValueError("its parts are listed in another place than its end says; save it again")
