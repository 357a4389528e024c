"""minigpt bench: how fast is it, and against whom?"""

from typing import Annotated

import typer

from minigpt.cli import bench_serve
from minigpt.cli.files import progress, require_writable, show
from minigpt.cli.options import SOURCE, Device, JsonFile, Quantize
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
    model: Annotated[str | None, typer.Option(help=SOURCE)] = None,
    preset: Annotated[
        str | None, typer.Option(help="Without --model: random weights of this shape.  [dim]default gpt2[/]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    quantize: Quantize = None,
    batch: Annotated[int, typer.Option(help="Rows. Several differ in length, from half a prompt to a whole.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds; each contestant is timed once in a round.")] = 7,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile our steps with torch.compile.")] = False,
    against: Annotated[
        str, typer.Option(help="Others, each NAME or NAME:KIND: transformers, ctranslate2, llama.cpp; '' for none.")
    ] = "transformers",
    json_file: JsonFile = None,
) -> None:
    """Time prefill and decoding against others, on the same weights in the same run, and against the limit."""
    from minigpt.bench.bench_summary import bench_summary
    from minigpt.bench.generate import BenchPlan, bench_generate

    require_writable(json_file)
    if quantize and dtype != "float32":
        raise ConfigError(f"--quantize {quantize} computes in float32; leave out --dtype {dtype}")
    if model is not None and preset is not None:
        raise ConfigError(f"--preset {preset} is for random weights; leave it out, or --model {model}")
    plan = BenchPlan(
        model=model, preset=preset or "gpt2", kind=quantize or dtype, batch=batch, prompt_tokens=prompt_tokens,
        new_tokens=new_tokens, repeats=repeats, compiled=compiled,
        against=tuple(filter(None, against.split(","))),
    )  # fmt: skip
    with progress() as say:
        report = bench_generate(plan, progress=say)
    show(bench_summary(report), report.to_dict(), json_file)


@bench.command(epilog="Example:\n\n[bold]minigpt bench norms --norm fused --norm rms --width 768 --json -[/]")
def norms(
    norm: Annotated[list[str] | None, typer.Option(help="As minigpt parity takes it; may be repeated.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="Width of a row; may be repeated.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; each norm is timed once in a round.")] = 20,
    device: Device = None,
    dtype: Annotated[str | None, typer.Option(help="Of the rows; bfloat16 on CUDA by default, else float32.")] = None,
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


bench.command(epilog=bench_serve.EXAMPLES)(bench_serve.serve)
