"""A study: models x norms x sites x settings x seeds. A cell is a recipe, a seed, and how it is trained.

What is named is checked before hours are spent on it.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import math
import re
import shlex
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from minigpt import norms
from minigpt.checkpoint import read_checkpoint, read_stable
from minigpt.checkpoint.norms import Pairs
from minigpt.choices import KEEP, check_option, words_of
from minigpt.device import resolve_device
from minigpt.errors import ConfigError, GenerationError, MiniGPTError, NormError
from minigpt.files import hash_file, hash_json, read_text
from minigpt.judge.source import architecture_of, open_source
from minigpt.machine import software
from minigpt.norms import is_registered
from minigpt.norms.foreign.locate import code_files
from minigpt.norms.foreign.locate import locate as locate_code
from minigpt.norms.frozen import FrozenLayerNorm, needs_text
from minigpt.recipe import Recipe
from minigpt.study.schedule import MERGE, Schedule, parse_schedule
from minigpt.swap.sites import matching

PACKAGES = ("transformers", "accelerate", "peft")
OWN, LAYER_NORM = "own", "fused"  # the model's own norms: what cells are compared with
TRIAL_WIDTH = 64  # of a norm that is built to ask it something
FAILED, DIVERGED = "FAILED", "DIVERGED"  # outcomes beside the judge's
AXES = {
    option.name: option for option in fields(Recipe) if option.metadata.get("is_axis")
}  # options that a study may vary
CellRow = dict[str, Any]  # a cell's settings, and what was measured on it
LEAST = dict.fromkeys(("steps", "batch_size", "save_steps", "eval_steps", "lora"), 1)
LEAST |= {"block_size": 2, "learning_rate": 0, "residual_loss": 0}
DATASET = re.compile(r"[\w.-]+/[\w-]+(:[\w.-]+)?")  # owner/name, or owner/name:split


class DivergedError(MiniGPTError):
    """The loss or a weight is not finite: more steps of the same training cannot mend it."""


@dataclass(frozen=True)
class Training:
    """The training of a model: its texts, its method and its steps.

    Attributes:
        text, eval_text: a text file, a .jsonl file with a "text" in each line, or the name of a Hugging Face dataset.
        schedule: when each site gets the recipe's norm, as ``parse_schedule`` takes it; None swaps all before step 0.
        distill: train towards the original's distribution (KL divergence, temperature 1) in place of the text.
        train: "all", or "norms" to train the Parameters of the norm sites only.
        residual_loss: weight of a loss that evens out the deviations of the residual stream (``training.unevenness``).
        lora: rank of the adapters that are trained in place of the model's weights, or None.
        block_size: tokens in a row to train on; None is the model's context.
        save_steps, eval_steps: steps between checkpoints, and between held-out losses; None is ten times in all.
        training: further fields of ``transformers.TrainingArguments``, as gradient_accumulation_steps or bf16.
    """

    text: str
    steps: int
    schedule: str | None = None
    eval_text: str | None = None
    distill: bool = False
    train: str = "all"
    residual_loss: float | int = 0.0
    lora: int | None = None
    learning_rate: float | int = 1e-4
    batch_size: int = 8
    block_size: int | None = None
    save_steps: int | None = None
    eval_steps: int | None = None
    training: dict[str, Any] = field(default_factory=dict, hash=False)


def base_of(recipe: Recipe) -> Recipe:
    """Return the recipe of the model as training begins: with its own norms, before the first swap.

    A checkpoint whose norms are code that is not registered keeps the recipe's norm, which names that code.
    """
    if recipe.norm is None or _names_code(recipe):
        return dataclasses.replace(recipe, fit=None)
    return dataclasses.replace(recipe, norm=None, sites="*", keep=KEEP, fit=None)


def checked_schedule(recipe: Recipe, training: Training) -> Schedule:
    """Return the schedule, after a check that training is possible here and that recipe and training fit together.

    Raises:
        ConfigError: the message names the package or the setting.
        NormError: if the norm cannot be built, or the schedule does not fit the model.
        GenerationError: the message names a text that is missing.
    """
    for package in ("accelerate", *(("peft",) if training.lora else ())):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"training needs {package}, which is not installed; pip install 'minigpt[hf]'")
    check_types(training)
    for name, least in LEAST.items():
        if (value := getattr(training, name)) is not None and not least <= value < math.inf:
            raise ConfigError(f"must be {least} or more, got {value}", argument=name)
    check_option("train", training.train, ("all", "norms"))
    if training.train == "norms" and training.lora is not None:
        raise ConfigError("trains adapters and train='norms' the norms only; give one of the two", argument="lora")
    if architecture := architecture_of(recipe.place()):
        raise ConfigError(
            f"trains a GPT-2, and {recipe.source} is a {architecture}; train it with transformers, then judge it",
            argument="model",
        )
    if recipe.quantize is not None:
        raise ConfigError("makes weights that cannot be trained", argument="quantize")
    for text in filter(None, (training.text, training.eval_text)):
        if not Path(text).is_file() and not DATASET.fullmatch(text):
            raise GenerationError(f"{text} is not a file, and not the owner/name of a Hugging Face dataset")
    if recipe.norm is None or _names_code(recipe):
        if training.schedule is not None:
            raise ConfigError("needs a norm to swap in, other than the model's own", argument="schedule")
        return Schedule({})
    schedule, chosen = parse_schedule(training.schedule, open_source(recipe.place()).sites), chosen_sites(recipe)
    steps = {site: step for site, step in schedule.steps.items() if site in chosen}
    if not steps:
        raise NormError(
            f"has no stage for a site of {', '.join(recipe.sites)}; leave it out, or add one", argument="schedule"
        )
    for name, step in (steps | {MERGE: schedule.merge or 0}).items():
        if step > training.steps:
            raise NormError(f"has {name} at step {step}, after the last, {training.steps}", argument="schedule")
    return dataclasses.replace(schedule, steps=steps)


def training_fingerprint(training: Training) -> list[Any]:
    """Return the settings of a training and the digests of its texts, for a fingerprint. A dataset has no digest."""
    files = [text for text in (training.text, training.eval_text) if text and Path(text).is_file()]
    return [dataclasses.asdict(training), [hash_file(file) for file in files]]


def check_types(settings: Any) -> None:
    """Check the values of a dataclass against its annotations.

    Raises:
        ConfigError: the message names the field.
    """
    for setting in fields(settings):
        check_type(setting.name, getattr(settings, setting.name), setting.type)


def check_type(name: str, value: Any, kind: Any) -> None:
    """Check a value against the type of a field: a class, a union, or a list of one of these.

    Raises:
        ConfigError: the message names the field.
    """
    if get_origin(kind) is list and isinstance(value, list):
        for item in value:
            check_type(name, item, get_args(kind)[0])
        return
    kinds = tuple(get_origin(part) or part for part in (get_args(kind) if isinstance(kind, UnionType) else (kind,)))
    if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):  # a bool is an int to Python
        raise ConfigError(f"must be of type {inspect.formatannotation(kind)}, got {value!r:.100}", argument=name)


def chosen_sites(recipe: Recipe) -> set[str]:
    """Return the recipe's sites, after a trial of its norm.

    Raises:
        CheckpointError: if the model cannot be read.
        NormError: if the norm cannot be built, or a pattern matches no site.
    """
    source = open_source(recipe.place())
    for _, norm in recipe.pairs():
        norms.build(norm, source.shape.n_embd, keep=recipe.keep)
    return {site for pattern in recipe.sites for site in matching(pattern, source.sites)}


def takes_text(norm: str) -> bool:
    """Return whether a norm takes constants from a text before it can run. One that cannot be built does not."""
    try:
        make = locate_code(norm)
        cls = getattr(make, "func", make)
        is_frozen = isinstance(cls, type) and issubclass(cls, FrozenLayerNorm)
        return is_frozen and needs_text(norms.build(norm, TRIAL_WIDTH))
    except NormError:  # the check of all cells says why
        return False


def _own_norms(recipe: Recipe) -> Pairs:
    """Return the norms that the checkpoint's config.json names, by patterns of sites."""
    return [] if architecture_of(recipe.place()) else read_stable(recipe.place(), read_checkpoint).norms


