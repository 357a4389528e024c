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
from minigpt.errors import RAISED, ConfigError, MiniGPTError, NormError
from minigpt.files import Lines, finite, hash_file, write_atomically
from minigpt.judge.original import Original, read_original
from minigpt.machine import software, versions
from minigpt.norms.foreign.construct import naming
from minigpt.norms.foreign.locate import code_files, last_line
from minigpt.norms.foreign.locate import locate as locate_code
from minigpt.progress import Progress
from minigpt.recipe import Recipe
from minigpt.report.fields import perplexities
from minigpt.report.numerals import duration
from minigpt.report.parity_report import ParityReport
from minigpt.study.study import (
    DIVERGED,
    FAILED,
    PACKAGES,
    Cell,
    CellRow,
    DivergedError,
    Study,
    check_cell,
    command,
    fingerprint_of,
    takes_text,
)  # fmt: skip
from minigpt.tokenizer import Tokenizer

CELLS, REPORTS, RUNS = "cells.jsonl", "reports", "runs"
DISTANCES = ("kl_mean", "kl_median", "top1_agreement", "loss_change")
AT_THE_SWAP = (*DISTANCES, "perplexity_after")
RECOVERED = ("kl_recovered", "kl_median_recovered", "top1_recovered", "loss_change_recovered", "perplexity_recovered")
LOCAL = "local"  # the address of a cluster that is started on this machine for the run
RETRIES = 3  # of a cell on a machine that was lost


