"""The command line: parse, call, print. Nothing is computed here, and nothing heavy is imported before it is needed."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import minigpt
from minigpt.errors import MiniGPTError

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)

Model = Annotated[str, typer.Option("--model", help="A directory, .safetensors file, Hugging Face id, or 'demo'.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")]
Norm = Annotated[str, typer.Option(help="A registered norm, package.module:Name, or path/to/file.py:Name.")]
Attention = Annotated[str, typer.Option(help="sdpa (fused) or eager (written out).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N; by default CUDA where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, float64; by default the checkpoint's.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"minigpt {minigpt.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """A GPT-2 to read whole and believe, on a LayerNorm that you can swap."""


@app.command(
    epilog="Examples: [bold]minigpt generate 'Once upon a time' --seed 1[/]   "
    "[bold]minigpt generate 'The dog' --model gpt2 --greedy[/]   [bold]minigpt generate - < prompt.txt[/]"
)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; '-' reads standard input; none starts anew.")] = "",
    model: Model = "demo",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 200,
    temperature: Annotated[
        float | None, typer.Option(help="Divides the logits; 0 is greedy.  [dim]default 0.8[/]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that make up p, in (0, 1].")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    norm: Norm = "fused",
    attention: Attention = "sdpa",
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Write on from a prompt."""
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if greedy and (given := [f"--{name.replace('_', '-')}" for name, value in sampling.items() if value is not None]):
        raise minigpt.GenerationError(f"--greedy leaves nothing to draw, so it cannot go with {', '.join(given)}")
    text = _read_standard_input() if prompt == "-" else prompt
    settings = dict(sampling, do_sample=not greedy, max_new_tokens=max_new_tokens, stop_strings=stop)
    settings["temperature"] = 1.0 if greedy else 0.8 if temperature is None else temperature

    gpt2 = minigpt.from_pretrained(model, norm=norm, attention=attention, device=device, dtype=dtype, revision=revision)
    tokenizer = minigpt.Tokenizer.from_pretrained(model, revision=revision)
    pieces = minigpt.stream(gpt2, tokenizer, text, **settings)
    if as_json:
        _print_json({"model": model, "norm": norm, "prompt": text, "text": "".join(pieces), "settings": settings}, "-")
        return
    print(text, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


@app.command(
    epilog="Examples: [bold]minigpt parity --norm textbook[/]   "
    "[bold]minigpt parity --model gpt2 --norm my_norm.py:MyNorm --sites 'h.*.ln_1' --json -[/]   "
    "Exit status: 0 parity holds, 1 it does not, 2 it could not be judged."
)
def parity(
    model: Model = "demo",
    norm: Norm = "fused",
    sites: Annotated[
        list[str] | None, typer.Option(help="Where to put it, such as 'h.*.ln_1'; may be repeated.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to judge on; may be repeated.")] = None,
    attention: Attention = "sdpa",
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts to judge on, one a line.")] = None,
    text: Annotated[Path | None, typer.Option(help="File to take the perplexity of, before and after.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="File that 'frozen' norms collect deviations from.")] = None,
    noise: Annotated[bool, typer.Option("--noise", help="Measure ordinary differences too, such as bfloat16.")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Swap one site at a time; rank the sites.")
    ] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Name the smallest set of sites that breaks parity.")
    ] = False,
    budget: Annotated[str | None, typer.Option(help="Limits that decide instead: 'kl=1e-6,perplexity=0.01%'.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report here; '-' is standard output.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report here as one self-contained page.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Show two --json reports side by side.")] = None,
) -> None:
    """Prove by its logits that a model with another norm is still the same model, or show that it is not."""
    if compare is not None:
        _compare(*compare, html)
        return
    for file in (json_file, html):
        _require_writable(file)
    with _progress() as say:
        report = minigpt.parity(
            model, norm=norm, sites=sites or "*", prompts=_prompts(prompt, prompts), attention=attention, device=device,
            dtype=dtype, revision=revision, noise=noise, sensitivity=sensitivity, bisect=bisect, text=text,
            calibration=calibration, budget=budget, progress=say,
        )  # fmt: skip
    _show(report, json_file, html)
    raise typer.Exit(0 if report.passed else 1)


@app.command(
    epilog="Examples: [bold]minigpt norms[/]   [bold]minigpt norms --check my_norm.py:MyNorm[/]   "
    "Exit status of --check: 0 it is a LayerNorm, 1 it is not, 2 it could not be judged."
)
def norms(
    check: Annotated[str | None, typer.Option(help="Run the conformance kit on this norm; no model is needed.")] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the registered norms, or check whether one is a LayerNorm."""
    if check is None:
        _list_norms(as_json)
        return
    from minigpt.lab.conformance import check_norm
    from minigpt.lab.summary import conformance_summary

    with _progress() as say:
        report = check_norm(check, device=device, progress=say)
    if as_json:
        _print_json(report.to_dict(), "-")
    else:
        _console().print(conformance_summary(report))
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="A directory, .safetensors file, Hugging Face id, or 'demo'.")] = "demo",
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint is: shapes, parameters, dtype, norms, and where its files lie."""
    from minigpt.lab.describe import describe

    facts = describe(model, revision=revision)
    if as_json:
        _print_json(facts, "-")
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, "\n".join(map(str, value)) if isinstance(value, list) else str(value))
    _console().print(table)


def main() -> None:
    """Run the command line: 0 done, 1 parity does not hold, 2 an error, told in one line on standard error."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads our output may have seen enough: end quietly
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still shows the others
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except MiniGPTError as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(f"{error.format_message()} (minigpt --help shows what there is)")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try, and fail, to write the rest at its exit
        _fail(f"cannot write the output: {error.strerror}")


_UsageError: Any = typer.BadParameter.__base__  # of click, which typer carries within itself or beside it


def _fail(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _console() -> Console:
    """Standard output, on which text is what it is: a model's name may hold [brackets] or :colons:."""
    return Console(highlight=False, markup=False, emoji=False)


def _list_norms(as_json: bool) -> None:
    known = minigpt.norms.available()
    if as_json:
        _print_json({name: info.to_dict() for name, info in known.items()}, "-")
        return
    table = Table("norm", "exact", "what it is", box=None, pad_edge=False)
    for name, info in sorted(known.items()):
        table.add_row(name, "yes" if info.exact else "no", info.reason or info.summary)
    _console().print(table)


def _show(report: "minigpt.ParityReport", json_file: str | None, html: Path | None) -> None:
    from minigpt.lab.summary import parity_summary

    if json_file is not None:
        _print_json(report.to_dict(), json_file)
    if html is not None:
        from minigpt.lab.page import report_page

        _write(html, report_page(report.to_dict()))
    if json_file != "-":
        _console().print(parity_summary(report))


def _compare(first: Path, second: Path, html: Path | None) -> None:
    from minigpt.lab.comparison import comparison_summary

    a, b = _read_json(first), _read_json(second)
    if html is not None:
        from minigpt.lab.page import comparison_page

        _write(html, comparison_page(a, b))
    _console().print(comparison_summary(a, b))


def _prompts(given: list[str] | None, file: Path | None) -> list[str] | None:
    if file is None:
        return given
    lines = [line for line in _read(file).splitlines() if line.strip()]
    if not lines:
        raise minigpt.GenerationError(f"{file} holds no prompt; write one on each line")
    return [*(given or []), *lines]


def _print_json(fields: Any, file: str) -> None:
    text = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if file == "-":
        print(text, end="")
    else:
        _write(file, text)


def _require_writable(file: str | Path | None) -> None:
    """Refuse a file that cannot be written before minutes of work are lost on it."""
    if file is None or str(file) == "-":
        return
    if Path(file).is_dir() or not Path(file).absolute().parent.is_dir():
        raise MiniGPTError(f"cannot write {file}: it is a folder, or the folder for it does not exist")


def _write(file: str | Path, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MiniGPTError(f"cannot write {file}: {error.strerror}") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise MiniGPTError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MiniGPTError(f"{file} is not UTF-8 text: {error}") from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(_read(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise MiniGPTError(f"{file} is not JSON: {error}") from error


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MiniGPTError(f"standard input is not UTF-8: {error}") from error


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is being done, and for how long."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda step: progress.update(task, description=step)


if __name__ == "__main__":
    main()
