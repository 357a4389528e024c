"""Make the options of a command from the signature and the docstring of its function.

A parameter ``recipe: Recipe`` becomes the options that say how a model is opened, the fields of RECIPE, and the command
gets the ``Recipe``. ``recipes: list[Recipe]`` lets --norm and --sites be repeated: a recipe for every pair.
"""

import copy
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.markup import escape

from minigpt.errors import ConfigError
from minigpt.recipe import Recipe

# Annotations of parameters whose option is not named as they are, or has a range.
Json = Annotated[str | None, typer.Option("--json", metavar="[FILE]")]
Ray = Annotated[str | None, typer.Option(metavar="[ADDRESS]")]
Count = Annotated[int, typer.Option(min=1)]

# The options that open a model: the fields of a Recipe that say what the help says of them.
RECIPE = {
    "model" if field.name == "source" else field.name: field
    for field in dataclasses.fields(Recipe)
    if "about" in field.metadata
}
REPEATED = ("norm", "sites")  # where a command takes several recipes

# What help says about parameters that several commands have.
SHARED = {
    **{name: field.metadata["about"] for name, field in RECIPE.items()},
    "preset": "Without --model: random weights of this shape; by default gpt2.",
    "draft": "Draft tokens in eight bits and verify them; the same text, sooner: int8, none, or auto: where it pays.",
    "json_file": "Write JSON to a file; without one, or with '-', print it.",
    "ray": "Run on the Ray cluster at this address; without one, on a cluster on this machine.",
}


def _norms() -> Iterable[str]:
    from minigpt.norms import available

    return available()


def _presets() -> Iterable[str]:
    from minigpt.config import presets_folder

    return (path.stem for path in presets_folder().glob("*.json"))


# What a shell offers for a parameter.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    **{name: partial(tuple, field.metadata["values"]) for name, field in RECIPE.items() if field.metadata["values"]},
    "norm": _norms,
    "check": _norms,
    "preset": _presets,
    "overflow": lambda: ("refuse", "slide"),
    "draft": lambda: ("auto", "int8", "none"),
}


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Add a command to an app.

    Keyword-only parameters become options and the others arguments. Of a command that takes a recipe, an argument may
    also be given as an option: ``MODEL OUT``, or ``--model MODEL --out OUT``. The docstring's first paragraph is the
    help. Its Args, and SHARED, describe the parameters, and its Examples end the help.
    """
    summary, about, examples = _sections(command)
    signature = inspect.signature(command)
    run = command
    if any(name in signature.parameters for name in ("recipe", "recipes")):
        run, signature = _with_recipe(command, signature)
    parameters = [_described(parameter, SHARED | about) for parameter in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}  # Typer reads both
    app.command(help=summary, epilog=examples)(run)


def _with_recipe(
    command: Callable[..., None], signature: inspect.Signature
) -> tuple[Callable[..., None], inspect.Signature]:
    """Return a function that takes the options of a recipe and calls ``command`` with the recipe; and its signature."""
    option_of = inspect.Parameter.KEYWORD_ONLY
    several = "recipes" in signature.parameters
    places = [name for name, parameter in signature.parameters.items() if parameter.kind is not option_of]
    places = places if "recipe" in places else []  # else the arguments stay arguments
    parameters = []
    for name, parameter in signature.parameters.items():
        if name in ("recipe", "recipes"):
            for option_name, field in RECIPE.items():
                kind = list[str] | None if several and option_name in REPEATED else field.metadata["kind"]
                default = None if type(None) in get_args(kind) else field.default
                parameters.append(inspect.Parameter(option_name, option_of, default=default, annotation=kind))
        elif name not in places:
            parameters.append(parameter)
        else:
            parameters.append(parameter.replace(kind=option_of, default=None, annotation=parameter.annotation | None))
    places = ["model" if place == "recipe" else place for place in places]
    if places:
        words = Annotated[list[str] | None, typer.Argument(metavar=" ".join(map(str.upper, places)))]
        first = inspect.Parameter("words", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=words)
        parameters.insert(0, first)

    def run(**values: Any) -> None:
        _place_words(values, places)
        chosen = {name: values.pop(name) for name in RECIPE}
        recipes = recipes_of(chosen)
        command(**{"recipes": recipes} if several else {"recipe": recipes[0]}, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run, signature.replace(parameters=sorted(parameters, key=lambda parameter: parameter.kind))


def _place_words(values: dict[str, Any], places: list[str]) -> None:
    """Give the words of the command line to the arguments that no option has given.

    Raises:
        ConfigError: if their number does not fit. Only a model may be left out, where it is all that is asked for.
    """
    words = list(values.pop("words", None) or [])
    unset = [place for place in places if values[place] is None]
    if len(words) > len(unset) or (len(words) < len(unset) and unset != ["model"]):
        usage = " ".join(place.upper() for place in places)
        got = " ".join(words) or "neither"
        raise ConfigError(
            f"give {usage}, or {' and '.join(map(option, places))}; got {got} (--help shows what there is)"
        )
    values |= {place: word if place == "model" else Path(word) for place, word in zip(unset, words, strict=False)}


def recipes_of(values: dict[str, Any]) -> list[Recipe]:
    """Return the recipes of the options in RECIPE: one, or one for every pair of --norm and --sites.

    Raises:
        ConfigError, NormError: as ``Recipe``; the argument is the option's name.
    """
    chosen = {name: value for name, value in values.items() if name in RECIPE and value is not None}
    source, several = named_model(chosen.pop("model", None)), [chosen.pop(name, None) for name in REPEATED]
    if "keep" in chosen:
        chosen["keep"] = parse_keep(chosen["keep"])
    norms, sites = (value if isinstance(value, list) else [value] for value in several)
    return [
        Recipe(source, norm=norm, sites="*" if patterns is None else patterns.split(","), **chosen)
        for norm, patterns in product(norms or [None], sites or [None])
    ]


def named_model(name: str | None) -> str:
    """Return the model's name, by default the demo's.

    Raises:
        ConfigError: if it is empty, as an unset variable of a shell is.
    """
    if name == "":
        raise ConfigError("must name a model, got an empty text", argument="model")
    return "demo" if name is None else name


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
    info.help = about.get(name, info.help)
    if name in VALUES:
        info.autocompletion = lambda incomplete: sorted(word for word in VALUES[name]() if word.startswith(incomplete))
    return parameter.replace(annotation=Annotated[hint, info])


def with_optional_values(words: list[str]) -> list[str]:
    """Return the command line with a value after every ``--ray`` and ``--json`` that has none. Typer needs one.

    The word after --json is its file. Of a command that takes words of its own, it must end in .json or be "-".
    """
    takes_words = words[:1] in [["generate"], ["info"], ["perplexity"], ["sites"]]
    values = {"--ray": "local", "--json": "-"}

    def is_value(word: str, name: str) -> bool:
        if word == "-" or word.startswith("-"):
            return word == "-"
        return name != "--json" or not takes_words or word.endswith(".json")

    after = [*words[1:], "--"]
    return [
        f"{word}={values[word]}" if word in values and not is_value(following, word) else word
        for word, following in zip(words, after, strict=False)
    ]


def parse_keep(keep: str) -> tuple[str, ...]:
    """Return the words of --keep. ``norms.build`` checks them."""
    return () if keep == "none" else tuple(keep.split(","))


def parse_draft(draft: str) -> str | None:
    """Return the setting of --draft, whose None is "none" in a shell."""
    return None if draft == "none" else draft


def option(name: str) -> str:
    """Return the option of a parameter's name."""
    return f"--{name.replace('_', '-')}"
