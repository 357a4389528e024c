"""Run the cells of a study, here or on a Ray cluster, and keep a line of each."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from minigpt.checkpoint.contents import known_files
from minigpt.device import resolve_device
from minigpt.errors import ConfigError, MiniGPTError, NormError, raised, to_install
from minigpt.files import Lines, finite, hash_file, write_atomically
from minigpt.judge.original import Original
from minigpt.machine import software, versions
from minigpt.norms.foreign.construct import naming
from minigpt.norms.foreign.locate import code_files, last_line, locate
from minigpt.progress import Progress, time_left
from minigpt.recipe import Recipe
from minigpt.report.fields import perplexities
from minigpt.report.parity_report import ParityReport
from minigpt.study.settings import DivergedError, Training, takes_text
from minigpt.study.study import (
    DIVERGED,
    FAILED,
    PACKAGES,
    CellRow,
    Study,
    StudyCell,
    check_cell,
    command,
    fingerprint_of,
)
from minigpt.tokenizer import Tokenizer

CELLS, REPORTS, RUNS = "cells.jsonl", "reports", "runs"
DISTANCE_NAMES = ("kl_mean", "kl_median", "top1_agreement", "loss_change")
AT_THE_SWAP = (*DISTANCE_NAMES, "perplexity_after")
RECOVERED = ("kl_recovered", "kl_median_recovered", "top1_recovered", "loss_change_recovered", "perplexity_recovered")
LOCAL = "local"  # the address of a cluster that is started on this machine for the run
RETRIES = 3  # of a cell on a machine that was lost
DIGESTED_WEIGHTS = (".safetensors", ".bin", ".pt")


def run_study(
    study: Study, out: Path, progress: Progress = lambda *_: None, *, file: Path | None = None, ray: str | None = None,
    cells: list[StudyCell] | None = None,
) -> list[CellRow]:  # fmt: skip
    """Run the cells that ``out``/cells.jsonl lacks; return all of them in the order of the study.

    A row counts for a cell if it was made from the same settings, texts, code, weights and versions. A cell that fails
    is a row with its ``reason``, and runs again when the study is started again; one that diverges is a result.

    Args:
        progress: called with what goes on and the share of the cells that are done.
        file: the study file, for the commands that reproduce a cell.
        ray: the address of a Ray cluster to run the cells on, or "local" for one on this machine.
        cells: some of the study's cells; by default all.

    Raises:
        ConfigError: if another study is running in ``out``, or a line of cells.jsonl is damaged.
    """
    out.mkdir(parents=True, exist_ok=True)
    chosen = {fingerprint_of(study, cell): cell for cell in cells or study.cells()}
    with Lines(out / CELLS, kind=ConfigError) as lines:
        done = {row.get("fingerprint"): row for row in lines.rows}
        todo = {}
        for key, cell in chosen.items():
            if key not in done or done[key]["outcome"] == FAILED:
                todo[key] = cell
        rows = _here(study, todo, out, file, progress)  # a generator: nothing runs yet
        if ray is not None:
            rows = _on_ray(ray, study, todo, out, file)
        try:
            for row in rows:
                lines.append(row)
                done[row["fingerprint"]] = row
        finally:
            _last_original.clear()
    return [done[key] for key in chosen]


def _here(
    study: Study, todo: Mapping[str, StudyCell], out: Path, file: Path | None, progress: Progress
) -> Iterator[CellRow]:
    """Run the cells one after another in this process; yield each row."""
    begin = time.monotonic()
    for number, (key, cell) in enumerate(todo.items()):

        def say(what: str, share: float, number: int = number) -> None:
            done = (number + share) / len(todo)
            estimate = time_left(time.monotonic() - begin, done)
            progress(f"cell {number + 1} of {len(todo)}{estimate}: {what}", done)

        yield run_cell(study, cell, key, out, file, say)


def run_cell(
    study: Study, cell: StudyCell, key: str, out: Path, file: Path | None = None, progress: Progress = lambda *_: None
) -> CellRow:
    """Judge one cell, train it and judge it again if the study says so; return its row, whatever happens.

    Args:
        key: the cell's fingerprint. Its report and its training run are kept under it, so that another's are not
            continued.
        file: the study file, for the command that reproduces the cell.
    """
    begin = time.monotonic()
    settings = cell.settings()
    row = _empty_row(cell, key) | {"command": command(study, cell, file), "protocol": {}}
    who = f"{settings['model']} {settings['norm']} {settings['sites']}"

    def say(what: str, share: float) -> None:
        progress(f"{who}: {what}", share)

    try:
        for part in _measurements(study, cell, key, out, say):
            protocol = row["protocol"] | part.get("protocol", {})
            row |= part | {"protocol": protocol}
    except raised() as error:  # whatever a norm, a metric or the memory does: the other cells run
        row |= _failure(error)
    row["seconds"] = round(time.monotonic() - begin, 3)
    return finite(row)


def _empty_row(cell: StudyCell, key: str) -> CellRow:
    """Return the row of a cell of which nothing was measured yet."""
    settings = cell.settings()
    row: CellRow = {
        **settings, "settings": [*settings], "control": cell.recipe.norm is None, "verdict": "fail",
        "outcome": FAILED, "reason": None, "ratio": None, "perplexity_before": None,
    }  # fmt: skip
    row |= dict.fromkeys((*AT_THE_SWAP, *RECOVERED))
    return row | {"losses": [], "eval_losses": [], "swaps": {}, "metrics": {}, "report": None, "fingerprint": key}


def _failure(error: BaseException) -> CellRow:
    """Return what a row says of the error that ended its cell."""
    outcome = DIVERGED if isinstance(error, DivergedError) else FAILED
    reason = str(error) if isinstance(error, MiniGPTError) else last_line(error)
    return {"verdict": "fail", "outcome": outcome, "reason": reason}


def _measurements(study: Study, cell: StudyCell, key: str, out: Path, progress: Progress) -> Iterator[CellRow]:
    """Yield what is measured on a cell, in parts, so that an error keeps the parts before it."""
    yield {"protocol": _protocol(study, cell)}
    check_cell(cell)  # before its original is read
    recipe = cell.recipe
    if cell.training is not None and recipe.dtype is None:
        recipe = replace(recipe, dtype="float32")
    norm = re.sub(r"[^A-Za-z0-9_.-]+", "_", cell.settings()["norm"])
    name = f"{norm[-60:]}-{key}"  # of the report, and of the folder of the training
    original = original_of(study, recipe, progress)
    swapped = _fitted_at_the_swap(recipe, cell.training, study.text)
    progress("judging it at the swap", 0.0)
    report = original.judge(swapped, diagnose=False)
    judged = report.to_dict()
    yield {
        "verdict": judged["verdict"], "outcome": report.outcome, "ratio": judged["logits"]["ratio"],
        "report": _keep_report(report, out, name), **_distances(report, AT_THE_SWAP),
        "perplexity_before": perplexities(report)[0], "protocol": {"dtype": report.dtype},
    }  # fmt: skip
    if cell.training is not None:
        yield from _trained_measurements(study, cell, cell.training, original, out / RUNS / name, progress)
    elif study.metrics:
        loaded = swapped.load(any_architecture=True)
        yield from _metrics(study.metrics, loaded.model, loaded.tokenizer)


def _trained_measurements(
    study: Study, cell: StudyCell, training: Training, original: Original, folder: Path, progress: Progress
) -> Iterator[CellRow]:
    """Yield what is measured on a cell after its training, whose checkpoints and model are kept in ``folder``."""
    from minigpt.study.trainer import arguments, optimizer_facts
    from minigpt.study.training import finetune

    facts = optimizer_facts(arguments(cell.recipe, training, folder, cell.seed))
    yield {"protocol": {"training": facts}}
    trained = finetune(cell.recipe, training, folder, progress, seed=cell.seed)
    trained.save(folder / "model")
    model = trained.model.to(resolve_device(cell.recipe.device))
    yield {**trained.curves(), "tokens": trained.tokens, "tokens_seen": trained.tokens_seen}
    progress("judging it after training", 0.99)
    report = original.judge(model, diagnose=False)
    yield _distances(report, RECOVERED)
    yield from _metrics(study.metrics, model, trained.tokenizer)


def _fitted_at_the_swap(recipe: Recipe, training: Training | None, text: str | None) -> Recipe:
    """Return the recipe that is judged at the swap: a trained norm that needs a text to run is fitted on one."""
    if training is None or recipe.fit is not None:
        return recipe
    if not (isinstance(recipe.norm, str) and takes_text(recipe.norm)):
        return recipe
    return replace(recipe, fit=text or training.text)


_last_original: dict[tuple[Any, ...], Original] = {}  # one at most, since the cells of a model follow each other


def original_of(study: Study, recipe: Recipe, progress: Progress) -> Original:
    """Return what transformers says of a cell's model, read once in a process for each text as it is."""
    original = Recipe(
        recipe.source, attention=recipe.attention, device=recipe.device, dtype=recipe.dtype, quantize=recipe.quantize,
        revision=recipe.revision,
    )  # fmt: skip
    digest = study.text and hash_file(study.text)
    key = (original, study.against, tuple(study.prompts), study.text, digest)
    if key not in _last_original:
        progress("reading the original", 0.0)
        _last_original.clear()
        _last_original[key] = Original(original, against=study.against, prompts=study.prompts or None, text=study.text)
    return _last_original[key]


