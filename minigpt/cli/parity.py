"""minigpt parity: is it still the same model?"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

import minigpt
from minigpt.cli.files import console, progress, read_json, require_name, require_writable, show, write
from minigpt.cli.options import (
    Attention,
    CheckFinite,
    Device,
    Dtype,
    JsonFile,
    Keep,
    Model,
    Norm,
    Quantize,
    Revision,
    options_given,
    parse_keep,
)
from minigpt.text_file import read_text

EXAMPLES = (
    "Examples:\n\n[bold]minigpt parity --norm textbook[/]\n\n"
    "[bold]minigpt parity --model gpt2 --norm my_norm.py:MyNorm --sites 'h.*.ln_1' --json -[/]\n\n"
    "Exit status: 0 parity holds, 1 it does not, 2 it could not be judged; --compare only shows."
)


def parity(
    context: typer.Context,
    model: Model = "demo",
    norm: Norm = "fused",
    sites: Annotated[
        list[str] | None, typer.Option(help="Where to put it, such as 'h.*.ln_1'; may be repeated.")
    ] = None,
    keep: Keep = "scale,shift",
    prompt: Annotated[list[str] | None, typer.Option(help="Text to judge on; may be repeated.")] = None,
    attention: Attention = "sdpa",
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    revision: Revision = None,
    check_finite: CheckFinite = False,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts to judge on, one a line.")] = None,
    text: Annotated[Path | None, typer.Option(help="File to take the perplexity of, before and after.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="File that 'frozen' norms collect deviations from.")] = None,
    noise: Annotated[bool, typer.Option("--noise", help="Measure ordinary differences too, such as bfloat16.")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Swap one site at a time; rank the sites.")
    ] = False,
    bisect: Annotated[bool, typer.Option("--bisect", help="Name the swapped sites that break parity.")] = False,
    budget: Annotated[
        str | None,
        typer.Option(help="Limits that decide, 'kl=1e-6,perplexity=0.01%'; top1=1% lets 1 % of the tokens differ."),
    ] = None,
    json_file: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="Write the report here as one self-contained page.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Show two --json reports side by side.")] = None,
) -> None:
    """Prove by its logits that a model with another norm is still the same model, or show that it is not."""
    if compare is not None:
        if others := [option for option in options_given(context) if option not in ("--compare", "--html")]:
            raise minigpt.ConfigError(f"--compare judges nothing anew, so it cannot go with {', '.join(others)}")
        _require_showable(None, html, beside=compare)
        _compare(*compare, html)
        return
    from minigpt.checkpoint import files_at
    from minigpt.norms.foreign.locate import file_of

    _require_showable(json_file, html, beside=(prompts, text, calibration, file_of(norm), *files_at(model)))
    with progress() as say:
        report = minigpt.parity(
            model, norm=norm, sites=sites or "*", keep=parse_keep(keep), prompts=_prompts(prompt, prompts),
            attention=attention, device=device, dtype=dtype, quantize=quantize, revision=revision,
            check_finite=check_finite, noise=noise, sensitivity=sensitivity, bisect=bisect, text=text,
            calibration=calibration, budget=budget, progress=say,
        )  # fmt: skip
    _show(report, json_file, html)
    raise typer.Exit(0 if report.passed else 1)


def _require_showable(json_file: str | None, html: Path | None, beside: Iterable[Path | None]) -> None:
    """Refuse what could not be shown before minutes of work are lost on it."""
    require_name("--html", html)
    require_writable(json_file, html, beside=beside)
    if html is not None:
        from minigpt.report.page import require_matplotlib

        require_matplotlib()


def _show(report: "minigpt.ParityReport", json_file: str | None, html: Path | None) -> None:
    from minigpt.report.parity_summary import parity_summary

    show(parity_summary(report), report.to_dict(), json_file)
    if html is not None:
        from minigpt.report.page import report_page

        write(html, report_page(report.to_dict()))


def _compare(first: Path, second: Path, html: Path | None) -> None:
    from minigpt.report.comparison import comparison_summary

    a, b = read_json(first), read_json(second)
    console().print(comparison_summary(a, b))
    if html is not None:
        from minigpt.report.page import comparison_page

        write(html, comparison_page(a, b))


def _prompts(given: list[str] | None, file: Path | None) -> list[str] | None:
    if file is None:
        return given
    lines = [line.removesuffix("\r") for line in read_text(file).split("\n") if line.strip()]
    if not lines:
        raise minigpt.GenerationError(f"{file} holds no prompt; write one on each line")
    if re.match(r'\s*\{.*"prompt"\s*:', lines[0]):
        raise minigpt.GenerationError(f"{file} holds JSON, as generate reads it; here a prompt is a line, as it is")
    return [*(given or []), *lines]
