"""A study: models x norms x sites x settings x seeds. A cell is a recipe, a seed, and how it is trained."""

import dataclasses
import itertools
import shlex
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from minigpt.checkpoint import open_checkpoint
from minigpt.device import resolve_device, software
from minigpt.errors import ConfigError, GenerationError
from minigpt.files import hash_file, hash_json
from minigpt.norms.foreign.locate import locate as locate_code
from minigpt.recipe import Recipe, code_file
from minigpt.study.settings import Training, check_types, checked_schedule, shape_of, what_decides
from minigpt.swap import match_sites

PACKAGES = ("transformers", "accelerate", "peft", "lm_eval")
OWN, LAYER_NORM = "own", "fused"  # the model's own norms: what cells are compared with
OPTIONS = ("keep", "center", "fit", "attention", "arithmetic", "dtype", "quantize")  # of a recipe; each may be a list
Row = dict[str, Any]  # a cell's settings, and what was measured on it


@dataclass(frozen=True)
class Cell:
    """A recipe, a seed, and how the model is trained; None if it is not."""

    recipe: Recipe
    seed: int = 0
    training: Training | None = None

    def settings(self) -> Row:
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

    def _cell(self, model: str, norm: str | None, values: Row) -> Cell:
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
            values = table[one.name] if isinstance(table[one.name], list) else [table[one.name]]
            table[one.name] = [None if value is False and one.type == list[str | None] else value for value in values]
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
    for cell in study.cells():
        match_sites(shape_of(cell.recipe), cell.recipe.sites)
        if cell.training is not None:
            checked_schedule(cell.recipe, cell.training)
    return study


def _require_fields(table: Row, known: Collection[str], needed: Collection[str], where: str) -> None:
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
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks need lm-eval: {error.name} is not installed; pip install 'lm-eval[hf]'") from error
    known = TaskManager().all_tasks
    if unknown := [task for task in tasks if not Path(task).is_file() and task not in known]:
        raise ConfigError(f"lm-eval has no task {unknown[0]!r}")


def fingerprint_of(study: Study, cell: Cell) -> str:
    """Return the fingerprint of all that decides a cell's row."""
    files = [Path(name) for name in (study.text, *study.tasks) if name and Path(name).is_file()]
    code = [file for metric in study.metrics if (file := code_file(metric)) is not None]
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
    varied += [name for name, value in (study.finetune or {}).items() if isinstance(value, list)]
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
