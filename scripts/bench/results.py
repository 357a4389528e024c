"""What a script has found: JSON on standard output, and in the file that --json names."""

from pathlib import Path
from typing import Annotated, Any

import typer

from minigpt.cli.output import print_json, require_writable
from minigpt.errors import MiniGPTError
from minigpt.files import finite


def _writable(file: Path | None) -> Path | None:
    """The file, unless it could not be written once the work is done."""
    try:
        require_writable(file)
    except MiniGPTError as error:
        raise typer.BadParameter(str(error)) from error
    return file


JsonFile = Annotated[Path | None, typer.Option("--json", callback=_writable, help="Write the results here too.")]


def show(results: Any, file: Path | None) -> None:
    """Print them, and keep them."""
    keep(results, Path("-"))
    keep(results, file)


def keep(results: Any, file: Path | None) -> None:
    """Write them where a file was named, in the place of what it held; '-' is standard output."""
    if file is not None:
        print_json(finite(results, instead=str), str(file))  # words for what is not finite
