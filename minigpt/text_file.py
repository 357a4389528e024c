"""A text that came from somewhere: in UTF-8, or one sentence where it is not."""

from pathlib import Path

from minigpt.errors import MiniGPTError


def read_text(file: Path, kind: type[MiniGPTError] = MiniGPTError) -> str:
    """The text of a file, its line ends as they are, without a byte order mark.

    Raises:
        MiniGPTError: of the given kind; the file cannot be read, or is no text in UTF-8.
    """
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise kind(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise kind(f"{file} is not UTF-8 text: {error}") from error
