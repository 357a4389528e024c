"""minigpt bench norms: time norms against a plain copy of memory."""

from pathlib import Path
from typing import Annotated

import typer

from minigpt.cli.files import progress, require_writable, show
from minigpt.cli.options import Device, JsonFile

EXAMPLES = (
    "Examples:\n\n[bold]minigpt bench norms[/]\n\n[bold]minigpt bench norms --width 768 --rows 1024 --json -[/]\n\n"
    "Contestants: torch, compiled, triton, liger, or any norm that minigpt parity --norm takes."
)


def norms(
    norm: Annotated[list[str] | None, typer.Option(help="A contestant; may be repeated.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="Width of a row; may be repeated.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; each norm is timed once in a round; 2 or more.")] = 20,
    device: Device = None,
    dtype: Annotated[str | None, typer.Option(help="Of the rows; bfloat16 on CUDA by default, else float32.")] = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this file: .png, .svg or .pdf.")] = None,
) -> None:
    """Time norms in turns: forward, backward, and with the residual addition. Wrong results are not timed."""
    from minigpt.bench import norms as bench
    from minigpt.bench.norms_views import norms_plot, norms_table, require_plot

    require_writable(json_file, plot)
    require_plot(plot)
    with progress() as say:
        timed = bench.bench_norms(
            contestants=norm or bench.CONTESTANTS, widths=width or bench.WIDTHS, rows=rows or None,
            repeats=repeats, device=device, dtype=dtype, progress=say,
        )  # fmt: skip
    show(norms_table(timed.to_dict()), timed.to_dict(), json_file)
    if plot is not None:
        norms_plot(timed.to_dict(), plot)
