"""Make the options of a command from the signature and the docstring of its function.

A parameter ``recipe: Recipe`` becomes the options that say how a model is opened, the fields of RECIPE, and the command
gets the ``Recipe``. ``recipes: list[Recipe]`` lets --norm and --sites be repeated: a recipe for every pair.
A parameter ``given: Given`` gets the names of the parameters that the command line sets. Each section of the docstring
behind Args, as "Searches:", is a group of options in the help.
"""

import copy
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.markup import escape
from typer.core import TyperCommand

from minigpt.choices import check_option, words_of
from minigpt.cli.output import STDOUT, check_folder, check_writable
from minigpt.errors import ConfigError
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
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="[FILE]", callback=check_writable)]
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
MODEL_FIRST = ("sites", "info", "perplexity", "convert")  # commands whose MODEL stands first, or behind --model

# The groups of the options that open a model, and of what is written.
MAIN = ("model", "norm", "sites", "keep", "center", "fit")
OF_OUTPUT = ("json_file", "csv", "html")

# What help says about parameters that several commands have.
SHARED = {
    "preset": "Without --model: random weights of this shape; by default gpt2.",
    "draft": "Draft tokens in eight bits and verify them; the same text, sooner: int8, none, or auto: where it pays.",
    "json_file": "Print JSON, or write it to FILE.",
    "csv": "Write the table to FILE, as CSV.",
    "html": "Write a page to FILE.",
    "ray": "Run on the Ray cluster at this address; without one, on a cluster on this machine.",
}


def _norms() -> Iterable[str]:
    from minigpt.norms import available  # not before: help must not wait for PyTorch

    return available()


def _presets() -> Iterable[str]:
    from minigpt.config import presets_folder

    return (path.stem for path in presets_folder().glob("*.json"))


DRAFTS = ("auto", "int8", "none")

# What a shell offers for a parameter.
VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "norm": _norms,
    "check": _norms,
    "preset": _presets,
    "overflow": lambda: ("refuse", "slide"),
    "draft": lambda: DRAFTS,
}

for _name, _field in RECIPE.items():
    SHARED[_name] = _field.metadata["about"]
    if _field.metadata["values"]:
        VALUES.setdefault(_name, partial(tuple, _field.metadata["values"]))


class Command(TyperCommand):
    """A command whose --help stands with its rare options, and takes no value."""

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        option.metavar = ""
        last: Any = self.params[-1]
        option.rich_help_panel = last.rich_help_panel
        return option


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Add a command to an app.

    Keyword-only parameters become options and the others arguments. The docstring's first paragraph is the help. Its
    Args, its other sections and SHARED describe the parameters, and its Examples end the help.
    """
    summary, sections, examples = _help_of(command)
    about = dict(SHARED)
    for section in sections.values():
        about |= section
    declared = inspect.signature(command).parameters
    opens = {"recipe", "recipes"} & declared.keys()
    groups: dict[str, str] = {}
    if opens:
        groups = _groups_of(sections)
    parameters: list[inspect.Parameter] = []
    for parameter in declared.values():
        for each in _parameters(parameter):
            if each.kind is not inspect.Parameter.KEYWORD_ONLY:  # arguments stand as they are declared
                groups.pop(each.name, None)
            parameters.append(_with_help(each, about, groups.get(each.name)))

    def run(context: typer.Context, **values: Any) -> None:
        if "given" in declared:
            names: set[str] = set()  # that the command line sets, also where it sets the default
            for name, value in context.params.items():
                source = context.get_parameter_source(name)
                is_empty = value is None or value in ((), [])  # older Typers say so of arguments that got no words
                if source is not None and source.name == "COMMANDLINE" and not is_empty:
                    names.add(name)
            values["given"] = frozenset(names)
        for name in opens:
            recipes = recipes_of({option: values.pop(option) for option in RECIPE})
            values[name] = recipes if name == "recipes" else recipes[0]
        try:
            command(**values)
        except BrokenPipeError:  # nobody reads the rest; no status of a verdict may come of it
            raise typer.Exit(128 + 13) from None

    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    order = {name: place for place, name in enumerate(groups)}
    parameters.sort(key=lambda parameter: (parameter.kind, order.get(parameter.name, -1)))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    hints: dict[str, Any] = {}
    for parameter in parameters:
        hints[parameter.name] = parameter.annotation
    run.__annotations__ = hints  # Typer reads both
    app.command(command.__name__, cls=Command, help=summary, epilog=examples)(run)


def _groups_of(sections: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the group of each option that has one, in the order of the help."""
    from minigpt.generation.settings import SETTINGS  # not before: other commands have none

    drawing = [name for name, setting in SETTINGS.items() if setting.shapes_draw or setting.looks_back]
    titled: list[tuple[str, Iterable[str]]] = [("The model", MAIN)]
    titled.extend(sections.items())
    titled.append(("How tokens are chosen", drawing))
    titled.append(("What is written", SETTINGS))
    titled.append(("Output", OF_OUTPUT))
    titled.append(("How the model is opened", RECIPE))
    groups: dict[str, str] = {}
    for title, names in titled:
        for name in names:
            if title != "Args":
                groups.setdefault(name, title)
    return groups


