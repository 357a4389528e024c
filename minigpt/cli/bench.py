"""minigpt bench: how fast is it, and against whom?"""

from importlib.util import find_spec
from typing import Annotated

import typer
from rich.table import Table

from minigpt.cli.files import progress, require_writable, show
from minigpt.cli.options import (
    BenchDtype,
    BenchModel,
    Device,
    Draft,
    JsonFile,
    Preset,
    Quantize,
    dtype_names,
    norm_names,
)
from minigpt.errors import ConfigError

EXAMPLES = (
    "Examples:\n\n[bold]minigpt bench generate[/]\n\n[bold]minigpt bench generate --quantize int8 "
    "--against ctranslate2:int8,llama.cpp:q8_0[/]\n\n[bold]minigpt bench generate --batch 16 --json -[/]"
)

bench = typer.Typer(help="Measure speed.")


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Measure speed and memory, against others in the same run."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command(epilog=EXAMPLES)
def generate(
    model: BenchModel = None,
    preset: Preset = None,
    dtype: BenchDtype = "float32",
    quantize: Quantize = None,
    batch: Annotated[int, typer.Option(help="Rows. Several differ in length, from half a prompt to a whole.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds; each contestant is timed once in a round.")] = 7,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile our steps with torch.compile.")] = False,
    draft: Draft = None,
    against: Annotated[
        str, typer.Option(help="Others, each NAME or NAME:KIND: transformers, ctranslate2, llama.cpp; '' for none.")
    ] = "transformers",
    json_file: JsonFile = None,
) -> None:
    """Time prefill and decoding against others, on the same weights in the same run, and against the limit."""
    from minigpt.bench.bench_report import bench_summary
    from minigpt.bench.generate import BenchPlan, bench_generate

    require_writable(json_file)
    plan = BenchPlan(
        model=model, preset=_preset(model, preset), kind=_kind(dtype, quantize), batch=batch,
        prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats, compiled=compiled, draft=draft,
        against=tuple(filter(None, against.split(","))),
    )  # fmt: skip
    with progress() as say:
        report = bench_generate(plan, progress=say)
    show(bench_summary(report), report.to_dict(), json_file)


@bench.command(epilog="Example:\n\n[bold]minigpt bench norms --norm fused --norm rms --width 768 --json -[/]")
def norms(
    norm: Annotated[
        list[str] | None, typer.Option(help="As minigpt parity takes it; may be repeated.", autocompletion=norm_names)
    ] = None,
    width: Annotated[list[int] | None, typer.Option(help="Width of a row; may be repeated.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; each norm is timed once in a round.")] = 20,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the rows; bfloat16 on CUDA by default, else float32.", autocompletion=dtype_names),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time norms in turns: forward, backward, and with the residual addition, against a plain copy."""
    from minigpt.bench.norms import bench_norms, norms_table

    require_writable(json_file)
    with progress() as say:
        timed = bench_norms(
            norm or (), widths=width or (), rows=rows or (), repeats=repeats, device=device, dtype=dtype, progress=say
        )
    show(norms_table(timed), timed, json_file)


@bench.command(epilog="Example:\n\n[bold]minigpt bench serve --model demo --against '' --json -[/]")
def serve(
    model: BenchModel = None,
    preset: Preset = None,
    dtype: BenchDtype = "float32",
    quantize: Quantize = None,
    clients: Annotated[int, typer.Option(help="Clients that ask at once; also the places of each contestant.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests of each client in a round.")] = 2,
    prompt_characters: Annotated[int, typer.Option(help="Random letters of each prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 48,
    repeats: Annotated[int, typer.Option(help="Rounds; each contestant has a turn in each.")] = 3,
    against: Annotated[
        str, typer.Option(help="Other servers: transformers, llama-server; '' for none.")
    ] = "transformers",
    json_file: JsonFile = None,
) -> None:
    """Time minigpt serve under load, in turns with complete on the same texts, and with other servers."""
    from minigpt.bench.serve import ServePlan, bench_serve
    from minigpt.serve import missing

    if find_spec("uvicorn") is None:
        raise missing(ModuleNotFoundError("", name="uvicorn"))
    require_writable(json_file)
    plan = ServePlan(
        model=model, preset=_preset(model, preset), kind=_kind(dtype, quantize), clients=clients, requests=requests,
        prompt_characters=prompt_characters, new_tokens=new_tokens, repeats=repeats,
        against=tuple(filter(None, against.split(","))),
    )  # fmt: skip
    with progress() as say:
        report = bench_serve(plan, progress=say)
    table = Table(
        "", "tokens/s", "first token p50", "p99", title=f"{clients} clients, {model or plan.preset}, {plan.kind}"
    )
    for name, found in report["contestants"].items():
        waits = found.get("first_token_ms")
        shown = [f"{waits['p50']:.0f} ms", f"{waits['p99']:.0f} ms"] if waits else ["", ""]
        table.add_row(name, f"{found['tokens_per_second']:.1f}", *shown)
    show(table, report, json_file)


def _preset(model: str | None, preset: str | None) -> str:
    if model is not None and preset is not None:
        raise ConfigError(f"--preset {preset} is for random weights; leave it out, or --model {model}")
    return preset or "gpt2"


def _kind(dtype: str, quantize: str | None) -> str:
    if quantize and dtype != "float32":
        raise ConfigError(f"--quantize {quantize} computes in float32; leave out --dtype {dtype}")
    return quantize or dtype
