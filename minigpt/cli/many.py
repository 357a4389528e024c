"""minigpt generate --prompts: continue a file of prompts, with a progress bar."""

import dataclasses
import glob
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

import minigpt
from minigpt.cli.files import bar
from minigpt.errors import GenerationError

if TYPE_CHECKING:
    from minigpt.generation import Completion, Prompt

    Complete = Callable[..., Iterator[Completion]]


def write_many(
    model: "minigpt.GPT2",
    tokenizer: "minigpt.Tokenizer",
    prompts: Path,
    out: Path,
    settings: Mapping[str, Any],
    batch_size: int,
    identity: Mapping[str, Any],
    complete: "Complete | None" = None,
) -> None:
    """Continue every prompt of the files that ``out`` has no text for.

    A file of texts belongs to one run: one file of prompts, weights, settings, tokenizer and ``identity``, e.g. the
    norm's name and source.

    Args:
        prompts: a file; or a pattern of files, and then ``out`` is a folder that gets a file of the same name for each.
        complete: what writes the texts, in place of ``minigpt.generation.complete`` with this model.
    """
    from minigpt import generation
    from minigpt.generation.promptfile import ResultFile, fingerprint, read_prompts

    files = _files(prompts, out)
    asked = {file: read_prompts(file) for file in files}
    copies = settings.get("num_return_sequences", 1)
    each = [
        (file, line, _seeded(line.prompt, settings.get("seed"), number * copies))
        for file, lines in asked.items()
        for number, line in enumerate(lines)
    ]
    written: set[tuple[int, int]] = set()  # filled below, before the first text is written
    how: dict[str, Any] = {"batch_size": batch_size, "skip": written, **settings}
    given = [prompt for _, _, prompt in each]
    texts = generation.complete(model, tokenizer, given, **how)  # checks every prompt now, and writes lazily
    if complete is not None:
        texts = complete(given, **how)
    what = {**settings, **identity, "tokenizer": tokenizer.backend.to_str()}
    with ExitStack() as stack:
        results = {
            file: stack.enter_context(ResultFile(files[file], fingerprint(model, lines, what)))
            for file, lines in asked.items()
        }
        for number, (file, line, _) in enumerate(each):
            written |= {(number, copy) for copy in range(copies) if (line.line, copy) in results[file].done}
        for found in results.values():
            _note(found.note)
        _note(f"{len(written)} texts are there already" if written else None)
        try:
            with _bar(len(each) * copies, len(written)) as done:
                for text in texts:
                    file, line, _ = each[text.prompt]
                    results[file].add(line, text)
                    done(len(text.ids))
        except KeyboardInterrupt:
            kept = sum(len(found.done) for found in results.values())
            _note(f"{kept} texts are kept in {out}; the same command continues from there")
            raise


def _files(prompts: Path, out: Path) -> dict[Path, Path]:
    """Return the file of texts for each file of prompts.

    Raises:
        GenerationError: if no file matches the pattern.
    """
    if prompts.exists() or not glob.has_magic(str(prompts)):
        return {prompts: out}
    found = [Path(file) for file in sorted(glob.glob(str(prompts), recursive=True))]
    if not found:
        raise GenerationError(f"no file matches {prompts}")
    out.mkdir(parents=True, exist_ok=True)
    return {file: out / file.name for file in found}


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
