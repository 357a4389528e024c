"""minigpt bench serve: tokens a second that reach the clients of a server, and the time to the first token."""

from typing import Annotated

import typer
from rich.table import Table

from minigpt.cli.files import progress, require_writable, show
from minigpt.cli.options import SOURCE, JsonFile

EXAMPLES = (
    "Examples:\n\n[bold]minigpt bench serve[/]\n\n[bold]minigpt bench serve --model demo --against '' --json -[/]"
)


def serve(
    model: Annotated[str | None, typer.Option(help=SOURCE)] = None,
    preset: Annotated[str, typer.Option(help="Without --model: random weights of this shape.")] = "gpt2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    clients: Annotated[int, typer.Option(help="Clients that ask at once; also the places of each contestant.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests of each client in a round.")] = 2,
    prompt_characters: Annotated[int, typer.Option(help="Random letters of each prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 48,
    repeats: Annotated[int, typer.Option(help="Rounds; each contestant has a turn in each.")] = 3,
    against: Annotated[str, typer.Option(help="Other servers: transformers; '' for none.")] = "transformers",
    json_file: JsonFile = None,
) -> None:
    """Time minigpt serve under load, in turns with complete on the same texts, and with another server."""
    from minigpt.bench.serve import ServePlan, bench_serve

    require_writable(json_file)
    plan = ServePlan(
        model=model, preset=preset, dtype=dtype, clients=clients, requests=requests,
        prompt_characters=prompt_characters, new_tokens=new_tokens, repeats=repeats,
        against=tuple(filter(None, against.split(","))),
    )  # fmt: skip
    with progress() as say:
        report = bench_serve(plan, progress=say)
    table = Table("", "tokens/s", "first token p50", "p99", title=f"{clients} clients, {model or preset}, {dtype}")
    for name, found in report["contestants"].items():
        waits = found.get("first_token_ms")
        shown = [f"{waits['p50']:.0f} ms", f"{waits['p99']:.0f} ms"] if waits else ["", ""]
        table.add_row(name, f"{found['tokens_per_second']:.1f}", *shown)
    show(table, report, json_file)
