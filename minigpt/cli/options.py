"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

SOURCE = "A directory, a file of weights, a Hugging Face id, or 'demo'."

Model = Annotated[str, typer.Option("--model", help=SOURCE)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")]
Norm = Annotated[str, typer.Option(help="A registered norm, package.module:Name, or path/to/file.py:Name.")]
Keep = Annotated[
    str,
    typer.Option(help="What of the model's norms stays beside a --norm that lacks it: scale,shift, one of them, none."),
]
Fit = Annotated[
    Path | None,
    typer.Option(metavar="TEXT", help="File to fit the swapped norms on: closest to the original norms' outputs."),
]
Center = Annotated[
    bool, typer.Option("--center", help="Centre what writes to the residual stream first, so that rms is a LayerNorm.")
]
Attention = Annotated[str, typer.Option(help="sdpa (fused) or eager (written out).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N; by default CUDA if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, float64; by default the checkpoint's.")]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write the report here; '-' is standard output.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quantize = Annotated[str | None, typer.Option(help="int8: weights in eight bits, for the CPU; norms stay exact.")]

Ray = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]", help="Run on the Ray cluster at this address; without one, on a cluster on this machine."
    ),
]


def with_ray_address(words: list[str]) -> list[str]:
    """Return the command line with an address after every ``--ray`` that has none. Typer needs a value."""
    followed = [*words[1:], "-"]
    return [
        "--ray=local" if word == "--ray" and after.startswith("-") else word
        for word, after in zip(words, followed, strict=False)
    ]


def parse_keep(keep: str) -> tuple[str, ...]:
    """Return the words of --keep. ``norms.build`` checks them."""
    return () if keep == "none" else tuple(keep.split(","))