def _is_plain(recipe: Recipe) -> bool:
    """Return whether the model is a GPT-2 whose norms are LayerNorm."""
    return not _own_norms(recipe) and architecture_of(recipe.place()) is None


def _names_code(recipe: Recipe) -> bool:
    """Return True if a norm of the checkpoint is code, which the recipe must name for the model to be opened."""
    return not all(is_registered(norm) for _, norm in _own_norms(recipe))


@dataclass(frozen=True)
class Cell:
    """A recipe, a seed, and how the model is trained; None if it is not."""

    recipe: Recipe
    seed: int = 0
    training: Training | None = None

    def settings(self) -> CellRow:
        """Return all settings by name, as values of JSON."""
        recipe = self.recipe
        norm = recipe.norm or (LAYER_NORM if _is_plain(recipe) else OWN)
        settings = {"model": str(recipe.source), "norm": norm, "sites": ",".join(recipe.sites), "seed": self.seed}
        settings |= {name: getattr(recipe, name) for name in (*AXES, "device", "revision")}
        settings["keep"] = ",".join(recipe.keep) or "none"
        return settings | ({} if self.training is None else dataclasses.asdict(self.training))


@dataclass(frozen=True)
class Study:
    """The settings of a study file.

    Attributes:
        models: as ``minigpt.Recipe`` takes its source.
        norms: as ``--norm`` takes them, or "own" for a model's own.
        sites: as the shell takes them; each value is a cell.
        options: lists of values for the options of ``minigpt.Recipe`` in AXES, as the shell takes them; each value is
            a cell.
        device, revision: of every model.
        against: the original that models are judged against; by default each one's own source, with LayerNorm.
        text: a file that losses and perplexities are measured on.
        prompts: texts that the judge reads in place of its own.
        finetune: fields of ``Training``; each value of a list is a cell.
        metrics: functions of (model, tokenizer).
    """

    models: list[str]
    norms: list[str]
    sites: list[str] = field(default_factory=lambda: ["*"])
    seeds: list[int] = field(default_factory=lambda: [0])
    options: dict[str, list[Any]] = field(default_factory=dict)
    against: str | None = None
    text: str | None = None
    prompts: list[str] = field(default_factory=list)
    device: str | None = None
    revision: str | None = None
    finetune: dict[str, Any] | None = None
    metrics: list[str] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        """Return the cells in the order of the file. Cells with equal settings are one.

        A trained study has the control in any case: the model's own norms, trained in the same way. Where an auxiliary
        loss is used, there is a second control that is trained without.
        """
        tuning = {name: value if isinstance(value, list) else [value] for name, value in (self.finetune or {}).items()}
        axes = {"sites": self.sites} | self.options | tuning | {"seed": self.seeds}
        without = {"residual_loss": sorted({0.0, *tuning["residual_loss"]})} if "residual_loss" in tuning else {}
        cells = list[Cell]()
        for model in self.models:
            controls = {OWN, LAYER_NORM} if _is_plain(Recipe(model, revision=self.revision)) else {OWN}
            for norm in self.norms if not tuning or controls & {*self.norms} else [OWN, *self.norms]:
                is_control = norm in controls
                lists = axes | (without if is_control else {})
                for values in itertools.product(*lists.values()):
                    chosen = dict(zip(lists, values, strict=True))
                    cells.append(self._cell(model, None if is_control else norm, chosen))
        return list(dict.fromkeys(cells))

    def _cell(self, model: str, norm: str | None, values: CellRow) -> Cell:
        """Return the cell of these values. A control leaves out what is about a swapped norm."""
        options = {name: values[name] for name in self.options if name not in ("keep", "fit")}
        options |= {"device": self.device, "revision": self.revision}
        if norm is not None:
            keep, fit = values.get("keep", ",".join(KEEP)), values.get("fit")
            options |= {"norm": norm, "sites": words_of(values["sites"])}
            options["keep"] = () if keep == "none" else words_of(keep)
            options["fit"] = self.text if not (fit or self.finetune) and takes_text(norm) else fit
        recipe = Recipe(model, **options)
        if self.finetune is None:
            return Cell(recipe, values["seed"])
        training: CellRow = {"eval_text": self.text} | {name: values[name] for name in self.finetune}
        if norm is None:
            training.pop("schedule", None)
        return Cell(recipe, values["seed"], Training(**training))


