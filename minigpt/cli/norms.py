"""minigpt norms: list the norms, or check whether one is a LayerNorm or an RMSNorm."""

from typing import Annotated

import typer
from rich.table import Table

from minigpt.cli.options import Given, JsonFile, OutFile, refuse_if, refuse_others
from minigpt.cli.output import STDOUT, progress, show
from minigpt.errors import ConfigError
from minigpt.garbage import uncollected

LISTS = ("json_file",)  # the options of the list; the others are for --check


def norms(
    *,
    given: Given,
    check: str | None = None,
    kind: Annotated[str | None, typer.Option("--as")] = None,
    arrays: str | None = None,
    dtype: str = "float32",
    every_case: Annotated[bool, typer.Option("--all", metavar="")] = False,
    html: OutFile = None,
    device: str | None = None,
    seed: int | None = None,
    json_file: JsonFile = None,
) -> None:
    """List the registered norms, or check whether one is a LayerNorm or an RMSNorm.

    Args:
        check: Run the conformance kit on this norm; no model is needed.
        kind: Judge it as a layer_norm or an rms_norm; by default as what it claims to be, or else as a layer_norm.
        arrays: The package whose arrays a function norm(x, weight, bias, eps) takes: numpy, jax, ...
        dtype: The dtype that verdict and exit status are about.
        every_case: Print every case of --check, and ask torch.compile where another case fails too.
        seed: Of the rows and weights of --check; a fresh one by default, which the report prints.
        html: Write the report of --check to this file, as a page.

    Examples:
        minigpt norms
        minigpt norms --check my_norm.py:MyNorm
        minigpt norms --check flax_norm.py:norm --arrays jax

        Exit status of --check: 0 the norm is one at --dtype, 1 it is not, 2 it could not be judged.
    """
    with uncollected():
        from minigpt.norms import available
        from minigpt.norms.registry import KINDS
        from minigpt.precision import resolve_dtype

    if check is None:
        refuse_others(given, LISTS, "is for --check NAME")
        known = available()
        table = Table("norm", "exact", "what it is", box=None, pad_edge=False)
        for name, info in sorted(known.items()):
            table.add_row(name, "yes" if info.exact else "no", info.reason or info.summary)
        show(table, {name: info.to_dict() for name, info in known.items()}, json_file)
        return
    prints_json = json_file == STDOUT
    refuse_if((prints_json and every_case, "every_case", "cannot go with --json, which has every case"))
    with uncollected():
        from minigpt.conformance import check_norm
        from minigpt.conformance.summary import conformance_page, conformance_summary
        from minigpt.machine import settle_memory

    settle_memory()
    resolve_dtype(dtype)
    if kind not in (None, *KINDS):
        raise ConfigError(f"must be {' or '.join(KINDS)}, got {kind!r}", argument="kind")
    with progress() as say:
        how = {"kind": kind, "device": device, "seed": seed, "arrays": arrays}
        report = check_norm(check, **how, progress=say, every_case=every_case or json_file is not None)
    summary = conformance_summary(report, dtype, every_case=every_case)
    show(summary, report.to_dict(), json_file, html, lambda: conformance_page(report, dtype))
    raise typer.Exit({True: 0, False: 1, None: 2}[report.dtypes.get(dtype)])
