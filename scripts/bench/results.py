"""The results of a script: JSON on standard output, and in the file that --json names."""

from pathlib import Path
from typing import Annotated, Any

import typer

from minigpt.cli.output import check_writable, json_text, write
from minigpt.errors import MiniGPTError
from minigpt.files import finite


def _writable(file: Path | None) -> Path | None:
    try:
        return check_writable(file)
    except MiniGPTError as error:
        raise typer.BadParameter(str(error)) from error


JsonFile = Annotated[Path | None, typer.Option("--json", callback=_writable, help="Write the results here too.")]


def show(results: Any, file: Path | None) -> None:
    """Print the results, and write them to a file."""
    print(_text(results), end="")
    keep(results, file)


def keep(results: Any, file: Path | None) -> None:
    """Write the results to a file, if one is named."""
    if file is not None:
        write(file, _text(results))


def _text(results: Any) -> str:
    return json_text(finite(results, instead=str))  # words for what is not finite
