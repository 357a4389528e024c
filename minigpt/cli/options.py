"""Make the options of a command from the signature and the docstring of its function.

A parameter ``recipe: Recipe`` becomes the options that say how a model is opened, the fields of RECIPE, and the command
gets the ``Recipe``. ``recipes: list[Recipe]`` lets --norm and --sites be repeated: a recipe for every pair.
A parameter ``given: Given`` gets the names of the parameters that the command line sets.
"""

import copy
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.markup import escape

from minigpt.choices import check_option, words_of
from minigpt.cli.output import STDOUT, check_folder, check_writable
from minigpt.config import presets_folder
from minigpt.errors import ConfigError
from minigpt.generation.settings import SETTINGS, SHELL
from minigpt.recipe import Recipe

Given = frozenset[str]  # names of parameters

# Parameters whose option has another name.
SPELLED = {
    "source": "model", "json_file": "json", "every_case": "all", "kind": "as", "eval_text": "eval", "set_": "set",
}  # fmt: skip


def _out_file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    return check_writable(_no_dash(param, value))


def _out_folder(param: typer.CallbackParam, value: Path) -> Path | None:
    _no_dash(param, value)
    return check_folder(value)


def _no_dash(param: typer.CallbackParam, place: Path | None) -> Path | None:
    """Return the place of a file or a folder, if it is not "-": only JSON can be printed."""
    if place == STDOUT:
        name = param.opts[0]
        if param.param_type_name == "argument":
            name = str(param.name).upper()
        raise ConfigError(f"{name} must be a path, got '-'; only JSON can be printed")
    return place


# Annotations of parameters whose option is not named as they are, is checked, or has a range.
Json = Annotated[bool, typer.Option("--json")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", callback=check_writable)]
OutFile = Annotated[Path | None, typer.Option(metavar="FILE", callback=_out_file)]
LaterFile = Annotated[Path | None, typer.Option(metavar="FILE", callback=_no_dash)]  # the command checks it
OutFolder = Annotated[Path, typer.Option(metavar="FOLDER", callback=_out_folder)]
OutPlace = Annotated[Path, typer.Argument(metavar="OUT", callback=_out_folder)]
Ray = Annotated[str | None, typer.Option(metavar="[ADDRESS]")]
Count = Annotated[int, typer.Option(min=1)]

# The options that open a model: the fields of a Recipe that say what the help says of them.
RECIPE: dict[str, dataclasses.Field[Any]] = {}
for _field in dataclasses.fields(Recipe):
    if "about" in _field.metadata:
        RECIPE[SPELLED.get(_field.name, _field.name)] = _field
REPEATED = ("norm", "sites")  # where a command takes several recipes

# What help says about parameters that several commands have.
SHARED = {
    "preset": "Without --model: random weights of this shape; by default gpt2.",
    "draft": "Draft tokens in eight bits and verify them; the same text, sooner: int8, none, or auto: where it pays.",
    "json": "Print JSON.",
    "json_file": "Write JSON to a file; '-' prints it.",
    "html": "Write a page here.",
    "ray": "Run on the Ray cluster at this address; without one, on a cluster on this machine.",
}


def _norms() -> Iterable[str]:
    from minigpt.norms import available  # not before: help must not wait for PyTorch

    return available()


DRAFTS = ("auto", "int8", "none")

# What a shell offers for a parameter.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "norm": _norms,
    "check": _norms,
    "preset": lambda: (path.stem for path in presets_folder().glob("*.json")),
    "overflow": lambda: ("refuse", "slide"),
    "draft": lambda: DRAFTS,
}