def _distances(report: ParityReport, names: tuple[str, ...]) -> CellRow:
    """Return how far a judged model is from the original, under these names, with standard errors over rows of text.

    With a text, the change of the loss is that of the whole text, as the perplexity is. There are two more figures of
    a text then. entropy: of the predictions, in nats, a mean over tokens. text_rows: for each window, the tokens that
    count and the sum of their losses in nats.

    Args:
        names: one for each of DISTANCE_NAMES, and the last for the perplexity.
    """
    *names_of_distances, perplexity = names
    judged = report.to_dict()
    text = judged["perplexity"]
    measured = dict(judged["distribution"])
    if text:
        measured |= {"loss_change": text["loss_change"], "loss_change_se": text["loss_change_se"]}
    row: CellRow = {perplexity: perplexities(report)[1]}
    for name, distance in zip(names_of_distances, DISTANCE_NAMES, strict=True):
        row[name] = measured.get(distance)
        row[f"{name}_se"] = measured.get(f"{distance}_se")
    if not text:
        return row
    row |= {"entropy": text["entropy"], "text_rows": text["rows"]}
    if text["candidate"] is not None and text["loss_se"] is not None:
        row[f"{perplexity}_se"] = text["candidate"] * text["loss_se"]
    return row


def _keep_report(report: ParityReport, out: Path, name: str) -> str:
    """Write a parity report as a page and as JSON; return the page's place in out."""
    (out / REPORTS).mkdir(exist_ok=True)
    write_atomically(out / REPORTS / f"{name}.json", json.dumps(report.to_dict(), indent=2) + "\n")
    report.to_html(out / REPORTS / f"{name}.html")
    return f"{REPORTS}/{name}.html"


