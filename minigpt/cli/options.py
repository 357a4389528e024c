"""Make the options of a command from the signature and the docstring of its function."""

import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Annotated, get_args, get_origin

import typer
from rich.markup import escape

DTYPES = ("float32", "bfloat16", "float16", "float64")

# Annotations of parameters whose option is not named as they are, or has a range.
JsonFile = Annotated[str | None, typer.Option("--json")]
AsJson = Annotated[bool, typer.Option("--json")]
Compile = Annotated[bool, typer.Option("--compile")]
Ray = Annotated[str | None, typer.Option(metavar="[ADDRESS]")]
Count = Annotated[int, typer.Option(min=1)]

# What help says about parameters that several commands have.
SHARED = {
    "model": "A directory, a file of weights, a Hugging Face id, or 'demo'.",
    "revision": "Branch, tag or commit of a Hugging Face repository.",
    "norm": "A registered norm, package.module:Name, or path/to/file.py:Name.",
    "sites": "Where to put --norm, e.g. 'h.*.ln_1', or 'ln_f,h.0.*'.",
    "keep": "What of the model's norms stays beside a --norm that lacks it: scale,shift, one of them, none.",
    "fit": "File to fit the swapped norms on: closest to the original norms' outputs.",
    "center": "Centre what writes to the residual stream first, so that rms is a LayerNorm.",
    "attention": "sdpa (fused) or eager (written out).",
    "device": "cpu, cuda, cuda:N; by default CUDA if there is one.",
    "dtype": f"{', '.join(DTYPES)}; by default the checkpoint's.",
    "preset": "Without --model: random weights of this shape; by default gpt2.",
    "quantize": "int8: weights in eight bits, for the CPU; norms stay exact.",
    "draft": "int8: draft tokens in eight bits and verify them; the same text, sooner.",
    "json_file": "Write the report here; '-' is standard output.",
    "as_json": "Print one JSON object.",
    "ray": "Run on the Ray cluster at this address; without one, on a cluster on this machine.",
}


def _norms() -> Iterable[str]:
    import minigpt

    return minigpt.norms.available()


def _presets() -> Iterable[str]:
    from minigpt.config import presets_folder

    return (path.stem for path in presets_folder().glob("*.json"))


# What a shell offers for a parameter.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "norm": _norms,
    "check": _norms,
    "preset": _presets,
    "dtype": lambda: DTYPES,
    "attention": lambda: ("sdpa", "eager"),
    "overflow": lambda: ("refuse", "slide"),
    **dict.fromkeys(("quantize", "draft"), lambda: ("int8",)),
}


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Add a command to an app.

    Keyword-only parameters become options and the others arguments. The docstring's first paragraph is the help. Its
    Args, and SHARED, describe the parameters, and its Examples end the help.
    """
    summary, about, examples = _sections(command)
    signature = inspect.signature(command)
    parameters = [_described(parameter, SHARED | about) for parameter in signature.parameters.values()]
    vars(command)["__signature__"] = signature.replace(parameters=parameters)
    app.command(help=summary, epilog=examples)(command)


def _sections(command: Callable[..., None]) -> tuple[str, dict[str, str], str]:
    """Return a docstring's first paragraph, its Args by name, and its Examples in Rich's markup."""
    docstring = escape(inspect.getdoc(command) or "")
    head, _, examples = docstring.partition("\nExamples:\n")
    summary, _, args = head.partition("\nArgs:\n")
    about = {name: " ".join(text.split()) for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", args, re.M)}
    marked = re.sub(r"^(.*minigpt .*)$", r"[bold]\1[/]\n", textwrap.dedent(examples), flags=re.M)
    marked = re.sub(r"(?<!\n)\n(?!\n)", " ", marked)  # a sentence is wrapped at the terminal's width
    return summary.strip(), about, f"Examples:\n\n{marked}" if examples else ""


def _described(parameter: inspect.Parameter, about: dict[str, str]) -> inspect.Parameter:
    hint, name = parameter.annotation, parameter.name
    if hint is typer.Context:
        return parameter
    if get_origin(hint) is Annotated:
        hint, given = get_args(hint)
        info = copy.copy(given)
    elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        info = typer.Argument(metavar=name.upper())
    else:
        info = typer.Option(option(name)) if hint is bool else typer.Option()  # no --no-NAME for a flag
    info.help = about.get(name)
    if name in VALUES:
        info.autocompletion = lambda incomplete: sorted(word for word in VALUES[name]() if word.startswith(incomplete))
    return parameter.replace(annotation=Annotated[hint, info])


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
