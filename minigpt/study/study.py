"""A study: models x norms x sites x settings x seeds. A cell is a recipe, a seed, and how it is trained."""

import dataclasses
import itertools
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from minigpt.choices import KEEP, words_of
from minigpt.device import resolve_device
from minigpt.errors import ConfigError, NormError
from minigpt.files import hash_file, hash_json
from minigpt.machine import software
from minigpt.norms.foreign.locate import code_files
from minigpt.recipe import Recipe
from minigpt.study.settings import (
    LAYER_NORM,
    OWN_NORMS,
    Training,
    checked_schedule,
    chosen_sites,
    name_of_own,
    takes_text,
    training_fingerprint,
)

PACKAGES = ("transformers", "accelerate", "peft")
FAILED, DIVERGED = "FAILED", "DIVERGED"  # outcomes that the judge does not have
CellRow = dict[str, Any]  # a cell's settings, and what was measured on it


def _axes() -> dict[str, dataclasses.Field[Any]]:
    """Return the options of a recipe that a study may vary, by name."""
    axes = {}
    for option in fields(Recipe):
        if option.metadata.get("is_axis"):
            axes[option.name] = option
    return axes


AXES = _axes()


@dataclass(frozen=True)
class StudyCell:
    """A recipe, a seed, and how the model is trained.

    Attributes:
        training: None if the model is not trained.
        own_norm: the name of the model's own norms, which a cell without a swapped norm has.
    """

    recipe: Recipe
    seed: int = 0
    training: Training | None = None
    own_norm: str = LAYER_NORM

    def settings(self) -> CellRow:
        """Return all settings by name, as values of JSON."""
        recipe = self.recipe
        settings: CellRow = {
            "model": str(recipe.source),
            "norm": recipe.norm or self.own_norm,
            "sites": ",".join(recipe.sites),
            "seed": self.seed,
        }
        for name in (*AXES, "device", "revision"):
            settings[name] = getattr(recipe, name)
        settings["keep"] = ",".join(recipe.keep) or "none"
        if self.training is not None:
            settings |= dataclasses.asdict(self.training)
        return settings


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

    def cells(self) -> list[StudyCell]:
        """Return the cells in the order of the file. Cells with equal settings are one.

        A trained study has the control in any case: the model's own norms, trained in the same way. Where an auxiliary
        loss is used, there is a second control that is trained without.
        """
        cells: list[StudyCell] = []
        for model in self.models:
            own_norm = name_of_own(Recipe(model, revision=self.revision))
            controls = {OWN_NORMS, own_norm}
            norms = self.norms
            if self.finetune and controls.isdisjoint(norms):
                norms = [OWN_NORMS, *norms]
            for norm in norms:
                swapped = None if norm in controls else norm
                for values in self._combinations(is_control=swapped is None):
                    recipe = self._recipe(model, swapped, values)
                    cells.append(StudyCell(recipe, values["seed"], self._training(swapped, values), own_norm))
        return list(dict.fromkeys(cells))

    def _combinations(self, *, is_control: bool) -> Iterator[CellRow]:
        """Yield every combination of the values of sites, options, training and seeds."""
        lists = {"sites": self.sites, **self.options, **self._tuning(), "seed": self.seeds}
        if is_control and "residual_loss" in lists:
            lists["residual_loss"] = sorted({0.0, *lists["residual_loss"]})
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values, strict=True))

    def _tuning(self) -> dict[str, list[Any]]:
        """Return the fields of the training with a list of values for each."""
        tuning = {}
        for name, value in (self.finetune or {}).items():
            tuning[name] = value if isinstance(value, list) else [value]
        return tuning

    def _recipe(self, model: str, norm: str | None, values: CellRow) -> Recipe:
        """Return the recipe of these values. A control leaves out what is about a swapped norm."""
        options: dict[str, Any] = {"device": self.device, "revision": self.revision}
        for name in self.options:
            if name not in ("keep", "fit"):
                options[name] = values[name]
        if norm is None:
            return Recipe(model, **options)
        keep = values.get("keep", ",".join(KEEP))
        fit = values.get("fit")
        if not fit and not self.finetune and takes_text(norm):
            fit = self.text
        return Recipe(
            model, norm=norm, sites=words_of(values["sites"]), keep=() if keep == "none" else words_of(keep), fit=fit,
            **options,
        )  # fmt: skip

    def _training(self, norm: str | None, values: CellRow) -> Training | None:
        """Return the training of these values; None if the study trains nothing."""
        if self.finetune is None:
            return None
        chosen: CellRow = {"eval_text": self.text}
        for name in self.finetune:
            chosen[name] = values[name]
        if norm is None:
            chosen.pop("schedule", None)
        return Training(**chosen)


