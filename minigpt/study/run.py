"""Run the cells of a study, here or on a Ray cluster, and keep a line of each."""

import contextlib
import functools
import json
import math
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.checkpoint import Files
from minigpt.checkpoint.contents import all_files
from minigpt.device import Progress, resolve_device, software, versions
from minigpt.errors import ConfigError, GenerationError, MiniGPTError, NormError
from minigpt.files import Lines, finite, hash_file, read_text, write_atomically
from minigpt.judge.original import Original
from minigpt.judge.perplexity import predictions
from minigpt.judge.verdict import read_original
from minigpt.model import GPT2
from minigpt.norms.foreign.construct import naming
from minigpt.norms.foreign.locate import last_line
from minigpt.norms.foreign.locate import locate as locate_code
from minigpt.recipe import Recipe, code_files
from minigpt.report.parity_report import ParityReport, perplexities
from minigpt.study.study import PACKAGES, Cell, CellRow, DivergedError, Study, command, fingerprint_of, silence
from minigpt.tokenizer import Tokenizer

CELLS, REPORTS, RUNS = "cells.jsonl", "reports", "runs"
FAILED, DIVERGED = "FAILED", "DIVERGED"  # outcomes beside the judge's
DISTANCES = ("kl_mean", "kl_median", "top1_agreement", "loss_change")
AT_THE_SWAP = (*DISTANCES, "perplexity_after")
RECOVERED = ("kl_recovered", "kl_median_recovered", "top1_recovered", "loss_change_recovered", "perplexity_recovered")
BINS = 15  # of confidence, as Guo et al. (2017)
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
        clock = _Clock(progress, len(todo), [done[key]["seconds"] for key in chosen.keys() & done.keys()])
        if ray is None:
            rows = (run_cell(study, cell, key, out, file, clock.say) for key, cell in todo.items())
        else:
            rows = _on_ray(ray, study, todo, out, file)
        for row in rows:
            lines.append(row)
            done[row["fingerprint"]] = row
            clock.ended += 1
    if not study.published:
        return [done[key] for key in chosen]
    return [done[key] | {"published": study.published_of(cell)} for key, cell in chosen.items()]


class _Clock:
    """Says which cell runs, and how long the rest takes if it takes as long as what is done.

    Args:
        seconds: of cells of the same study that an earlier run finished.
    """

    def __init__(self, progress: Progress, total: int, seconds: list[float]) -> None:
        self.progress, self.total, self.ended, self.begin = progress, total, 0, time.monotonic()
        self.earlier = sum(seconds) / len(seconds) if seconds else None

    def say(self, what: str, share: float) -> None:
        """Say what goes on, and which share of the cell is done."""
        begun, left = self.ended + share, ""
        each = (time.monotonic() - self.begin) / begun if begun else self.earlier
        if each is not None:
            left = f", about {duration(each * (self.total - begun))} left"
        self.progress(f"cell {self.ended + 1} of {self.total}{left}: {what}", begun / self.total)


