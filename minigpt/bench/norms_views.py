"""The timings of norms, as a table and as a plot."""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.bench.norms import PASSES
from minigpt.errors import MiniGPTError
from minigpt.report.charts import require_matplotlib

FORMATS = (".png", ".svg", ".pdf")


def norms_table(bench: dict[str, Any]) -> RenderableType:
    """Return a line for each shape and pass, and a column for each contestant: time, rate, share of a copy's rate."""
    names = list(dict.fromkeys(timing["norm"] for timing in bench["timings"]))
    table = Table("width", "rows", "computes", *names, box=None, pad_edge=False)
    lines: dict[tuple[int, int, str], dict[str, str]] = {}
    is_gpu = bench["device"] != "cpu"  # where a call from Python may take longer than its work
    for timing in bench["timings"]:
        cell = f"{timing['ms']:.4g} ms  {timing['gb_per_s']:.4g} GB/s  {timing['share_of_copy']:.2f}"
        cell += f"  {timing['call_ms']:.4g} ms a call" * is_gpu
        lines.setdefault((timing["width"], timing["rows"], timing["computes"]), {})[timing["norm"]] = cell
    for (width, rows, computes), cells in lines.items():
        table.add_row(str(width), f"{rows:,}", computes, *(cells[name] for name in names))
    said = f"{bench['dtype']} on {bench['device']}, {bench['versions']['hardware']}, torch {bench['versions']['torch']}"
    notes = [Text(f"{name} was left out: {why}") for name, why in bench["absent"].items()]
    return Group(Text(f"{said}; after the rate, its share of the rate of a plain copy"), table, *notes)


def require_plot(file: Path | None) -> None:
    """Check that a plot can be drawn, before the benchmark runs.

    Raises:
        MiniGPTError: if matplotlib is missing, the suffix is unknown, or the folder does not exist.
    """
    if file is None:
        return
    require_matplotlib()
    if file.suffix not in FORMATS or not file.absolute().parent.is_dir():
        raise MiniGPTError(f"cannot draw {file}: its name must end in {', '.join(FORMATS)} and its folder must exist")


def norms_plot(bench: dict[str, Any], file: Path) -> None:
    """Draw the share of a copy's rate over rows: a panel for each pass, a line for each contestant and width.

    Raises:
        MiniGPTError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    passes = [computes for computes in PASSES if any(t["computes"] == computes for t in bench["timings"])]
    figure = Figure(figsize=(5 * len(passes), 4), layout="constrained")
    for axes, computes in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for timing in bench["timings"]:
            if timing["computes"] == computes:
                line = lines.setdefault((timing["norm"], timing["width"]), [])
                line.append((timing["rows"], timing["share_of_copy"]))
        for (name, width), points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker=".", label=f"{name}, {width}")
        axes.set(title=computes, xscale="log", xlabel="rows", ylabel="share of a copy's rate", ylim=(0, None))
        axes.legend(fontsize="x-small")
    figure.suptitle(f"{bench['dtype']} on {bench['versions']['hardware']}")
    try:
        figure.savefig(file)
    except OSError as error:
        raise MiniGPTError(f"cannot write {file}: {error.strerror}") from error
