"""A study: models x norms x sites x seeds, each cell judged and appended to a file as it is finished."""

import importlib.util
import itertools
import json
import math
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import minigpt
from minigpt.checkpoint import locate, open_checkpoint
from minigpt.engine import GPT2
from minigpt.errors import ConfigError
from minigpt.study.export import save_model, write
from minigpt.study.finetune import Finetuned, FinetuneSettings, checked_schedule, finetune, require_trainable
from minigpt.study.tasks import check_tasks, swapped, task_scores
from minigpt.study.texts import require_text
from minigpt.swap import match_sites

CELLS, REPORTS, RUNS = "cells.jsonl", "reports", "runs"
KEY = ("model", "norm", "sites", "seed")
FINETUNE = ("text", "eval_text", "steps", "schedule", "learning_rate", "batch_size", "block_size", "lora", "eval_steps")

Say = Callable[[str, float], None]


@dataclass(frozen=True)
class Cell:
    """One model with one norm at some sites, and one seed."""

    model: str
    norm: str
    sites: str
    seed: int


@dataclass(frozen=True)
class Study:
    """What a study file says."""

    models: list[str]
    norms: list[str]
    sites: list[str] = field(default_factory=lambda: ["*"])
    seeds: list[int] = field(default_factory=lambda: [0])
    text: str | None = None
    calibration: str | None = None
    device: str | None = None
    finetune: dict[str, Any] | None = None
    tasks: list[str] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        """Return the cells in the order of the file."""
        return [Cell(*key) for key in itertools.product(self.models, self.norms, self.sites, self.seeds)]


def read_study(file: Path) -> Study:
    """Return the study that a TOML file describes, after a check of everything it names.

    Raises:
        ConfigError: if the file cannot be read, or a field is unknown or has another type.
        NormError: if a norm is unknown, or a pattern matches no site.
        GenerationError: if a text is missing.
        CheckpointError: if a model cannot be found.
    """
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    known = {"models": list, "norms": list, "sites": list, "seeds": list, "text": str, "calibration": str,
             "device": str, "finetune": dict, "tasks": list}  # fmt: skip
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(f"{file}: unknown field {name!r}; known are {', '.join(known)}")
        if not isinstance(value, known[name]) or value == []:
            raise ConfigError(f"{file}: {name} must be a {known[name].__name__} that is not empty, got {value!r:.100}")
    for name in ("models", "norms", "sites", "tasks"):
        if not all(isinstance(one, str) for one in fields.get(name, [])):
            raise ConfigError(f"{file}: {name} must be a list of strings, got {fields[name]!r:.100}")
    for name in ("models", "norms"):
        if name not in fields:
            raise ConfigError(f"{file}: {name} is missing")
    study = Study(**fields)
    check_study(study, file)
    return study


def check_study(study: Study, file: Path) -> None:
    """Check models, norms, patterns and texts. Errors are those of ``read_study``."""
    for text in filter(None, (study.text, study.calibration)):
        if not Path(text).is_file():
            raise minigpt.GenerationError(f"{file}: there is no file {text}")
    if study.tasks:
        check_tasks(study.tasks)
    tuning = study.finetune
    if tuning is not None:
        if unknown := tuning.keys() - {*FINETUNE}:
            raise ConfigError(f"{file}: unknown field {min(unknown)!r} in [finetune]; known are {', '.join(FINETUNE)}")
        if missing := [name for name in ("text", "steps") if name not in tuning]:
            raise ConfigError(f"{file}: {missing[0]} is missing in [finetune]")
        for name in ("text", "eval_text"):
            if name in tuning:
                require_text(tuning[name])
    for model in study.models:
        config = open_checkpoint(locate(model)).config
        with torch.device("meta"):
            shape = GPT2(config)
        for norm in study.norms:
            minigpt.norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        for pattern in study.sites:
            match_sites(shape, pattern)
    if tuning is not None:
        for cell in study.cells():
            settings = finetune_settings(study, cell)
            require_trainable(settings)
            checked_schedule(settings)


def finetune_settings(study: Study, cell: Cell) -> FinetuneSettings:
    """Return how a cell is trained. A schedule counts for the sites of the cell only."""
    assert study.finetune is not None
    fields: dict[str, Any] = {"eval_text": study.text} | study.finetune
    return FinetuneSettings(
        **fields, model=cell.model, norm=cell.norm, sites=cell.sites, seed=cell.seed, device=study.device
    )