for _name, _field in RECIPE.items():
    SHARED[_name] = _field.metadata["about"]
    if _field.metadata["values"]:
        VALUES.setdefault(_name, partial(tuple, _field.metadata["values"]))


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Add a command to an app.

    Keyword-only parameters become options and the others arguments. The docstring's first paragraph is the help. Its
    Args, and SHARED, describe the parameters, and its Examples end the help.
    """
    summary, about, examples = _help_of(command)
    about = SHARED | about
    declared = inspect.signature(command).parameters
    parameters: list[inspect.Parameter] = []
    for parameter in declared.values():
        for each in _parameters(parameter):
            parameters.append(_with_help(each, about))

    def run(context: typer.Context, **values: Any) -> None:
        if "given" in declared:
            values["given"] = given_in(context)
        if "recipe" in declared or "recipes" in declared:
            recipes = recipes_of({name: values.pop(name) for name in RECIPE})
            if "recipes" in declared:
                values["recipes"] = recipes
            else:
                values["recipe"] = recipes[0]
        try:
            command(**values)
        except BrokenPipeError:  # nobody reads the rest; no status of a verdict may come of it
            raise typer.Exit(128 + 13) from None

    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    parameters.sort(key=lambda parameter: parameter.kind)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    hints: dict[str, Any] = {}
    for parameter in parameters:
        hints[parameter.name] = parameter.annotation
    run.__annotations__ = hints  # Typer reads both
    app.command(command.__name__, help=summary, epilog=examples)(run)


def _parameters(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield a command's parameter; of a recipe one for each field of RECIPE, of ``**settings`` one for each setting.

    ``given`` is no option. MODEL is an argument if the recipe is one. Without its option a setting is None.
    """
    by_name = inspect.Parameter.KEYWORD_ONLY
    if parameter.name == "given":
        return
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        for name, setting in SETTINGS.items():
            kind: Any = list[str] if name == "stop" else str
            for number in (float, int):
                if number is setting.type or number in get_args(setting.type):
                    kind = number
            annotation = Annotated[kind | None, typer.Option(option_name(name), help=setting.about)]
            if SHELL in setting.users:
                yield inspect.Parameter(name, by_name, default=None, annotation=annotation)
    elif parameter.name in ("recipe", "recipes"):
        for name, field in RECIPE.items():
            kind, default = field.metadata["kind"], field.default
            if parameter.name == "recipes" and name in REPEATED:
                kind = list[str] | None
            if type(None) in get_args(kind):
                default = None
            if name == "model" and parameter.kind is not by_name:
                yield inspect.Parameter(name, parameter.kind, annotation=str)
            else:
                yield inspect.Parameter(name, by_name, default=default, annotation=kind)
    else:
        yield parameter


def recipes_of(values: dict[str, Any]) -> list[Recipe]:
    """Return the recipes of the options in RECIPE: one, or one for every pair of --norm and --sites.

    Raises:
        ConfigError, NormError: as ``Recipe``; the argument is the option's name.
    """
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        if value is not None:
            chosen[name] = value
    source = chosen.pop("model", "demo")
    if chosen.get("keep") == "none":
        chosen["keep"] = ()
    elif "keep" in chosen:
        chosen["keep"] = tuple(words_of(chosen["keep"]))
    norms = _several(chosen.pop("norm", None))
    sites = _several(chosen.pop("sites", None))
    recipes: list[Recipe] = []
    for norm, patterns in product(norms, sites):
        where = "*" if patterns is None else words_of(patterns)
        recipes.append(Recipe(source, norm=norm, sites=where, **chosen))
    return recipes


def _several(value: list[str] | str | None) -> Sequence[str | None]:
    """Return the values of an option that may be repeated; None for one that is not given."""
    if isinstance(value, list):
        return value or [None]
    return [value]


