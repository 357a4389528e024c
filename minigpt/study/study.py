"""A study: models x norms x sites x settings x seeds, each cell judged and appended to a file as it is finished."""

import itertools
import json
import os
import re
import shlex
import time
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import minigpt
from minigpt.device import resolve_device
from minigpt.errors import ConfigError
from minigpt.files import read_text
from minigpt.study.finetune import (
    FinetuneSettings,
    Say,
    check_types,
    checked_schedule,
    finetune,
    save_model,
    shape_of,
    write,
)
from minigpt.study.fingerprint import contents, fingerprint, versions
from minigpt.study.measures import check_metrics, confidence, measured
from minigpt.study.tasks import check_tasks, task_scores
from minigpt.swap import fit_on_text, match_sites

CELLS, REPORTS, RUNS = "cells.jsonl", "reports", "runs"
AT_THE_SWAP = ("kl_mean", "kl_median", "top1_agreement", "perplexity_after")
RECOVERED = ("kl_recovered", "kl_median_recovered", "top1_recovered", "perplexity_recovered")
BASELINE = "fused"  # trained as long as the others, it is what they are compared with
OF_CELL = ("model", "norm", "sites", "seed", "fit", "device")  # settings that [finetune] does not have
TUNED = [field.name for field in fields(FinetuneSettings) if field.name not in OF_CELL]

Cell = dict[str, Any]  # model, norm, sites, fit, seed, and if it is trained a value for each field of [finetune]
Row = dict[str, Any]  # the cell, and what was measured on it


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
        """Return the cells in the order of the file. A trained study has the baseline in any case.

        Those that differ only in what makes no difference to them are one.
        """
        tuning, norms = self.finetune or {}, self.norms
        if tuning and BASELINE not in norms:
            norms = [BASELINE, *norms]
        lists = {"model": self.models, "norm": norms, "sites": self.sites, "fit": self.fit}
        lists |= {name: value if isinstance(value, list) else [value] for name, value in tuning.items()}
        lists["seed"] = self.seeds
        found: dict[str, Cell] = {}
        for values in itertools.product(*lists.values()):
            cell = dict(zip(lists, values, strict=True))
            if not tuning:
                cell["fit"] = self.fit_of(cell)
            elif cell["norm"] == BASELINE:
                cell |= {"sites": "*", "fit": None}
                cell.pop("schedule", None)
            found[json.dumps(cell)] = cell
        return list(found.values())

    def fit_of(self, cell: Cell) -> str | None:
        """Return the text that norms are fitted on before training. Frozen norms cannot do without."""
        if cell["norm"] != "frozen":
            return cell["fit"]
        return cell["fit"] or self.text or cell.get("text")


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
    _require_fields(table, [field.name for field in fields(Study)], ("models", "norms"), str(file))
    if "fit" in table:
        fits = table["fit"] if isinstance(table["fit"], list) else [table["fit"]]
        table["fit"] = [None if fit is False else fit for fit in fits]
    study = Study(**table)
    check_types(study)
    for text in filter(None, (study.text, *study.fit)):
        if not Path(text).is_file():
            raise minigpt.GenerationError(f"{file}: there is no file {text}")
    check_metrics(study.metrics)
    if study.tasks:
        check_tasks(study.tasks)
    if study.finetune is not None:
        _require_fields(study.finetune, TUNED, ("text", "steps"), f"{file}, [finetune]")
    for cell in study.cells():
        match_sites(shape_of(cell["model"], cell["norm"]), cell["sites"])
        if study.finetune:
            checked_schedule(finetune_settings(study, cell))
    return study


def _require_fields(table: Row, known: Collection[str], needed: Collection[str], where: str) -> None:
    """Check that a table of the file has the fields that it needs, and no list without a value."""
    if unknown := table.keys() - {*known}:
        raise ConfigError(f"{where}: unknown field {min(unknown)!r}; known are {', '.join(known)}")
    if empty := [name for name in (*needed, *table) if table.get(name, []) == []]:
        raise ConfigError(f"{where}: {empty[0]} is missing")


def finetune_settings(study: Study, cell: Cell) -> FinetuneSettings:
    """Return how a cell is trained. A schedule counts for the sites of the cell only."""
    norm = None if cell["norm"] == BASELINE else cell["norm"]
    given: dict[str, Any] = {"eval_text": study.text, "device": study.device} | cell | {"norm": norm}
    return FinetuneSettings(**given)


def fingerprint_of(study: Study, cell: Cell) -> str:
    """Return the fingerprint of all that decides a cell's row."""
    files = (study.text, study.fit_of(cell), cell.get("text"), cell.get("eval_text"), *study.tasks)
    return fingerprint({
        "cell": cell, "text": study.text, "fit": study.fit_of(cell), "tasks": study.tasks, "metrics": study.metrics,
        "device": str(resolve_device(study.device)), "versions": versions(),
        "contents": contents(cell["model"], (cell["norm"], *study.metrics), files),
    })  # fmt: skip


def run_study(
    study: Study,
    out: Path,
    progress: Say = lambda *_: None,
    *,
    file: Path | None = None,
    ray: str | None = None,
    cells: list[Cell] | None = None,
) -> list[Row]:
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
    ended = 0

    def say(what: str, _: float) -> None:
        progress(f"cell {ended + 1} of {len(todo)}: {what}", ended / len(todo))

    if ray is None:
        rows = (run_cell(study, cell, print_, out, file, say) for print_, cell in todo.items())
    else:
        from minigpt.study.cluster import cells_on_ray

        rows = cells_on_ray(ray, study, todo, out, file)
    for ended, row in enumerate(rows, start=1):
        append(out, row)
        done[row["fingerprint"]] = row
        progress(f"{ended} of {len(todo)} cells", ended / len(todo))
    return [done[print_] for print_ in asked]