def duration(seconds: float) -> str:
    """Format a time: 41 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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
        "swaps": {}, "metrics": {}, "tasks": {}, "report": None, "fingerprint": key,
        "command": command(study, cell, file), "protocol": {},
    }  # fmt: skip
    title = f"{settings['model']} {settings['norm']} {settings['sites']}"
    try:
        for part in _parts(study, cell, key, out, lambda what, share: progress(f"{title}: {what}", share)):
            row |= part | {"protocol": row["protocol"] | part.get("protocol", {})}
    except Exception as error:  # whatever a norm, a metric or the memory does: the other cells run
        outcome = DIVERGED if isinstance(error, DivergedError) else FAILED
        reason = str(error) if isinstance(error, MiniGPTError) else last_line(error)
        row |= {"verdict": "fail", "outcome": outcome, "reason": reason}
    return finite(row | {"seconds": round(time.monotonic() - begin, 3)})


def _parts(study: Study, cell: Cell, key: str, out: Path, progress: Progress) -> Iterator[CellRow]:
    """Yield what is measured on a cell, in parts, so that an error keeps the parts before it."""
    recipe, training, figures = cell.recipe, cell.training, dict[str, float | None]()
    yield {"protocol": _protocol(study, cell)}
    if training is not None and recipe.dtype is None:
        recipe = replace(recipe, dtype="float32")
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', cell.settings()['norm'])[-60:]}-{key}"
    progress("reading the original", 0.0)
    original = original_of(
        Recipe(recipe.source, attention=recipe.attention, device=recipe.device, dtype=recipe.dtype,
               revision=recipe.revision),
        study.against, tuple(study.prompts), study.text, study.text and hash_file(study.text),
    )  # fmt: skip
    swapped = recipe
    if recipe.norm == "frozen" and training is not None and recipe.fit is None:  # it has no deviations before training
        swapped = replace(recipe, fit=study.text or training.text)
    progress("judging it at the swap", 0.0)
    report = original.judge(swapped)
    judged = report.to_dict()
    yield {
        "verdict": judged["verdict"], "outcome": report.outcome, "ratio": judged["logits"]["ratio"],
        "report": _keep_report(report, out, name), **_distance(judged, AT_THE_SWAP),
        "perplexity_before": perplexities(judged)[0], "protocol": {"dtype": report.dtype},
    }  # fmt: skip
    if training is None:
        model, tokenizer = swapped.open()
    else:
        from minigpt.study.training import arguments, described, finetune

        how = arguments(cell.recipe, training, out / RUNS / name, cell.seed)
        yield {"protocol": {"training": described(how)}}
        result = finetune(cell.recipe, training, out / RUNS / name, progress, seed=cell.seed)
        result.save(out / RUNS / name / "model")
        model, tokenizer = result.model.to(resolve_device(recipe.device)), result.tokenizer
        yield {**result.curves(), "tokens": result.tokens}
        progress("judging it after training", 0.99)
        yield _distance(original.judge(model).to_dict(), RECOVERED)
    if study.text is not None and tokenizer is not None:
        yield text_figures(model, tokenizer.encode(read_text(Path(study.text), GenerationError)))
    for metric in study.metrics:
        figure = measured(metric, model, tokenizer)
        figures[metric] = figure if isinstance(figure, float) else None
        yield {"metrics": figures} | ({} if isinstance(figure, float) else {"reason": f"{metric} {figure}"})
    if study.tasks:
        progress("running lm-eval", 0.99)
        yield {"tasks": task_scores(study.tasks, model, recipe)}


@functools.lru_cache(maxsize=1)  # the cells of a model follow each other
def original_of(
    recipe: Recipe, against: str | None, prompts: tuple[str, ...], text: str | None, _digest: str | None
) -> Original:
    """Return what transformers says of a recipe's model, read once in a process for each text as it is."""
    return read_original(recipe, against, prompts=prompts or None, text=text)


def _distance(judged: Mapping[str, Any], names: tuple[str, ...]) -> CellRow:
    """Return how far a judged model is from the original, under these names, with standard errors over rows of text.

    With a text, the change of the loss is that of the whole text, as the perplexity is.
    """
    measured = judged["distribution"] | {
        name: value for name, value in (judged["perplexity"] or {}).items() if name.startswith("loss_change")
    }
    figures = {name: measured.get(one) for name, one in zip(names, DISTANCES, strict=False)}
    errors = {f"{name}_se": measured.get(f"{one}_se") for name, one in zip(names, DISTANCES, strict=False)}
    if (text := judged["perplexity"]) is not None and None not in (text["candidate"], text["loss_se"]):
        errors[f"{names[-1]}_se"] = text["candidate"] * text["loss_se"]
    return figures | errors | {names[-1]: perplexities(judged)[1]}


def _keep_report(report: ParityReport, out: Path, name: str) -> str:
    """Write a parity report as a page and as JSON; return the page's place in out."""
    (out / REPORTS).mkdir(exist_ok=True)
    write_atomically(out / REPORTS / f"{name}.json", json.dumps(report.to_dict(), indent=2) + "\n")
    report.to_html(out / REPORTS / f"{name}.html")
    return f"{REPORTS}/{name}.html"