def _protocol(study: Study, cell: StudyCell) -> CellRow:
    """Return what a reader of the table must know beyond the settings: files by their digests, and versions."""
    texts = {}
    for name, files in _files_of(study, cell).items():
        digests = [f"{file.name}, SHA-256 {hash_file(file)[:16]}" for file in files]
        texts[name] = "; ".join(digests)
    return {"texts": texts, "versions": versions(resolve_device(study.device)) | software(*PACKAGES)}


def _files_of(study: Study, cell: StudyCell) -> dict[str, list[Path]]:
    """Return the files that a cell's row depends on, by what they are: texts, weights, the code of the norm."""
    recipe = cell.recipe
    named = {"text": study.text, "fit": recipe.fit}
    if cell.training is not None:
        named["training text"] = cell.training.text
    files = {}
    for name, file in named.items():
        if file and Path(file).is_file():
            files[name] = [Path(file)]
    weights = [file for file in known_files(recipe.place()) if file.suffix in DIGESTED_WEIGHTS]
    files[f"weights of {recipe.source}"] = weights
    if ":" in str(recipe.norm):
        files["code of a norm"] = code_files(str(recipe.norm))[:1]
    return files


def _metrics(metrics: list[str], model: nn.Module, tokenizer: Tokenizer | None) -> Iterator[CellRow]:
    """Yield the figures of the user's functions, all that are known each time, and the reason if one has none."""
    figures: dict[str, float | None] = {}
    for metric in metrics:
        function: Any = locate(metric)
        figures[metric] = None
        try:
            with naming(function, metric):
                figure = float(function(model, tokenizer))
        except NormError as error:
            yield {"metrics": figures, "reason": f"{metric} {error}"}
            continue
        if not math.isfinite(figure):
            yield {"metrics": figures, "reason": f"{metric} is {figure}"}
            continue
        figures[metric] = figure
        yield {"metrics": figures}


def connect(address: str) -> Any:
    """Connect to a Ray cluster, or start one on this machine; return the module ``ray``.

    Raises:
        ConfigError: if Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {to_install('ray')}") from error
    if ray.is_initialized():
        return ray
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
        where = {"include_dashboard": False}
    try:
        ray.init(**where, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"cannot connect to a Ray cluster at {address}: {error}") from error
    return ray


def _on_ray(
    address: str, study: Study, todo: Mapping[str, StudyCell], out: Path, file: Path | None
) -> Iterator[CellRow]:
    """Run each cell as a task of Ray, on a processor and on a GPU if there are some; yield its row at its end.

    A cell whose machine was lost RETRIES times has no row: it runs again when the study is started again.
    """
    ray = connect(address)
    may_use_gpu = study.device is None or study.device.startswith("cuda")
    gpus = int(may_use_gpu and ray.cluster_resources().get("GPU", 0) >= 1)
    task = ray.remote(run_cell).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
    waiting = []
    for key, cell in todo.items():
        waiting.append(task.remote(study, cell, key, out.resolve(), file))  # they run elsewhere
    lost = None
    while waiting:
        (done,), waiting = ray.wait(waiting)
        try:
            yield ray.get(done)
        except ray.exceptions.RayError as error:
            lost = error
    if lost is not None:
        raise ConfigError(
            f"a cell was lost with its machine, {RETRIES + 1} times: {str(lost).splitlines()[0]}; start the study "
            "again, and it runs the cells that are missing"
        ) from lost
