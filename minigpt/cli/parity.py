"""minigpt parity: is it still the same model?"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

import minigpt
from minigpt.cli import options
from minigpt.cli.files import console, progress, require_writable, show, write
from minigpt.json_file import read_object

EXAMPLES = (
    "Examples:\n\n[bold]minigpt parity --norm textbook[/]\n\n"
    "[bold]minigpt parity --model gpt2 --norm my_norm.py:MyNorm --sites 'h.*.ln_1' --json -[/]\n\n"
    "[bold]minigpt parity --norm rms --norm dyt --sites '*' --sites ln_f[/]\n\n"
    "[bold]minigpt parity --model ./tuned --against gpt2 --text held-out.txt[/]\n\n"
    "[bold]minigpt parity --compare a.json b.json c.json --html page.html[/]\n\n"
    "Exit status: 0 every verdict is a pass, 1 one is not, 2 it could not be judged; --compare only shows."
)


def parity(
    reports: Annotated[list[Path] | None, typer.Argument(help="Reports to --compare.")] = None,
    model: options.Model = "demo",
    norm: Annotated[
        list[str] | None,
        typer.Option(help=f"{options.NORM}; by default fused. May be repeated: every norm is judged at every --sites.",
                     autocompletion=options.norm_names),
    ] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(help="Where to put it, e.g. 'h.*.ln_1', or 'ln_f,h.0.*' for several patterns at once. May be "
                     "repeated: every --norm is judged at each."),
    ] = None,
    keep: options.Keep = "scale,shift",
    center: options.Center = False,
    against: Annotated[
        str | None, typer.Option(help="The original that the model was finetuned or quantized from.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to judge on; may be repeated.")] = None,
    attention: options.Attention = "sdpa",
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    revision: options.Revision = None,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts: plain lines, or JSON lines.")] = None,
    text: Annotated[Path | None, typer.Option(help="File to measure the perplexity of, before and after.")] = None,
    fit: options.Fit = None,
    noise: Annotated[bool, typer.Option("--noise", help="Measure ordinary differences too, e.g. bfloat16.")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Swap one site at a time; rank the sites.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Swap site after site, the least harmful first, to the kl of --budget.")
    ] = False,
    remove_file: Annotated[
        Path | None, typer.Option(help="Keep the trials of --remove here; started again, the search goes on.")
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Name the swapped sites that break parity, or the budget.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(help="Limits that decide, 'kl=1e-6,perplexity=0.01%'; top1=1% lets 1 % of the tokens differ."),
    ] = None,
    json_file: options.JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="Write the report here as one self-contained page.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show --json reports side by side.")] = False,
) -> None:  # fmt: skip
    """Prove by its logits that a model with another norm is still the same model, or show by how much it differs."""
    if compare:
        _compare(reports or [], html)
        return
    if remove_file is not None and not remove:
        raise minigpt.ConfigError("--remove-file is for --remove")
    if reports:
        raise minigpt.ConfigError(f"{reports[0]} is only read with --compare; give the model to judge as --model")
    norms, patterns = norm or ["fused"], [one.split(",") for one in sites or ["*"]]
    require_writable(json_file, html, remove_file)
    given, pairs = _prompts(prompt, prompts), list(product(norms, patterns))
    judged = []
    with progress() as say:
        for number, (name, where) in enumerate(pairs):
            judged.append(minigpt.parity(
                model, norm=name, sites=where, keep=options.parse_keep(keep), center=center, against=against,
                prompts=given, attention=attention, device=device, dtype=dtype, quantize=quantize, revision=revision,
                noise=noise, sensitivity=sensitivity, remove=remove, remove_file=remove_file, bisect=bisect, text=text,
                fit=fit, budget=budget,
                progress=_part(say, number, len(pairs), f"{name} at {','.join(where)}: " if len(pairs) > 1 else ""),
            ))  # fmt: skip
    _show(judged, json_file, html)
    raise typer.Exit(0 if all(report.passed for report in judged) else 1)


def _part(say: Callable[[str, float], None], number: int, total: int, about: str) -> Callable[[str, float], None]:
    """Tell the progress of one judgement among several."""
    return lambda step, done: say(f"{about}{step}", (number + done) / total)


def _show(reports: "Sequence[minigpt.ParityReport]", json_file: str | None, html: Path | None) -> None:
    from minigpt.report.comparison import reports_table
    from minigpt.report.parity_summary import parity_summary

    fields = [report.to_dict() for report in reports]
    if len(reports) == 1:
        show(parity_summary(reports[0]), fields[0], json_file)
    else:
        show(reports_table(fields), {"reports": fields}, json_file)
    _write_page(fields, html)


def _compare(files: list[Path], html: Path | None) -> None:
    if not files:
        raise minigpt.ConfigError("--compare needs the files of two or more reports")
    require_writable(html)
    from minigpt.report.comparison import reports_table

    reports = [report for file in files for report in _reports_in(file)]
    console().print(reports_table(reports))
    _write_page(reports, html)


def _reports_in(file: Path) -> list[dict[str, Any]]:
    """Return the report in a file, or the several that one command has written."""
    fields = read_object(file, minigpt.MiniGPTError)
    return fields.get("reports", [fields])


def _write_page(reports: Sequence[dict[str, Any]], html: Path | None) -> None:
    if html is not None:
        from minigpt.report.page import report_page

        write(html, report_page(*reports))


def _prompts(given: list[str] | None, file: Path | None) -> list[str] | None:
    if file is None:
        return given
    from minigpt.generation.promptfile import read_prompts

    return [*(given or []), *(line.prompt.text for line in read_prompts(file))]