def check_cells(cells: list[StudyCell]) -> None:
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


def check_cell(cell: StudyCell) -> None:
    """Check that a cell's norm fits the sites of its model, and its schedule both.

    Raises:
        MiniGPTError: as ``chosen_sites`` and ``checked_schedule``.
    """
    chosen_sites(cell.recipe)
    if cell.training is not None:
        checked_schedule(cell.recipe, cell.training)


def fingerprint_of(study: Study, cell: StudyCell) -> str:
    """Return the fingerprint of all that decides a cell's row."""
    digests = []
    if study.text:
        digests.append(hash_file(study.text))
    for metric in study.metrics:
        digests.extend(map(hash_file, code_files(metric)))
    training = []
    if cell.training is not None:
        training = training_fingerprint(cell.training)
    return hash_json([
        cell.settings(), cell.recipe.fingerprint(), training,
        [study.text, study.prompts, study.metrics, study.against], digests,
        software(*PACKAGES), str(resolve_device(study.device)),
    ])  # fmt: skip


def command(study: Study, cell: StudyCell, file: Path | None) -> str:
    """Return the command that runs this cell again: ``minigpt parity``, or this study for what the shell cannot say."""
    is_said_by_parity = cell.training is None and cell.recipe.arithmetic == AXES["arithmetic"].default
    words = _parity_command(study, cell) if is_said_by_parity else _study_command(study, cell, file)
    return shlex.join(["minigpt", *words])


def _parity_command(study: Study, cell: StudyCell) -> list[str]:
    words = ["parity", *cell.recipe.command()]
    if study.against is not None:
        words += ["--against", study.against]
    if study.text is not None:
        words += ["--text", study.text]
    for prompt in study.prompts:
        words += ["--prompt", prompt]
    return words


def _study_command(study: Study, cell: StudyCell, file: Path | None) -> list[str]:
    """Return the words of the study's command, with the values of this cell where the study has several."""
    names = ["model", "norm", "sites", "seed"]
    for name, values in (study.options | (study.finetune or {})).items():
        if isinstance(values, list) and len(values) > 1:
            names.append(name)
    words = ["study", str(file or "FILE.toml"), "--out", "again"]
    settings = cell.settings()
    for name in names:
        if name in settings:
            words += ["--only", f"{name}={settings[name]}"]
    return words


def cells_with(study: Study, choices: Collection[str]) -> list[StudyCell]:
    """Return the cells that have the values of every NAME=VALUE.

    Raises:
        ConfigError: if there is none.
    """
    cells = study.cells()
    chosen = [cell for cell in cells if _has_values(cell, choices)]
    if not chosen:
        names = ", ".join(cells[0].settings())
        raise ConfigError(f"no cell has {' and '.join(choices)}; it takes NAME=VALUE of {names}", argument="only")
    return chosen


def _has_values(cell: StudyCell, choices: Collection[str]) -> bool:
    settings = cell.settings()
    for choice in choices:
        name, _, value = choice.partition("=")
        if str(settings.get(name)) != value:
            return False
    return True
