"""What a zip archive must be before anything unpacks it: no larger inside than it may be, and every name once."""

import zipfile


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