def run_study(
    study: Study, out: Path, progress: Progress = lambda *_: None, *, file: Path | None = None, ray: str | None = None,
    cells: list[Cell] | None = None,
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
        todo = {key: cell for key, cell in chosen.items() if done.get(key, {"outcome": FAILED})["outcome"] == FAILED}
        rows = _here(study, todo, out, file, progress) if ray is None else _on_ray(ray, study, todo, out, file)
        try:
            for row in rows:
                lines.append(row)
                done[row["fingerprint"]] = row
        finally:
            _last_original.clear()
    return [done[key] for key in chosen]


def _here(
    study: Study, todo: Mapping[str, Cell], out: Path, file: Path | None, progress: Progress
) -> Iterator[CellRow]:
    begin = time.monotonic()
    for number, (key, cell) in enumerate(todo.items()):

        def say(what: str, share: float, number: int = number) -> None:
            done = (number + share) / len(todo)
            left = (time.monotonic() - begin) * (1 - done) / done if done else None
            estimate = "" if left is None else f", about {duration(left)} left"
            progress(f"cell {number + 1} of {len(todo)}{estimate}: {what}", done)

        yield run_cell(study, cell, key, out, file, say)


def run_cell(
    study: Study, cell: Cell, key: str, out: Path, file: Path | None = None, progress: Progress = lambda *_: None
) -> CellRow:
    """Judge one cell, train it and judge it again if the study says so; return its row, whatever happens.

    Args:
        key: the cell's fingerprint. Its report and its training run are kept under it, so that another's are not
            continued.
        file: the study file, for the command that reproduces the cell.
    """
    begin, settings = time.monotonic(), cell.settings()
    row: CellRow = {
        **settings, "settings": [*settings], "control": cell.recipe.norm is None, "verdict": "fail",
        "outcome": FAILED, "reason": None, "ratio": None,
        "perplexity_before": None, **dict.fromkeys((*AT_THE_SWAP, *RECOVERED)), "losses": [], "eval_losses": [],
        "swaps": {}, "metrics": {}, "report": None, "fingerprint": key,
        "command": command(study, cell, file), "protocol": {},
    }  # fmt: skip
    title = f"{settings['model']} {settings['norm']} {settings['sites']}"
    try:
        for part in _parts(study, cell, key, out, lambda what, share: progress(f"{title}: {what}", share)):
            row |= part | {"protocol": row["protocol"] | part.get("protocol", {})}
    except RAISED as error:  # whatever a norm, a metric or the memory does: the other cells run
        outcome = DIVERGED if isinstance(error, DivergedError) else FAILED
        reason = str(error) if isinstance(error, MiniGPTError) else last_line(error)
        row |= {"verdict": "fail", "outcome": outcome, "reason": reason}
    return finite(row | {"seconds": round(time.monotonic() - begin, 3)})


def _parts(study: Study, cell: Cell, key: str, out: Path, progress: Progress) -> Iterator[CellRow]:
    """Yield what is measured on a cell, in parts, so that an error keeps the parts before it."""
    recipe, training = cell.recipe, cell.training
    yield {"protocol": _protocol(study, cell)}
    check_cell(cell)  # before its original is read
    if training is not None and recipe.dtype is None:
        recipe = replace(recipe, dtype="float32")
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', cell.settings()['norm'])[-60:]}-{key}"
    original = original_of(study, recipe, progress)
    swapped = recipe
    if training is not None and recipe.fit is None and isinstance(recipe.norm, str) and takes_text(recipe.norm):
        swapped = replace(recipe, fit=study.text or training.text)
    progress("judging it at the swap", 0.0)
    report = original.judge(swapped, diagnose=False)
    judged = report.to_dict()
    yield {
        "verdict": judged["verdict"], "outcome": report.outcome, "ratio": judged["logits"]["ratio"],
        "report": _keep_report(report, out, name), **_figures(report, AT_THE_SWAP),
        "perplexity_before": perplexities(report)[0], "protocol": {"dtype": report.dtype},
    }  # fmt: skip
    if training is None:
        if study.metrics:
            yield from _metrics(study.metrics, *swapped.load(any_architecture=True)[:2])
        return
    from minigpt.study.training import arguments, finetune, optimizer_facts

    yield {"protocol": {"training": optimizer_facts(arguments(cell.recipe, training, out / RUNS / name, cell.seed))}}
    result = finetune(cell.recipe, training, out / RUNS / name, progress, seed=cell.seed)
    result.save(out / RUNS / name / "model")
    model = result.model.to(resolve_device(recipe.device))
    yield {**result.curves(), "tokens": result.tokens, "tokens_seen": result.tokens_seen}
    progress("judging it after training", 0.99)
    yield _figures(original.judge(model, diagnose=False), RECOVERED)
    yield from _metrics(study.metrics, model, result.tokenizer)


_last_original: dict[tuple[Any, ...], Original] = {}  # one at most, since the cells of a model follow each other


def original_of(study: Study, recipe: Recipe, progress: Progress) -> Original:
    """Return what transformers says of a cell's model, read once in a process for each text as it is."""
    own = Recipe(
        recipe.source, attention=recipe.attention, device=recipe.device, dtype=recipe.dtype, quantize=recipe.quantize,
        revision=recipe.revision,
    )  # fmt: skip
    digest = study.text and hash_file(study.text)
    key = (own, study.against, tuple(study.prompts), study.text, digest)
    if key not in _last_original:
        progress("reading the original", 0.0)
        _last_original.clear()
        _last_original[key] = read_original(own, study.against, prompts=study.prompts or None, text=study.text)
    return _last_original[key]


def _figures(report: ParityReport, names: tuple[str, ...]) -> CellRow:
    """Return how far a judged model is from the original, under these names, with standard errors over rows of text.

    With a text, the change of the loss is that of the whole text, as the perplexity is. There are two more figures of
    a text then. entropy: of the predictions, in nats, a mean over tokens. text_rows: for each window, the tokens that
    count and the sum of their losses in nats.
    """
    judged = report.to_dict()
    text = judged["perplexity"] or {}
    measured = judged["distribution"] | {name: text[name] for name in text if name.startswith("loss_change")}
    row: CellRow = {names[-1]: perplexities(report)[1]}
    for name, quantity in zip(names, DISTANCES, strict=False):
        row |= {name: measured.get(quantity), f"{name}_se": measured.get(f"{quantity}_se")}
    if text:
        row |= {"entropy": text["entropy"], "text_rows": text["rows"]}
        if None not in (text["candidate"], text["loss_se"]):
            row[f"{names[-1]}_se"] = text["candidate"] * text["loss_se"]
    return row


def _keep_report(report: ParityReport, out: Path, name: str) -> str:
    """Write a parity report as a page and as JSON; return the page's place in out."""
    (out / REPORTS).mkdir(exist_ok=True)
    write_atomically(out / REPORTS / f"{name}.json", json.dumps(report.to_dict(), indent=2) + "\n")
    report.to_html(out / REPORTS / f"{name}.html")
    return f"{REPORTS}/{name}.html"


def _protocol(study: Study, cell: Cell) -> CellRow:
    """Return what a reader of the table must know beside the settings: files by their digests, and versions."""
    training = cell.training
    named = {"text": study.text, "fit": cell.recipe.fit, "training text": training and training.text}
    files = {name: [Path(file)] for name, file in named.items() if file and Path(file).is_file()}
    weights = [file for file in known_files(cell.recipe.place()) if file.suffix in (".safetensors", ".bin", ".pt")]
    files[f"weights of {cell.recipe.source}"] = weights
    if ":" in str(cell.recipe.norm):
        files["code of a norm"] = code_files(str(cell.recipe.norm))[:1]
    texts = {
        name: "; ".join(f"{file.name}, SHA-256 {hash_file(file)[:16]}" for file in kept) for name, kept in files.items()
    }
    return {"texts": texts, "versions": versions(resolve_device(study.device)) | software(*PACKAGES)}


def _metrics(metrics: list[str], model: nn.Module, tokenizer: Tokenizer | None) -> Iterator[CellRow]:
    """Yield the figures of the user's functions, all that are known each time, and the reason if one has none."""
    figures: dict[str, float | None] = {}
    for metric in metrics:
        function: Any = locate_code(metric)
        try:
            with naming(function, metric):
                figure = float(function(model, tokenizer))
            reason = None if math.isfinite(figure) else f"is {figure}"
        except NormError as error:
            figure, reason = None, str(error)
        figures[metric] = None if reason else figure
        yield {"metrics": figures} | ({"reason": f"{metric} {reason}"} if reason else {})


def connect(address: str) -> Any:
    """Connect to a Ray cluster, or start one on this machine; return the module ``ray``.

    Raises:
        ConfigError: if Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'minigpt[ray]'") from error
    if not ray.is_initialized():
        where: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {"address": address}
        try:
            ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"cannot connect to a Ray cluster at {address}: {error}") from error
    return ray


def _on_ray(address: str, study: Study, todo: Mapping[str, Cell], out: Path, file: Path | None) -> Iterator[CellRow]:
    """Run each cell as a task of Ray, on a processor and on a GPU if there are some; yield its row at its end.

    A cell whose machine was lost RETRIES times has no row: it runs again when the study is started again.
    """
    ray = connect(address)
    may_use_gpu = study.device is None or study.device.startswith("cuda")
    gpus = int(may_use_gpu and ray.cluster_resources().get("GPU", 0) >= 1)
    task = ray.remote(run_cell).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
    waiting = [task.remote(study, cell, key, out.resolve(), file) for key, cell in todo.items()]  # they run elsewhere
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