def run_study(
    study: Study, out: Path, progress: Say = lambda *_: None, *, file: Path | None = None, ray: str | None = None
) -> list[dict[str, Any]]:
    """Run the cells that are missing in ``out``/cells.jsonl; return all of them in the order of the study.

    Args:
        file: the study file, for the commands that reproduce a cell.
        ray: the address of a Ray cluster to run the cells on, or "local" for one on this machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = finished(out)
    todo = [cell for cell in study.cells() if key(asdict(cell)) not in done]
    if ray is None:
        rows = _one_by_one(study, todo, out, progress, file)
    else:
        from minigpt.study.cluster import cells_on_ray

        rows = cells_on_ray(ray, study, todo, out, file)
    for number, row in enumerate(rows, start=1):
        append(out, row)
        done[key(row)] = row
        if ray is not None:
            progress(f"{number} of {len(todo)} cells", number / len(todo))
    return [done[key(asdict(cell))] for cell in study.cells()]


def _one_by_one(
    study: Study, todo: list[Cell], out: Path, progress: Say, file: Path | None
) -> Iterator[dict[str, Any]]:
    begin = time.monotonic()
    for number, cell in enumerate(todo):
        spent = time.monotonic() - begin
        left = f", {_minutes(spent / number * (len(todo) - number))} left" if number else ""
        name = f"cell {number + 1} of {len(todo)}: {cell.model} {cell.norm} {cell.sites}{left}"
        yield run_cell(study, cell, out, lambda what, _, name=name, number=number: progress(
            f"{name}: {what}", number / len(todo)), file=file)  # fmt: skip


def run_cell(
    study: Study, cell: Cell, out: Path, say: Say = lambda *_: None, *, file: Path | None = None
) -> dict[str, Any]:
    """Judge one cell, train it and judge it again if the study says so; return its row."""
    begin = time.monotonic()
    report = minigpt.parity(
        cell.model, norm=cell.norm, sites=cell.sites, device=study.device, text=study.text,
        calibration=_calibration(study, cell), progress=say,
    )  # fmt: skip
    fields = report.to_dict()
    text, distribution = fields.get("perplexity") or {}, fields["distribution"]
    row = {
        **asdict(cell),
        "verdict": fields["verdict"],
        "ratio": _finite(fields["logits"]["ratio"]),
        "kl_mean": _finite(distribution["kl_mean"]),
        "top1_agreement": distribution["top1_agreement"],
        "perplexity_before": _finite(text.get("reference", distribution["perplexity_reference"])),
        "perplexity_after": _finite(text.get("candidate", distribution["perplexity_candidate"])),
        "perplexity_recovered": None,
        "decode_norm_share": fields["cost"]["decode_norm_share"],
        "kl_recovered": None,
        "top1_recovered": None,
        "tasks": {},
        "report": _keep_report(report, out, slug(cell)),
        "losses": [],
        "eval_losses": [],
        "swaps": {},
    }
    if study.finetune is not None:
        result = finetune(finetune_settings(study, cell), out / RUNS / slug(cell), say)
        row |= {"losses": result.losses, "eval_losses": result.eval_losses, "swaps": result.swaps}
        row |= _judged_again(result, study, cell, out / RUNS / slug(cell) / "model")
    if study.tasks:
        say("running lm-eval", 1.0)
        folder = out / RUNS / slug(cell) / "model"
        if study.finetune is None:
            save_model(swapped(cell.model, cell.norm, cell.sites, _calibration(study, cell)), folder, cell.model)
        row["tasks"] = task_scores(study.tasks, folder, cell.norm, cell.sites)
    return row | {"seconds": round(time.monotonic() - begin, 3), "command": command(study, cell, file)}


def _judged_again(result: Finetuned, study: Study, cell: Cell, folder: Path) -> dict[str, Any]:
    """Save a trained model, and return how far it is from the original."""
    write(result, folder, cell.model)
    norm = "fused" if cell.norm in minigpt.norms.available() else cell.norm  # "fused" leaves the norms that were saved
    report = minigpt.parity(folder, norm=norm, against=cell.model, device=study.device, text=study.text)
    fields = report.to_dict()
    text, distribution = fields.get("perplexity") or {}, fields["distribution"]
    return {
        "perplexity_recovered": _finite(text.get("candidate", distribution["perplexity_candidate"])),
        "kl_recovered": _finite(distribution["kl_mean"]),
        "top1_recovered": distribution["top1_agreement"],
    }


def _keep_report(report: minigpt.ParityReport, out: Path, name: str) -> str:
    """Write a parity report, as a page if matplotlib is installed and as JSON in any case; return its place in out."""
    from minigpt.report.page import report_page

    folder, fields = out / REPORTS, report.to_dict()
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return f"{REPORTS}/{name}.json"
    (folder / f"{name}.html").write_text(report_page(fields), encoding="utf-8")
    return f"{REPORTS}/{name}.html"


def command(study: Study, cell: Cell, file: Path | None) -> str:
    """Return the command that runs this cell again."""
    if study.finetune is None:
        options = {"--model": cell.model, "--norm": cell.norm, "--sites": cell.sites, "--text": study.text,
                   "--calibration": _calibration(study, cell), "--device": study.device}  # fmt: skip
        return shlex.join(["minigpt", "parity", *(word for pair in options.items() if pair[1] for word in pair)])
    cell_words = [str(value) for value in asdict(cell).values()]
    return shlex.join(["minigpt", "study", str(file or "FILE.toml"), "--out", "again", "--only", *cell_words])


def only(study: Study, cell: Cell) -> Study:
    """Return the study of one cell."""
    return replace(study, models=[cell.model], norms=[cell.norm], sites=[cell.sites], seeds=[cell.seed])


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells one cell from another."""
    return tuple(row[name] for name in KEY)


def finished(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows of finished cells. A last line that was torn by a kill is cut off the file."""
    file = out / CELLS
    if not file.is_file():
        return {}
    whole = file.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if kept != whole:
        with file.open("r+b") as stream:
            stream.truncate(len(kept))
    return {key(row): row for row in map(json.loads, kept.decode().splitlines())}


def append(out: Path, row: dict[str, Any]) -> None:
    """Append a row as one line."""
    with (out / CELLS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, allow_nan=False) + "\n")


def slug(cell: Cell) -> str:
    """Return a file name for a cell."""

    def words() -> Iterator[str]:
        for value in asdict(cell).values():
            yield "".join(
                sign if sign.isalnum() or sign in "._-" else "~" + format(ord(sign), "x") for sign in str(value)
            )

    return ",".join(words())


def _calibration(study: Study, cell: Cell) -> str | None:
    if cell.norm != "frozen":
        return None
    return study.calibration or (study.finetune or {}).get("text") or study.text


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
