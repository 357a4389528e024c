"""What a zip archive must be before anything unpacks it: no larger inside than it may be, and every name once."""

import zipfile
from pathlib import Path


def require_sound_zip(file: Path, most_growth: int) -> zipfile.ZipFile:
    """The opened archive, whose parts together unpack to at most ``most_growth`` times the file.

    Raises:
        ValueError: they unpack to more, or two have one name.
        zipfile.BadZipFile, OSError: it is no whole archive.
    """
    archive = zipfile.ZipFile(file)
    parts, size = archive.infolist(), file.stat().st_size
    unpacked = sum(part.file_size for part in parts)
    if unpacked > most_growth * size:
        raise ValueError(f"its {size:,} bytes unpack to {unpacked:,}; save it again uncompressed")
    if len({part.filename for part in parts}) < len(parts):
        raise ValueError("two parts of the archive have one name")
    return archive
