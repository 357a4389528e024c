"""A study: models x norms x sites x settings x seeds, each cell judged and appended to a file as it is finished."""

import itertools
import json
import math
import re
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
from minigpt.placement import resolve_device
from minigpt.study.finetune import FinetuneSettings, checked_schedule, finetune, require_trainable, save_model, write
from minigpt.study.fingerprint import contents, fingerprint, versions
from minigpt.study.measures import check_metrics, confidence, measured
from minigpt.study.tasks import check_tasks, task_scores
from minigpt.swap import fit_on_text, match_sites
from minigpt.text_file import read_text

CELLS, REPORTS, RUNS = "cells.jsonl", "reports", "runs"
AT_THE_SWAP = ("kl_mean", "kl_median", "top1_agreement", "perplexity_after")
RECOVERED = ("kl_recovered", "kl_median_recovered", "top1_recovered", "perplexity_recovered")
BASELINE = "fused"  # trained as long as the others, it is what they are compared with
FINETUNE = ("text", "eval_text", "steps", "schedule", "learning_rate", "batch_size", "block_size", "distill", "train",
            "residual_loss", "lora", "eval_steps")  # fmt: skip
FIELDS = {"models": list, "norms": list, "sites": list, "seeds": list, "fit": (str, list), "text": str,
          "device": str, "finetune": dict, "tasks": list, "metrics": list}  # fmt: skip

Say = Callable[[str, float], None]


@dataclass(frozen=True)
class Cell:
    """One model with one norm at some sites, one seed, and one value of each setting.

    Attributes:
        fit: the text that the new norms' Parameters are fitted on; None if they are not.
        finetune: how it is trained, a value for each field of [finetune]; None if it is not.
    """

    model: str
    norm: str
    sites: str = "*"
    seed: int = 0
    fit: str | None = None
    finetune: dict[str, Any] | None = None

    def columns(self) -> dict[str, Any]:
        """Return what tells this cell from others of its study."""
        fields = asdict(self)
        return fields | (fields.pop("finetune") or {})


