"""Options that several commands take."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

SOURCE = "A directory, a file of weights, a Hugging Face id, or 'demo'."
NORM = "A registered norm, package.module:Name, or path/to/file.py:Name"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def offer(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what a shell completes an option's value with: those words that begin so."""
    return lambda incomplete: sorted(word for word in words() if word.startswith(incomplete))


def _norms() -> Iterable[str]:
    import minigpt

    return minigpt.norms.available()


def _presets() -> Iterable[str]:
    from minigpt.config import presets_folder

    return (path.stem for path in presets_folder().glob("*.json"))


norm_names, dtype_names, preset_names = offer(_norms), offer(lambda: DTYPES), offer(_presets)

Model = Annotated[str, typer.Option("--model", help=SOURCE)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")]
Norm = Annotated[str, typer.Option(help=f"{NORM}.", autocompletion=norm_names)]
Sites = Annotated[str, typer.Option(help="Where to put --norm, e.g. 'h.*.ln_1', or 'ln_f,h.0.*'.")]
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
Attention = Annotated[
    str,
    typer.Option(help="sdpa (fused) or eager (written out).", autocompletion=offer(lambda: ("sdpa", "eager"))),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N; by default CUDA if there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default the checkpoint's.", autocompletion=dtype_names)
]
BenchDtype = Annotated[str, typer.Option("--dtype", help=f"{', '.join(DTYPES)}.", autocompletion=dtype_names)]
BenchModel = Annotated[str | None, typer.Option("--model", help=SOURCE)]
Preset = Annotated[
    str | None,
    typer.Option(help="Without --model: random weights of this shape; by default gpt2.", autocompletion=preset_names),
]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write the report here; '-' is standard output.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="int8: weights in eight bits, for the CPU; norms stay exact.", autocompletion=offer(lambda: ["int8"])
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="int8: draft tokens in eight bits and verify them; the same text, sooner.",
        autocompletion=offer(lambda: ["int8"]),
    ),
]
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


def norm_at(norm: str, sites: str) -> str | dict[str, str]:
    """Return the norm as ``from_pretrained`` takes it.

    Raises:
        ConfigError: if there are sites, but no norm for them.
    """
    from minigpt.errors import ConfigError

    if norm == "fused":  # the default, which leaves the norms that the checkpoint names
        if sites != "*":
            raise ConfigError("--sites says where to put --norm; give a --norm")
        return norm
    return dict.fromkeys(sites.split(","), norm)


def option(name: str) -> str:
    """Return the option of a parameter's name."""
    return f"--{name.replace('_', '-')}"
