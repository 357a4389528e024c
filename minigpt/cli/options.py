"""Options that several commands take, and which of them were taken."""

from typing import Annotated

import typer

SOURCE = "A directory, a file of weights, a Hugging Face id, or 'demo'."

Model = Annotated[str, typer.Option("--model", help=SOURCE)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")]
IgnoreHeads = Annotated[bool, typer.Option("--ignore-heads", help="Leave out the heads of classifiers and their like.")]
CheckFinite = Annotated[
    bool,
    typer.Option(
        "--check-finite", help="Read every weight first, and refuse NaN and infinity, those that --dtype makes too."
    ),
]
Norm = Annotated[str, typer.Option(help="A registered norm, package.module:Name, or path/to/file.py:Name.")]
Keep = Annotated[
    str,
    typer.Option(help="What of the model's norms stays beside a --norm that lacks it: scale,shift, one of them, none."),
]
Attention = Annotated[str, typer.Option(help="sdpa (fused) or eager (written out).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N; by default CUDA where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, float64; by default the checkpoint's.")]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write the report here; '-' is standard output.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quantize = Annotated[str | None, typer.Option(help="int8: weights in eight bits, for the CPU; norms stay exact.")]


def options_given(context: typer.Context) -> list[str]:
    """The options that stand on the command line, as they are called there."""
    by_name = {option.name: option.opts[-1] for option in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in by_name if name}
    return [by_name[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def parse_keep(keep: str) -> tuple[str, ...]:
    """Return the words of --keep; whoever builds the norm checks them."""
    return () if keep == "none" else tuple(keep.split(","))