@dataclass(frozen=True)
class Study:
    """What a study file says."""

    models: list[str]
    norms: list[str]
    sites: list[str] = field(default_factory=lambda: ["*"])
    seeds: list[int] = field(default_factory=lambda: [0])
    text: str | None = None
    fit: list[str | None] = field(default_factory=lambda: [None])
    device: str | None = None
    finetune: dict[str, Any] | None = None
    tasks: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        """Return the cells in the order of the file. A trained study has the baseline in any case."""
        norms = self.norms if self.finetune is None or BASELINE in self.norms else [BASELINE, *self.norms]
        every = itertools.product(self.models, norms, self.sites, self.fit, self._trainings(), self.seeds)
        found = [Cell(model, norm, sites, seed, fit, tuning) for model, norm, sites, fit, tuning, seed in every]
        return list({json.dumps(asdict(cell)): cell for cell in map(self._settled, found)}.values())

    def _settled(self, cell: Cell) -> Cell:
        """Return a cell without what makes no difference to it, so that it runs once; frozen norms are fitted."""
        if cell.finetune is None:
            return replace(cell, fit=_fit(self, cell))
        if cell.norm != BASELINE:
            return cell
        tuning = {name: value for name, value in cell.finetune.items() if name != "schedule"}
        return Cell(cell.model, cell.norm, seed=cell.seed, finetune=tuning)

    def _trainings(self) -> list[dict[str, Any] | None]:
        """Return [finetune] with one value for each field: a field may list several."""
        if self.finetune is None:
            return [None]
        lists = [value if isinstance(value, list) else [value] for value in self.finetune.values()]
        return [dict(zip(self.finetune, values, strict=True)) for values in itertools.product(*lists)]


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
    for name, value in fields.items():
        if name not in FIELDS:
            raise ConfigError(f"{file}: unknown field {name!r}; known are {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[name]) or value == []:
            kind = "text or list" if isinstance(FIELDS[name], tuple) else FIELDS[name].__name__
            raise ConfigError(f"{file}: {name} must be a {kind} that is not empty, got {value!r:.100}")
    for name in ("models", "norms", "sites", "tasks", "metrics"):
        if not all(isinstance(one, str) for one in fields.get(name, [])):
            raise ConfigError(f"{file}: {name} must be a list of strings, got {fields[name]!r:.100}")
    if not all(isinstance(seed, int) and seed >= 0 for seed in fields.get("seeds", [])):
        raise ConfigError(f"{file}: seeds must be a list of whole numbers, got {fields['seeds']!r:.100}")
    for name in ("models", "norms"):
        if name not in fields:
            raise ConfigError(f"{file}: {name} is missing")
    if "fit" in fields:
        fits = fields["fit"] if isinstance(fields["fit"], list) else [fields["fit"]]
        fields["fit"] = [None if fit is False else fit for fit in fits]
    study = Study(**fields)
    check_study(study, file)
    return study


def check_study(study: Study, file: Path) -> None:
    """Check models, norms, patterns and texts. Errors are those of ``read_study``."""
    for text in filter(None, (study.text, *study.fit)):
        if not Path(text).is_file():
            raise minigpt.GenerationError(f"{file}: there is no file {text}")
    check_metrics(study.metrics)
    if study.tasks:
        check_tasks(study.tasks)
    if study.finetune is not None:
        if unknown := study.finetune.keys() - {*FINETUNE}:
            raise ConfigError(f"{file}: unknown field {min(unknown)!r} in [finetune]; known are {', '.join(FINETUNE)}")
        if missing := [name for name in ("text", "steps") if study.finetune.get(name, []) == []]:
            raise ConfigError(f"{file}: {missing[0]} is missing in [finetune]")
    for model in study.models:
        config = open_checkpoint(locate(model)).config
        with torch.device("meta"):
            shape = GPT2(config)
        for norm in study.norms:
            minigpt.norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
        for pattern in study.sites:
            match_sites(shape, pattern)
    for cell in study.cells():
        if cell.finetune is not None:
            settings = finetune_settings(study, cell)
            require_trainable(settings)
            checked_schedule(settings)


def finetune_settings(study: Study, cell: Cell) -> FinetuneSettings:
    """Return how a cell is trained. A schedule counts for the sites of the cell only."""
    fields: dict[str, Any] = {"eval_text": study.text} | (cell.finetune or {})
    norm = None if cell.norm == BASELINE else cell.norm
    return FinetuneSettings(
        **fields, model=cell.model, norm=norm, sites=cell.sites, fit=cell.fit, seed=cell.seed, device=study.device
    )


def fingerprint_of(study: Study, cell: Cell) -> str:
    """Return the fingerprint of all that decides a cell's row."""
    fit, tuning = _fit(study, cell), cell.finetune or {}
    files = (study.text, fit, tuning.get("text"), tuning.get("eval_text"), *study.tasks)
    return fingerprint({
        "cell": asdict(cell), "text": study.text, "fit": fit, "tasks": study.tasks, "metrics": study.metrics,
        "device": str(resolve_device(study.device)), "versions": versions(),
        "contents": contents(cell.model, (cell.norm, *study.metrics), files),
    })  # fmt: skip


def run_study(
    study: Study,
    out: Path,
    progress: Say = lambda *_: None,
    *,
    file: Path | None = None,
    ray: str | None = None,
    cells: list[Cell] | None = None,
) -> list[dict[str, Any]]:
    """Run the cells that ``out``/cells.jsonl lacks; return all of them in the order of the study.

    A row counts for a cell if it was made from the same settings, texts, code, weights and versions.

    Args:
        file: the study file, for the commands that reproduce a cell.
        ray: the address of a Ray cluster to run the cells on, or "local" for one on this machine.
        cells: some of the study's cells; by default all.
    """
    out.mkdir(parents=True, exist_ok=True)
    asked = {fingerprint_of(study, cell): cell for cell in cells or study.cells()}
    done = finished(out)
    todo = {print_: cell for print_, cell in asked.items() if print_ not in done}
    if ray is None:
        rows = _one_by_one(study, todo, out, progress, file)
    else:
        from minigpt.study.cluster import cells_on_ray

        rows = cells_on_ray(ray, study, todo, out, file)
    for number, row in enumerate(rows, start=1):
        append(out, row)
        done[row["fingerprint"]] = row
        if ray is not None:
            progress(f"{number} of {len(todo)} cells", number / len(todo))
    return [done[print_] for print_ in asked]


def _one_by_one(
    study: Study, todo: dict[str, Cell], out: Path, progress: Say, file: Path | None
) -> Iterator[dict[str, Any]]:
    begin = time.monotonic()
    for number, (print_, cell) in enumerate(todo.items()):
        spent = time.monotonic() - begin
        left = f", {_minutes(spent / number * (len(todo) - number))} left" if number else ""
        name = f"cell {number + 1} of {len(todo)}: {cell.model} {cell.norm} {cell.sites}{left}"
        yield run_cell(study, cell, print_, out, lambda what, _, name=name, number=number: progress(
            f"{name}: {what}", number / len(todo)), file=file)  # fmt: skip


def run_cell(
    study: Study, cell: Cell, print_: str, out: Path, say: Say = lambda *_: None, *, file: Path | None = None
) -> dict[str, Any]:
    """Judge one cell, train it and judge it again if the study says so; return its row.

    Args:
        print_: the cell's fingerprint. Its report and its training run are kept under it, so that another's are not
            continued.
    """
    begin = time.monotonic()
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', cell.norm)[-60:]}-{print_}"
    folder, tokenizer = out / RUNS / name / "model", minigpt.Tokenizer.from_pretrained(cell.model)
    report = minigpt.parity(
        cell.model, norm=cell.norm, sites=cell.sites, device=study.device, text=study.text,
        fit=_fit(study, cell), progress=say,
    )  # fmt: skip
    fields = report.to_dict()
    row = {
        **cell.columns(),
        "settings": ["fit", *(cell.finetune or ())],
        "verdict": fields["verdict"],
        "outcome": report.outcome,
        "ratio": _finite(fields["logits"]["ratio"]),
        "perplexity_before": _perplexity(fields, "reference"),
        "decode_norm_share": fields["cost"]["decode_norm_share"],
        **_distance(fields, AT_THE_SWAP),
        **dict.fromkeys((*RECOVERED, "entropy", "calibration_error")),
        "tasks": {},
        "metrics": {},
        "report": _keep_report(report, out, name),
        "losses": [],
        "eval_losses": [],
        "swaps": {},
        "fingerprint": print_,
    }
    if cell.finetune is not None:
        result = finetune(finetune_settings(study, cell), folder.parent, say)
        row |= {"losses": result.losses, "eval_losses": result.eval_losses, "swaps": result.swaps}
        write(result, folder, cell.model)
        norm = "fused" if cell.norm in minigpt.norms.available() else cell.norm  # "fused" leaves the norms as saved
        again = minigpt.parity(folder, norm=norm, against=cell.model, device=study.device, text=study.text)
        row |= _distance(again.to_dict(), RECOVERED)
        model = result.model
    else:
        model = minigpt.from_pretrained(cell.model, norm={cell.sites: cell.norm}, device="cpu")
        if (fit := _fit(study, cell)) is not None:
            fit_on_text(model, tokenizer, fit, cell.sites)
    if study.text is not None:
        row |= confidence(model, tokenizer.encode(read_text(Path(study.text), minigpt.GenerationError)))
    row["metrics"] = measured(study.metrics, model, tokenizer)
    if study.tasks:
        say("running lm-eval", 1.0)
        if cell.finetune is None:
            save_model(model, folder, cell.model)
        row["tasks"] = task_scores(study.tasks, folder, cell.norm, cell.sites)
    return row | {"seconds": round(time.monotonic() - begin, 3), "command": command(study, cell, file)}


def _distance(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, float | None]:
    """Return how far a judged model is from the original, under these names."""
    distribution = fields["distribution"]
    figures = (distribution[name] for name in ("kl_mean", "kl_median", "top1_agreement"))
    return dict(zip(names, (*map(_finite, figures), _perplexity(fields, "candidate")), strict=True))


def _perplexity(fields: dict[str, Any], whose: str) -> float | None:
    """Return the perplexity of the study's text, or of the prompts if there is none."""
    text = fields.get("perplexity") or {}
    return _finite(text.get(whose, fields["distribution"][f"perplexity_{whose}"]))


def _keep_report(report: minigpt.ParityReport, out: Path, name: str) -> str:
    """Write a parity report as a page and as JSON; return the page's place in out."""
    from minigpt.report.page import report_page

    folder, fields = out / REPORTS, report.to_dict()
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n")
    (folder / f"{name}.html").write_text(report_page(fields), encoding="utf-8")
    return f"{REPORTS}/{name}.html"


def command(study: Study, cell: Cell, file: Path | None) -> str:
    """Return the command that runs this cell again."""
    if cell.finetune is None:
        options = {"--model": cell.model, "--norm": cell.norm, "--sites": cell.sites, "--text": study.text,
                   "--fit": _fit(study, cell), "--device": study.device}  # fmt: skip
        return shlex.join(["minigpt", "parity", *(word for pair in options.items() if pair[1] for word in pair)])
    varied = [name for name, value in (study.finetune or {}).items() if isinstance(value, list)]
    wanted = [f"{name}={cell.columns().get(name)}" for name in ("model", "norm", "sites", "seed", "fit", *varied)]
    only = [word for one in wanted for word in ("--only", one)]
    return shlex.join(["minigpt", "study", str(file or "FILE.toml"), "--out", "again", *only])


def only(study: Study, wanted: list[str]) -> list[Cell]:
    """Return the cells that have the values of every NAME=VALUE.

    Raises:
        ConfigError: if there is none.
    """
    cells, pairs = study.cells(), [one.partition("=") for one in wanted]
    chosen = [cell for cell in cells if all(str(cell.columns().get(name)) == value for name, _, value in pairs)]
    if not chosen:
        names = ", ".join(cells[0].columns())
        raise ConfigError(f"no cell has {' and '.join(wanted)}; --only takes NAME=VALUE with a name of {names}")
    return chosen


def finished(out: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of finished cells by their fingerprints. A last line that a kill has torn is cut off the file."""
    file = out / CELLS
    if not file.is_file():
        return {}
    whole = file.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if kept != whole:
        with file.open("r+b") as stream:
            stream.truncate(len(kept))
    return {row.get("fingerprint", ""): row for row in map(json.loads, kept.decode().splitlines())}


def append(out: Path, row: dict[str, Any]) -> None:
    """Append a row as one line."""
    with (out / CELLS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, allow_nan=False) + "\n")


def _fit(study: Study, cell: Cell) -> str | None:
    """Return the text that norms are fitted on before training. Frozen norms cannot do without."""
    if cell.norm != "frozen":
        return cell.fit
    return cell.fit or study.text or (cell.finetune or {}).get("text")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
