"""minigpt generate --prompts: continue a file of prompts, with a progress bar."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

import minigpt
from minigpt.cli.files import bar
from minigpt.errors import GenerationError


def write_many(
    model: "minigpt.GPT2",
    tokenizer: "minigpt.Tokenizer",
    prompts: Path,
    out: Path,
    settings: Mapping[str, Any],
    batch_size: int,
    identity: Mapping[str, Any],
) -> None:
    """Continue every prompt that ``out`` has no text for.

    ``out`` belongs to one run: one set of prompts, weights, settings, tokenizer and ``identity``, e.g. the norm's name
    and source.
    """
    from minigpt.generation import complete
    from minigpt.generation.promptfile import ResultFile, fingerprint, read_prompts

    lines = read_prompts(prompts)
    if out.exists() and out.samefile(prompts):
        raise GenerationError(f"{out} holds the prompts; give another --out")
    written: set[tuple[int, int]] = set()  # filled below, before the first text is written
    texts = complete(
        model, tokenizer, [line.prompt for line in lines], batch_size=batch_size, skip=written, **settings
    )  # checks every prompt now, and writes lazily
    copies = range(settings.get("num_return_sequences", 1))
    places = {(line.line, copy): (number, copy) for number, line in enumerate(lines) for copy in copies}
    run = fingerprint(model, lines, {**settings, **_sources(tokenizer, identity)})
    with ResultFile(out, run) as results:
        if strange := results.done - places.keys():
            line, copy = min(strange)
            raise GenerationError(f"{out} has text {copy} of line {line}, not one of these; give another --out")
        written |= {places[done] for done in results.done}
        _note(results.note, f"{len(written)} texts are there already" if written else None)
        try:
            with _bar(len(places), len(written)) as done:
                for text in texts:
                    results.add(lines[text.prompt], text)
                    done(len(text.ids))
        except KeyboardInterrupt:
            _note(f"{len(results.done)} texts are kept in {out}; the same command continues from there")
            raise


def _sources(tokenizer: "minigpt.Tokenizer", identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else decides the texts: the norm by its name and the source of its file, and the tokenizer."""
    from minigpt.norms.foreign.locate import file_of

    file = file_of(identity["norm"])
    source = None if file is None else file.read_bytes()
    return {**identity, "source": source, "tokenizer": tokenizer.backend.to_str()}


def _note(*notes: str | None) -> None:
    for note in filter(None, notes):
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
