"""minigpt generate --prompts: the progress bar of a file of texts."""

import sys
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from minigpt.cli.files import bar

if TYPE_CHECKING:
    from minigpt.generation.promptfile import TextFile


def write_many(file: "TextFile") -> None:
    """Write the texts that a file does not have, and close it. Show texts, tokens per second and the time left."""
    speed = TextColumn("{task.fields[speed]:.0f} tokens/s")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("texts"), speed, TimeRemainingColumn())
    if file.lines.torn is not None:
        _note(f"line {file.lines.torn} of {file.lines.path} was cut short; its text is written again")
    if kept := len(file.lines.rows):
        _note(f"{kept} texts are there already")
    started, tokens, texts = time.perf_counter(), 0, 0
    with file, bar(*columns) as progress:
        task = progress.add_task("", total=file.total, completed=kept, speed=0.0)
        try:
            for text in file.write():
                tokens, texts = tokens + len(text.ids), texts + 1
                progress.update(task, advance=1, speed=tokens / (time.perf_counter() - started))
        except KeyboardInterrupt:
            _note(f"{kept + texts} texts are kept in {file.lines.path}; the same command continues from there")
            raise
    spent = time.perf_counter() - started
    print(f"{texts} texts, {tokens} tokens in {spent:.1f} s, {tokens / spent:.0f} tokens/s", file=sys.stderr)


def _note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)