def read_study(file: Path) -> Study:
    """Return the study that a TOML file describes, after a check of everything it names.

    A norm or a site that one of several models lacks is refused in that model's cells alone, when they run.

    Raises:
        ConfigError: if the file cannot be read, or a field is unknown or has another type.
        NormError: if a norm is unknown, or a pattern matches no site of any model.
        GenerationError: if a text is missing.
        CheckpointError: if a model cannot be found.
    """
    try:
        table = tomllib.loads(read_text(file, ConfigError))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    known = {setting.name: setting for setting in fields(Study) if setting.name != "options"}
    lists = _as_lists(table, known | AXES, ("models", "norms"), str(file))
    options = {name: lists[name] for name in AXES if name in lists}
    settings: CellRow = {
        name: lists[name] if get_origin(setting.type) is list else table[name]
        for name, setting in known.items() if name in table
    }  # fmt: skip
    study = Study(**settings, options=options)
    check_types(study)
    if study.finetune:
        known = {setting.name: setting for setting in fields(Training)}
        tuning = _as_lists(study.finetune, known, ("text", "steps"), f"{file}, [finetune]")
        study = dataclasses.replace(study, finetune=tuning)
    for name, values in options.items():
        for value in values:
            check_type(name, value, AXES[name].metadata["kind"])
    for text in filter(None, (study.text, *options.get("fit", ()))):
        if not Path(text).is_file():
            raise GenerationError(f"{file}: there is no file {text}")
    for metric in study.metrics:
        if ":" not in metric:
            raise ConfigError(f"a metric must be path/to/file.py:name or package.module:name, got {metric!r}")
        locate_code(metric)
    check_cells(study.cells())
    return study