def run_cell(
    study: Study, cell: Cell, print_: str, out: Path, file: Path | None = None, say: Say = lambda *_: None
) -> Row:
    """Judge one cell, train it and judge it again if the study says so; return its row.

    Args:
        print_: the cell's fingerprint. Its report and its training run are kept under it, so that another's are not
            continued.
        file: the study file, for the command that reproduces the cell.
    """
    begin, fit = time.monotonic(), study.fit_of(cell)
    source, norm, sites = cell["model"], cell["norm"], cell["sites"]
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', norm)[-60:]}-{print_}"
    folder, tokenizer = out / RUNS / name / "model", minigpt.Tokenizer.from_pretrained(source)
    how: dict[str, Any] = {"device": study.device, "text": study.text}

    def tell(what: str, part: float) -> None:
        say(f"{source} {norm} {sites}: {what}", part)

    report = minigpt.parity(source, norm=norm, sites=sites, fit=fit, progress=tell, **how)
    judged, figures = report.to_dict(), {}
    if not study.finetune:
        model = minigpt.from_pretrained(source, norm={sites: norm}, device="cpu")
        if fit is not None:
            fit_on_text(model, tokenizer, fit, sites)
        trained = {"losses": [], "eval_losses": [], "swaps": {}} | dict.fromkeys(RECOVERED)
    else:
        result = finetune(finetune_settings(study, cell), folder.parent, tell)
        model = result.model
        write(result, folder, source)
        named = "fused" if norm in minigpt.norms.available() else norm  # "fused" leaves the norms as saved
        again = minigpt.parity(folder, norm=named, against=source, **how).to_dict()
        trained = {"losses": result.losses, "eval_losses": result.eval_losses, "swaps": result.swaps}
        trained |= _distance(again, RECOVERED)
    if study.text is not None:
        figures = confidence(model, tokenizer.encode(read_text(Path(study.text), minigpt.GenerationError)))
    if study.tasks:
        tell("running lm-eval", 1.0)
        if not study.finetune:
            save_model(model, folder, source)
    return {
        **cell,
        "settings": ["fit", *(study.finetune or ())],
        "verdict": judged["verdict"],
        "outcome": report.outcome,
        "ratio": judged["logits"]["ratio"],
        "perplexity_before": _perplexity(judged, "reference"),
        **_distance(judged, AT_THE_SWAP),
        **trained,
        **figures,
        "metrics": measured(study.metrics, model, tokenizer),
        "tasks": task_scores(study.tasks, folder, norm, sites) if study.tasks else {},
        "report": _keep_report(report, out, name),
        "fingerprint": print_,
        "seconds": round(time.monotonic() - begin, 3),
        "command": command(study, cell, file),
    }


def _distance(judged: Row, names: tuple[str, ...]) -> Row:
    """Return how far a judged model is from the original, under these names."""
    distribution = judged["distribution"]
    figures = (distribution[name] for name in ("kl_mean", "kl_median", "top1_agreement"))
    return dict(zip(names, (*figures, _perplexity(judged, "candidate")), strict=True))


def _perplexity(judged: Row, whose: str) -> float | None:
    """Return the perplexity of the study's text, or of the prompts if there is none."""
    return (judged.get("perplexity") or {}).get(whose, judged["distribution"][f"perplexity_{whose}"])


def _keep_report(report: minigpt.ParityReport, out: Path, name: str) -> str:
    """Write a parity report as a page and as JSON; return the page's place in out."""
    folder = out / REPORTS
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    report.to_html(folder / f"{name}.html")
    return f"{REPORTS}/{name}.html"


def command(study: Study, cell: Cell, file: Path | None) -> str:
    """Return the command that runs this cell again."""
    if not study.finetune:
        options = {"--model": cell["model"], "--norm": cell["norm"], "--sites": cell["sites"], "--text": study.text,
                   "--fit": cell["fit"], "--device": study.device}  # fmt: skip
        return shlex.join(["minigpt", "parity", *(word for pair in options.items() if pair[1] for word in pair)])
    varied = [name for name, value in study.finetune.items() if isinstance(value, list)]
    wanted = [f"{name}={cell.get(name)}" for name in ("model", "norm", "sites", "seed", "fit", *varied)]
    only = [word for one in wanted for word in ("--only", one)]
    return shlex.join(["minigpt", "study", str(file or "FILE.toml"), "--out", "again", *only])


def only(study: Study, wanted: list[str]) -> list[Cell]:
    """Return the cells that have the values of every NAME=VALUE.

    Raises:
        ConfigError: if there is none.
    """
    cells, pairs = study.cells(), [one.partition("=") for one in wanted]
    chosen = [cell for cell in cells if all(str(cell.get(name)) == value for name, _, value in pairs)]
    if not chosen:
        names = ", ".join(cells[0])
        raise ConfigError(f"no cell has {' and '.join(wanted)}; --only takes NAME=VALUE with a name of {names}")
    return chosen


def finished(out: Path) -> dict[str, Row]:
    """Return the rows of finished cells by their fingerprints. A last line that a kill has torn is cut off the file."""
    file = out / CELLS
    if not file.is_file():
        return {}
    whole = file.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if kept != whole:
        os.truncate(file, len(kept))
    return {row.get("fingerprint", ""): row for row in map(json.loads, kept.splitlines())}


def append(out: Path, row: Row) -> None:
    """Append a row as one line."""
    with (out / CELLS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, allow_nan=False) + "\n")