def _protocol(study: Study, cell: Cell) -> CellRow:
    """Return what a reader of the table must know beside the settings: files by their digests, versions, hardware."""
    names = {"text": study.text, "fit": cell.recipe.fit}
    names |= {"training text": cell.training.text} if cell.training else {}
    texts = {
        name: f"{file}, SHA-256 {hash_file(file)[:16]}" for name, file in names.items() if file and Path(file).is_file()
    }
    weights = [file for file in all_files(cell.recipe.place()) if file.suffix in (".safetensors", ".bin", ".pt")]
    code = code_files(str(cell.recipe.norm)) if ":" in str(cell.recipe.norm) else []
    for name, files in ((f"weights of {cell.recipe.source}", weights), ("code of a norm", code)):
        if files:
            texts[name] = "; ".join(f"{file.name}, SHA-256 {hash_file(file)[:16]}" for file in files)
    return {
        "texts": texts, "prompts": len(study.prompts), "commit": commit(),
        "versions": versions(resolve_device(study.device)) | software(*PACKAGES),
    }  # fmt: skip


@functools.cache
def commit() -> str | None:
    """Return the commit of the package's checkout, with "-dirty" if files have changed; None if it is not in one."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None


@torch.inference_mode()
def text_figures(model: GPT2, ids: list[int]) -> CellRow:
    """Return what a model says of a text beside its perplexity, in the windows of ``minigpt.perplexity``.

    entropy: of the predictions, in nats, a mean over tokens. calibration_error: how far the probability of the
    likeliest token is from how often that is the next one, a mean over 15 bins of equal width (Guo et al. 2017, arXiv
    1706.04599). text_rows: for each window, the tokens that count and the sum of their losses in nats.
    """
    entropy, sure, right, rows = [], [], [], []
    for (_, first, end), parts in predictions(model, ids):
        losses = []
        for logits, targets in parts:
            p = logits.float().softmax(-1)  # (tokens, V)
            likeliest = p.max(-1)
            entropy.append(torch.special.entr(p).sum(-1))
            sure.append(likeliest.values)
            right.append((likeliest.indices == targets).float())
            losses.append(float(F.cross_entropy(logits.double(), targets, reduction="sum")))
        rows.append([end - first, sum(losses)])
    calibration_error = _calibration_error(torch.cat(sure), torch.cat(right))
    return {"entropy": float(torch.cat(entropy).mean()), "calibration_error": calibration_error, "text_rows": rows}


def _calibration_error(sure: Float[Tensor, " tokens"], right: Float[Tensor, " tokens"]) -> float:
    """Return the expected calibration error of probabilities and whether each came true, as 1 or 0."""
    bins: Int[Tensor, " tokens"] = (sure * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=sure.dtype, device=sure.device).index_add_(0, bins, sure - right)
    return float(gap.abs().sum() / len(sure))


def measured(metric: str, model: GPT2, tokenizer: Tokenizer | None) -> float | str:
    """Return what a user's function of (model, tokenizer) says; if that is no finite number, the reason."""
    function: Any = locate_code(metric)
    try:
        with naming(function, metric):
            figure = float(function(model, tokenizer))
    except NormError as error:
        return str(error)
    return figure if math.isfinite(figure) else f"is {figure}"


def task_scores(tasks: list[str], model: GPT2, recipe: Recipe) -> dict[str, float]:
    """Return lm-eval's scores of a model by task and metric, e.g. {"lambada_openai acc": 0.41}."""
    from transformers import AutoTokenizer

    from minigpt.study.training import as_transformers

    tokenizer = AutoTokenizer.from_pretrained(Files.at(recipe.place()).folder)
    with silence():
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

        judged = HFLM(
            pretrained=as_transformers(model, recipe).eval(), tokenizer=tokenizer, max_length=model.config.n_positions
        )
        scores: Any = lm_eval.simple_evaluate(model=judged, tasks=tasks, bootstrap_iters=0, log_samples=False)
    return {
        f"{task} {metric.partition(',')[0]}": float(value)
        for task, figures in scores["results"].items()
        for metric, value in figures.items()
        if isinstance(value, float) and "stderr" not in metric
    }


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
    """Run each cell as a task of Ray, on a processor and on a GPU if there are some; yield its row at its end."""
    ray = connect(address)
    may_use_gpu = study.device is None or study.device.startswith("cuda")
    gpus = int(may_use_gpu and ray.cluster_resources().get("GPU", 0) >= 1)
    task = ray.remote(run_cell).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
    waiting = [task.remote(study, cell, key, out.resolve(), file) for key, cell in todo.items()]  # they run elsewhere
    while waiting:
        (done,), waiting = ray.wait(waiting)
        yield ray.get(done)
