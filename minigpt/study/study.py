"""A study: models x norms x sites x settings x seeds. A cell is a recipe, a seed, and how it is trained.

What is named is checked before hours are spent on it.
"""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import math
import os
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import torch

from minigpt import norms
from minigpt.checkpoint import open_checkpoint
from minigpt.device import resolve_device, software
from minigpt.errors import ConfigError, GenerationError, MiniGPTError, NormError
from minigpt.files import hash_file, hash_json
from minigpt.model import GPT2
from minigpt.norms import is_registered
from minigpt.norms.foreign.locate import locate as locate_code
from minigpt.recipe import Recipe, code_files
from minigpt.study.schedule import Schedule, parse_schedule, site_of
from minigpt.swap import match_sites
from minigpt.swap.sites import KEEP

PACKAGES = ("transformers", "accelerate", "peft", "lm_eval")
OWN, LAYER_NORM = "own", "fused"  # the model's own norms: what cells are compared with
OPTIONS = ("keep", "center", "fit", "attention", "arithmetic", "dtype", "quantize")  # of a recipe; each may be a list
CellRow = dict[str, Any]  # a cell's settings, and what was measured on it
LEAST = {"steps": 1, "batch_size": 1, "block_size": 2, "save_steps": 1, "eval_steps": 1, "lora": 1,
         "learning_rate": 0, "residual_loss": 0}  # fmt: skip
DATASET = re.compile(r"[\w.-]+/[\w-]+(:[\w.-]+)?")  # owner/name, or owner/name:split


class DivergedError(MiniGPTError):
    """The loss or a weight is not finite: more steps of the same training cannot mend it."""


