"""Read a text file, with one sentence if that fails."""

from pathlib import Path

from minigpt.errors import MiniGPTError


def read_text(file: Path, kind: type[MiniGPTError] = MiniGPTError) -> str:
    """Return the text of a file with its line ends as they are, without a byte order mark.

    Raises:
        MiniGPTError: of the given kind, if the file cannot be read or is not UTF-8 text.
    """
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise kind(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise kind(not_utf8(file, error)) from error


def not_utf8(what: object, error: UnicodeDecodeError) -> str:
    """Return the sentence that says where a text is not UTF-8, and how to make it so."""
    byte = error.object[error.start]
    return (
        f"{what} is not UTF-8 text: byte 0x{byte:02x} at {error.start:,}; convert it first, e.g. Latin-1 with "
        "iconv -f LATIN1 -t UTF-8"
    )