def _help_of(command: Callable[..., None]) -> tuple[str, dict[str, str], str]:
    """Return a docstring's first paragraph, its Args by name, and its Examples in Rich's markup."""
    docstring = escape(inspect.getdoc(command) or "").replace("``", "")
    head, _, examples = docstring.partition("\nExamples:\n")
    summary, _, args = head.partition("\nArgs:\n")
    about: dict[str, str] = {}
    for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", args, re.M):
        about[name] = " ".join(text.split())
    if examples:
        marked = re.sub(r"^(.*minigpt .*)$", r"[bold]\1[/]\n", textwrap.dedent(examples), flags=re.M)
        marked = re.sub(r"(?<!\n)\n(?!\n)", " ", marked)  # a sentence is wrapped at the terminal's width
        examples = f"Examples:\n\n{marked}"
    return summary.strip(), about, examples


def _with_help(parameter: inspect.Parameter, about: dict[str, str]) -> inspect.Parameter:
    """Return the parameter with its help, and with the values that a shell offers for it."""
    hint = parameter.annotation
    name = parameter.name
    if get_origin(hint) is Annotated:
        hint, declared = get_args(hint)
        info = copy.copy(declared)
    elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
        info = typer.Argument(metavar=name.upper())
    elif hint is bool:
        info = typer.Option(option_name(name))  # no --no-NAME for a flag
    else:
        info = typer.Option()
    info.help = about.get(name, info.help)
    if name in VALUES:
        info.autocompletion = lambda incomplete: _shell_completions(name, incomplete)
    return parameter.replace(annotation=Annotated[hint, info])


def _shell_completions(name: str, incomplete: str) -> list[str]:
    """Return the values of a parameter that begin with these characters."""
    values: list[str] = []
    for value in sorted(VALUES[name]()):
        if value.startswith(incomplete):
            values.append(value)
    return values


def with_values(words: list[str]) -> list[str]:
    """Return the words with a value after ``--ray``, and after the ``--json`` of a report, where they have none.

    Raises:
        ConfigError: if a ``--json`` comes before the reports of ``--compare``, so that it would take the first.
    """
    bare = {"--ray": "local"}
    if words and words[0] in ("bench", "parity", "sites"):
        bare["--json"] = "-"
    compares = "--compare" in words
    ended = [*words, "--", "--"]
    complete: list[str] = []
    for index, word in enumerate(words):
        after, beyond = ended[index + 1 : index + 3]
        has_values = not (after.startswith("-") or beyond.startswith("-"))
        if word == "--json" and compares and has_values:
            message = f"before reports must be --json=FILE, or --json=- to print, got --json {after} {beyond}"
            raise ConfigError(message, argument="json")
        if word in bare and after.startswith("--"):
            word = f"{word}={bare[word]}"
        complete.append(word)
    return complete


def given_in(context: typer.Context) -> Given:
    """Return the names of the parameters that the command line sets, also where it sets the default."""
    names: set[str] = set()
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        is_empty = value is None or value in ((), [])  # older Typers say so of arguments that got no words
        if source is not None and source.name == "COMMANDLINE" and not is_empty:
            names.add(name)
    return frozenset(names)


def parse_draft(draft: str) -> str | None:
    """Return the setting of --draft, whose None is "none" in a shell.

    Raises:
        ConfigError: if it is another word.
    """
    check_option("draft", draft, DRAFTS)
    return None if draft == "none" else draft


def option_name(name: str) -> str:
    """Return the option of a parameter's name."""
    name = SPELLED.get(name, name)
    return f"--{name.replace('_', '-')}"


def refuse_others(given: Given, taken: Collection[str], message: str) -> None:
    """Refuse the options that would do nothing.

    Args:
        given: what the command line sets.
        taken: what does something.
        message: the rest of the sentence that begins with the option's name.

    Raises:
        ConfigError: about the first that would do nothing.
    """
    for name in sorted(given):
        if name not in taken:
            raise ConfigError(message, argument=name)


def refuse_if(*checks: tuple[object, str, str]) -> None:
    """Check options against each other.

    Args:
        checks: each whether it is wrong, the parameter's name, and the rest of the sentence.

    Raises:
        ConfigError: about the first that is wrong.
    """
    for is_wrong, name, message in checks:
        if is_wrong:
            raise ConfigError(message, argument=name)