@dataclass(frozen=True)
class Training:
    """What a model is trained on, how, and for how long.

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
    training: dict[str, Any] = field(default_factory=dict)


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
    if training.train not in ("all", "norms"):
        raise ConfigError(f"must be 'all' or 'norms', got {training.train!r}", argument="train")
    if training.train == "norms" and training.lora is not None:
        raise ConfigError("trains adapters and train='norms' the norms only; give one of the two", argument="lora")
    if recipe.quantize is not None:
        raise ConfigError("makes weights that cannot be trained", argument="quantize")
    for text in filter(None, (training.text, training.eval_text)):
        if not Path(text).is_file() and not DATASET.fullmatch(text):
            raise GenerationError(f"{text} is not a file, and not the owner/name of a Hugging Face dataset")
    if recipe.norm is None or _names_code(recipe):
        if training.schedule is not None:
            raise ConfigError("needs a norm to swap in, other than the model's own", argument="schedule")
        return Schedule({})
    if not isinstance(recipe.norm, str | type):
        raise ConfigError("must be one norm, to be swapped in at its turn", argument="norm")
    return _schedule(recipe, training)


def _schedule(recipe: Recipe, training: Training) -> Schedule:
    shape = shape_of(recipe)
    schedule, sites = parse_schedule(training.schedule, shape.norm_sites()), match_sites(shape, recipe.sites)
    steps = {turn: step for turn, step in schedule.steps.items() if site_of(turn) in sites}
    if not steps:
        raise NormError(
            f"has no stage for a site of {', '.join(recipe.sites)}; leave it out, or add one", argument="schedule"
        )
    halves = {turn: step for turn, step in steps.items() if turn != site_of(turn)} | schedule.merges
    if late := [name for name, step in halves.items() if step > training.steps and name != "first"]:
        raise NormError(
            f"has the turn of {late[0]} at step {halves[late[0]]}, after the last, {training.steps}",
            argument="schedule",
        )
    return dataclasses.replace(schedule, steps=steps)


def what_decides(training: Training) -> list[Any]:
    """Return the settings of a training and the digests of its texts, for a fingerprint. A dataset has no digest."""
    files = [text for text in (training.text, training.eval_text) if text and Path(text).is_file()]
    return [dataclasses.asdict(training), [hash_file(file) for file in files]]


def check_types(settings: Any) -> None:
    """Check the values of a dataclass against its annotations.

    Raises:
        ConfigError: the message names the field.
    """
    for one in fields(settings):
        if not _fits(value := getattr(settings, one.name), one.type):
            kind = inspect.formatannotation(one.type)
            raise ConfigError(f"must be of type {kind}, got {value!r:.100}", argument=one.name)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is int and isinstance(value, bool):
        return False
    return isinstance(value, get_origin(kind) or kind)


def shape_of(recipe: Recipe) -> GPT2:
    """Return the recipe's model without values, after a trial of its norm.

    Raises:
        CheckpointError: if the model cannot be read.
        NormError: if the norm cannot be built.
    """
    model = _shape(recipe.place())
    for _, norm in recipe.pairs():
        norms.build(norm, model.config.n_embd, eps=model.config.layer_norm_epsilon, keep=recipe.keep)
    return model


@functools.cache
def _shape(place: Path) -> GPT2:
    with torch.device("meta"):
        return GPT2(open_checkpoint(place).config)


def _names_code(recipe: Recipe) -> bool:
    """Return True if a norm of the checkpoint is code, which the recipe must name for the model to be opened."""
    return not all(is_registered(norm) for _, norm in open_checkpoint(recipe.place()).norms)


@dataclass(frozen=True)
class Cell:
    """A recipe, a seed, and how the model is trained; None if it is not."""

    recipe: Recipe
    seed: int = 0
    training: Training | None = None

    def settings(self) -> CellRow:
        """Return all settings by name, in words of JSON."""
        recipe = self.recipe
        norm = recipe.norm or (OWN if open_checkpoint(recipe.place()).norms else LAYER_NORM)
        words = {"model": str(recipe.source), "norm": norm, "sites": ",".join(recipe.sites), "seed": self.seed}
        options = {name: getattr(recipe, name) for name in (*OPTIONS, "device", "revision")}
        options["keep"] = ",".join(recipe.keep) or "none"
        return words | options | ({} if self.training is None else dataclasses.asdict(self.training))


@dataclass(frozen=True)
class Study:
    """What a study file says.

    Attributes:
        models: as ``minigpt.Recipe`` takes its source.
        norms: as ``--norm`` takes them, or "own" for a model's own.
        sites, keep, center, fit, attention, arithmetic, dtype, quantize: as the shell takes them; each value is a cell.
        device, revision: of every model.
        against: the original that models are judged against; by default each one's own source, with LayerNorm.
        text: a file that losses and perplexities are measured on.
        prompts: texts that the judge reads in place of its own.
        finetune: fields of ``Training``; each value of a list is a cell.
        tasks, metrics: lm-eval's tasks, and functions of (model, tokenizer).
        published: losses in nats a token that others report, each with the settings of its cells: {norm, loss}.
    """

    models: list[str]
    norms: list[str]
    sites: list[str] = field(default_factory=lambda: ["*"])
    seeds: list[int] = field(default_factory=lambda: [0])
    against: str | None = None
    text: str | None = None
    prompts: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=lambda: ["scale,shift"])
    center: list[bool] = field(default_factory=lambda: [False])
    fit: list[str | None] = field(default_factory=lambda: [None])
    attention: list[str] = field(default_factory=lambda: ["sdpa"])
    arithmetic: list[str] = field(default_factory=lambda: ["fast"])
    dtype: list[str | None] = field(default_factory=lambda: [None])
    quantize: list[str | None] = field(default_factory=lambda: [None])
    device: str | None = None
    revision: str | None = None
    finetune: dict[str, Any] | None = None
    tasks: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        """Return the cells in the order of the file. Those that differ only in what makes no difference are one.

        A trained study has the control in any case: the model's own norms, trained in the same way. Where an auxiliary
        loss is used, there is a second control that is trained without.
        """
        tuning = {name: value if isinstance(value, list) else [value] for name, value in (self.finetune or {}).items()}
        axes = {"sites": self.sites} | {name: getattr(self, name) for name in OPTIONS} | tuning | {"seed": self.seeds}
        without = {"residual_loss": sorted({0.0, *tuning["residual_loss"]})} if "residual_loss" in tuning else {}
        cells: dict[str, Cell] = {}
        for model in self.models:
            is_plain = not open_checkpoint(Recipe(model, revision=self.revision).place()).norms
            controls = {OWN, LAYER_NORM} if is_plain else {OWN}
            for norm in self.norms if not tuning or controls & {*self.norms} else [OWN, *self.norms]:
                is_control = norm in controls
                lists = axes | (without if is_control else {})
                for values in itertools.product(*lists.values()):
                    cell = self._cell(model, None if is_control else norm, dict(zip(lists, values, strict=True)))
                    cells.setdefault(hash_json(cell.settings()), cell)
        return list(cells.values())

    def published_of(self, cell: Cell) -> float | None:
        """Return the published loss of a cell."""
        for one in self.published:
            if cell.settings() | one == cell.settings() | {"loss": one["loss"]}:
                return one["loss"]
        return None

    def _cell(self, model: str, norm: str | None, values: CellRow) -> Cell:
        """Return the cell of these values, of which a control has no use for some."""
        options = {name: values.pop(name) for name in OPTIONS}
        sites, keep, fit = values.pop("sites"), options.pop("keep"), options.pop("fit")
        options |= {"device": self.device, "revision": self.revision}
        if norm is None:
            values.pop("schedule", None)
        else:
            options |= {"norm": norm, "sites": sites.split(","), "keep": () if keep == "none" else keep.split(",")}
            options["fit"] = fit if fit or norm != "frozen" or self.finetune else self.text
        seed = values.pop("seed")
        values.setdefault("eval_text", self.text)
        training = Training(**values) if self.finetune else None
        return Cell(Recipe(model, **options), seed, training)


def read_study(file: Path) -> Study:
    """Return the study that a TOML file describes, after a check of everything it names.

    Raises:
        ConfigError: if the file cannot be read, or a field is unknown or has another type.
        NormError: if a norm is unknown, or a pattern matches no site.
        GenerationError: if a text is missing.
        CheckpointError: if a model cannot be found.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    _require_fields(table, [one.name for one in fields(Study)], ("models", "norms"), str(file))
    for one in fields(Study):
        if get_origin(one.type) is list and one.name in table:
            table[one.name] = _values(table[one.name], one.type == list[str | None])
    study = Study(**table)
    check_types(study)
    for text in filter(None, (study.text, *study.fit)):
        if not Path(text).is_file():
            raise GenerationError(f"{file}: there is no file {text}")
    check_metrics(study.metrics)
    check_tasks(study.tasks)
    if study.finetune is not None:
        _require_fields(
            study.finetune, [one.name for one in fields(Training)], ("text", "steps"), f"{file}, [finetune]"
        )
        for one in fields(Training):
            if type(None) in get_args(one.type) and one.name in study.finetune:
                study.finetune[one.name] = _values(study.finetune[one.name], True)
    names = study.cells()[0].settings().keys() | {"loss"}
    for one in study.published:
        if not one.keys() <= names or not isinstance(one.get("loss"), float):
            raise ConfigError(f"{file}, [[published]]: must have a loss and settings of a cell, got {', '.join(one)}")
    for cell in study.cells():
        match_sites(shape_of(cell.recipe), cell.recipe.sites)
        if cell.training is not None:
            checked_schedule(cell.recipe, cell.training)
    return study


