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
        raise kind(f"{file} is not UTF-8 text: {error}") from error