def _parameters(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield a command's parameter; of a recipe one for each field of RECIPE, of ``**settings`` one for each setting.

    ``given`` is no option. MODEL is an argument if the recipe is one. Without its option a setting is None.
    """
    by_name = inspect.Parameter.KEYWORD_ONLY
    if parameter.name == "given":
        return
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        from minigpt.generation.settings import SETTINGS, SHELL

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


def _help_of(command: Callable[..., None]) -> tuple[str, dict[str, dict[str, str]], str]:
    """Return a docstring's first paragraph, its sections of parameters by title, and its Examples in Rich's markup."""
    docstring = escape(inspect.getdoc(command) or "").replace("``", "")
    head, _, examples = docstring.partition("\nExamples:\n")
    summary, *titled = re.split(r"^(\S.*):\n(?= {4}\w+: )", head, flags=re.M)
    sections: dict[str, dict[str, str]] = {"Args": {}}
    for title, body in zip(titled[::2], titled[1::2], strict=True):
        sections[title] = {}
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", body, re.M):
            sections[title][name] = " ".join(text.split())
    if examples:
        marked = re.sub(r"^(.*minigpt .*)$", r"[bold]\1[/]\n", textwrap.dedent(examples), flags=re.M)
        marked = re.sub(r"(?<!\n)\n(?!\n)", " ", marked)  # a sentence is wrapped at the terminal's width
        examples = f"Examples:\n\n{marked}"
    return summary.strip(), sections, examples


def _with_help(parameter: inspect.Parameter, about: dict[str, str], group: str | None) -> inspect.Parameter:
    """Return the parameter with its help, its group, and the values that a shell offers for it."""
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
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        info.rich_help_panel = group
    if hint is bool:
        info.metavar = ""  # it takes no value
    elif list[str] in (hint, *get_args(hint)) and info.metavar is None:
        info.metavar = "<str>"  # each time
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
    """Return the words with a value after ``--ray`` and ``--json`` where they have none, and with MODEL in its place.

    Raises:
        ConfigError: if a ``--json`` comes before a word that may be its file, or the command's own.
    """
    bare = {"--ray": "local", "--json": "-"}
    compares = "--compare" in words
    ended = [*words, "--", "--"]
    complete: list[str] = []
    for index, word in enumerate(words):
        after, beyond = ended[index + 1 : index + 3]
        is_option = after.startswith("-") and after != "-"
        may_be_file = True
        if compares:
            may_be_file = after == "-" or beyond.startswith("-")
        elif words[0] in ("generate", "info"):
            may_be_file = after == "-" or after.endswith(".json")
        if word == "--json" and not is_option and not may_be_file:
            message = f"must be --json=FILE, or --json=- to print, before a word that is no option, got --json {after}"
            raise ConfigError(message, argument="json")
        if word in bare and is_option:
            word = f"{word}={bare[word]}"
        complete.append(word)
    return _with_model_first(complete)


def _with_model_first(words: list[str]) -> list[str]:
    """Return the words of a command of MODEL_FIRST with its --model as the first of them."""
    if not words or words[0] not in MODEL_FIRST:
        return words
    command, *others = words
    for index, word in enumerate(others):
        name, equals, model = word.partition("=")
        if name != "--model":
            continue
        del others[index]
        if not equals and index < len(others):
            model = others.pop(index)
        return [command, model, *others]
    return words


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