def _values(value: Any, may_be_none: bool) -> list[Any]:
    """Return a field's values as a list; TOML has no null, so ``false`` stands for it where a field may be None."""
    values = value if isinstance(value, list) else [value]
    return [None if one is False and may_be_none else one for one in values]


def _require_fields(table: CellRow, known: Collection[str], needed: Collection[str], where: str) -> None:
    """Check that a table of the file has the fields that it needs, and no list without a value."""
    if unknown := table.keys() - {*known}:
        raise ConfigError(f"{where}: unknown field {min(unknown)!r}; known are {', '.join(known)}")
    if empty := [name for name in (*needed, *table) if table.get(name, []) == []]:
        raise ConfigError(f"{where}: {empty[0]} is missing")


def check_metrics(metrics: Collection[str]) -> None:
    """Check that every metric is a function in a file or a package.

    Raises:
        ConfigError: the message names the metric.
    """
    for metric in metrics:
        if ":" not in metric:
            raise ConfigError(f"a metric must be path/to/file.py:name or package.module:name, got {metric!r}")
        locate_code(metric)


def check_tasks(tasks: Collection[str]) -> None:
    """Check that lm-eval is installed and knows the tasks. A task is a name, or the path of a YAML file.

    Raises:
        ConfigError: if lm-eval is not installed, or has no such task.
    """
    if not tasks:
        return
    try:
        with silence():
            from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

            known = TaskManager().all_tasks
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks need lm-eval: {error.name} is not installed; pip install 'lm-eval[hf]'") from error
    if unknown := [task for task in tasks if not Path(task).is_file() and task not in known]:
        raise ConfigError(f"lm-eval has no task {unknown[0]!r}")


@contextmanager
def silence() -> Iterator[None]:
    """Keep what a library prints and logs, and the programs that it starts, off the terminal."""
    terminal = {stream: os.dup(stream) for stream in (1, 2)}
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            for stream in terminal:
                os.dup2(nowhere.fileno(), stream)
            yield
        finally:
            for stream, kept in terminal.items():
                os.dup2(kept, stream)
                os.close(kept)


def fingerprint_of(study: Study, cell: Cell) -> str:
    """Return the fingerprint of all that decides a cell's row."""
    files = [Path(name) for name in (study.text, *study.tasks) if name and Path(name).is_file()]
    code = [file for metric in study.metrics for file in code_files(metric)]
    return hash_json([
        cell.settings(), cell.recipe.fingerprint(), [] if cell.training is None else what_decides(cell.training),
        [study.text, study.prompts, study.tasks, study.metrics, study.against],
        [hash_file(file) for file in (*files, *code)],
        software(*PACKAGES), str(resolve_device(study.device)),
    ])  # fmt: skip


def command(study: Study, cell: Cell, file: Path | None) -> str:
    """Return the command that runs this cell again."""
    if cell.training is None:
        text = [] if study.text is None else ["--text", study.text]
        prompts = [word for prompt in study.prompts for word in ("--prompt", prompt)]
        against = [] if study.against is None else ["--against", study.against]
        return shlex.join(["minigpt", "parity", *cell.recipe.command(), *against, *text, *prompts])
    varied = [name for name, values in vars(study).items() if name in OPTIONS and len(values) > 1]
    varied += [name for name, value in (study.finetune or {}).items() if isinstance(value, list) and len(value) > 1]
    names = [name for name in ("model", "norm", "sites", "seed", *varied) if name in cell.settings()]
    words = [word for name in names for word in ("--only", f"{name}={cell.settings()[name]}")]
    return shlex.join(["minigpt", "study", str(file or "FILE.toml"), "--out", "again", *words])


def only(study: Study, choices: Collection[str]) -> list[Cell]:
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