def check_cells(cells: list[Cell]) -> None:
    """Check all cells.

    Raises:
        MiniGPTError: as ``check_cell``, but not for what fits another model of the study.
    """
    fitting = set[Any]()
    refused: list[tuple[Any, NormError]] = []
    for cell in cells:
        schedule = cell.training and cell.training.schedule
        swap = cell.recipe.norm, tuple(cell.recipe.sites), schedule  # without the model
        try:
            check_cell(cell)
            fitting.add(swap)
        except NormError as error:
            refused.append((swap, error))
    for swap, error in refused:
        if swap not in fitting:
            raise error


def check_cell(cell: Cell) -> None:
    """Check that a cell's norm fits the sites of its model, and its schedule both.

    Raises:
        MiniGPTError: as ``chosen_sites`` and ``checked_schedule``.
    """
    chosen_sites(cell.recipe)
    if cell.training is not None:
        checked_schedule(cell.recipe, cell.training)


def _as_lists(table: CellRow, known: CellRow, needed: Collection[str], where: str) -> dict[str, list[Any]]:
    """Return the fields of a table of the file as lists of values; ``false`` stands for None, which TOML lacks.

    Args:
        known: the fields of the dataclass, by name.
    """
    if unknown := table.keys() - known.keys():
        raise ConfigError(f"{where}: unknown field {min(unknown)!r}; known are {', '.join(known)}")
    if empty := [name for name in (*needed, *table) if table.get(name, []) == []]:
        raise ConfigError(f"{where}: {empty[0]} is missing")
    lists = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    return {
        name: [None if value is False and known[name].default is None else value for value in values]
        for name, values in lists.items()
    }


def fingerprint_of(study: Study, cell: Cell) -> str:
    """Return the fingerprint of all that decides a cell's row."""
    files = [*([study.text] if study.text else []), *(file for metric in study.metrics for file in code_files(metric))]
    return hash_json([
        cell.settings(), cell.recipe.fingerprint(),
        [] if cell.training is None else training_fingerprint(cell.training),
        [study.text, study.prompts, study.metrics, study.against], [hash_file(file) for file in files],
        software(*PACKAGES), str(resolve_device(study.device)),
    ])  # fmt: skip


def command(study: Study, cell: Cell, file: Path | None) -> str:
    """Return the command that runs this cell again: ``minigpt parity``, or this study for what the shell cannot say."""
    if cell.training is None and cell.recipe.arithmetic == AXES["arithmetic"].default:
        text = [] if study.text is None else ["--text", study.text]
        prompts = [word for prompt in study.prompts for word in ("--prompt", prompt)]
        against = [] if study.against is None else ["--against", study.against]
        return shlex.join(["minigpt", "parity", *cell.recipe.command(), *against, *text, *prompts])
    lists = study.options | (study.finetune or {})
    varied = [name for name, values in lists.items() if isinstance(values, list) and len(values) > 1]
    settings = cell.settings()
    names = [name for name in ("model", "norm", "sites", "seed", *varied) if name in settings]
    words = [word for name in names for word in ("--only", f"{name}={settings[name]}")]
    return shlex.join(["minigpt", "study", str(file or "FILE.toml"), "--out", "again", *words])


def cells_with(study: Study, choices: Collection[str]) -> list[Cell]:
    """Return the cells that have the values of every NAME=VALUE.

    Raises:
        ConfigError: if there is none.
    """
    cells, pairs = study.cells(), [one.partition("=") for one in choices]
    chosen = [cell for cell in cells if all(str(cell.settings().get(name)) == value for name, _, value in pairs)]
    if not chosen:
        names = ", ".join(cells[0].settings())
        raise ConfigError(f"no cell has {' and '.join(choices)}; it takes NAME=VALUE of {names}", argument="only")
    return chosen
