"""minigpt generate --prompts: continue a file of prompts, with a progress bar."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

import minigpt
from minigpt.cli.files import bar

if TYPE_CHECKING:
    from minigpt.generation import Prompt


def write_many(
    model: "minigpt.GPT2",
    tokenizer: "minigpt.Tokenizer",
    prompts: Path,
    out: Path,
    settings: Mapping[str, Any],
    batch_size: int,
    identity: Mapping[str, Any],
) -> None:
    """Continue every prompt of the file that ``out`` has no text for.

    A file of texts belongs to one run: one file of prompts, weights, settings, tokenizer and ``identity``, e.g. the
    norm's name and source.
    """
    from minigpt import generation
    from minigpt.generation.promptfile import ResultFile, fingerprint, read_prompts

    lines = read_prompts(prompts)
    copies = settings.get("num_return_sequences", 1)
    each = [_seeded(line.prompt, settings.get("seed"), number * copies) for number, line in enumerate(lines)]
    written: set[tuple[int, int]] = set()  # filled below, before the first text is written
    # checks every prompt now, and writes lazily
    texts = generation.complete(model, tokenizer, each, batch_size=batch_size, skip=written, **settings)
    what = {**settings, **identity, "tokenizer": tokenizer.backend.to_str()}
    with ResultFile(out, fingerprint(model, lines, what)) as results:
        for number, line in enumerate(lines):
            written |= {(number, copy) for copy in range(copies) if (line.line, copy) in results.done}
        _note(results.note)
        _note(f"{len(written)} texts are there already" if written else None)
        try:
            with _bar(len(each) * copies, len(written)) as done:
                for text in texts:
                    results.add(lines[text.prompt], text)
                    done(len(text.ids))
        except KeyboardInterrupt:
            _note(f"{len(results.done)} texts are kept in {out}; the same command continues from there")
            raise


def _seeded(prompt: "Prompt", seed: int | None, number: int) -> "Prompt":
    """Return the prompt with the seed of its place in its file, if it has none."""
    return prompt if seed is None or prompt.seed is not None else dataclasses.replace(prompt, seed=seed + number)


def _note(note: str | None) -> None:
    if note is not None:
        print(f"note: {note}", file=sys.stderr)


@contextmanager
def _bar(total: int, completed: int) -> Iterator[Callable[[int], None]]:
    """Show texts, tokens per second and the time left on standard error, and a summary line at the end."""
    speed = TextColumn("{task.fields[speed]:.0f} tokens/s")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("texts"), speed, TimeRemainingColumn())
    started, tokens, texts = time.perf_counter(), 0, 0
    with bar(*columns) as progress:
        task = progress.add_task("", total=total, completed=completed, speed=0.0)

        def done(count: int) -> None:
            nonlocal tokens, texts
            tokens, texts = tokens + count, texts + 1
            progress.update(task, advance=1, speed=tokens / (time.perf_counter() - started))

        yield done
    spent = time.perf_counter() - started
    print(f"{texts} texts, {tokens} tokens in {spent:.1f} s, {tokens / spent:.0f} tokens/s", file=sys.stderr)
