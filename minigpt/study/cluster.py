# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Cells of a study, files of prompts and the windows of a corpus on a Ray cluster.

Ray places the work, retries it when a machine is lost, and moves the data. Every worker loads the model once. Files
that a model or a norm is read from must be readable under the same path on every machine.
"""

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minigpt
from minigpt.checkpoint import open_checkpoint
from minigpt.errors import ConfigError
from minigpt.generation import Completion, Prompt, complete
from minigpt.judge.measures import perplexity_of
from minigpt.judge.perplexity import require_predictable, window_loss, windows_of

if TYPE_CHECKING:
    from minigpt.study.study import Cell, Study

LOCAL = "local"  # the address of a cluster that is started on this machine for the run
RETRIES = 3  # of work on a machine that was lost
NONE = -1  # in a column of seeds


def connect(address: str) -> Any:
    """Connect to a Ray cluster, or start one on this machine; return the module ``ray``.

    Raises:
        ConfigError: if Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'minigpt[ray]'") from error
    if not ray.is_initialized():
        where: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {"address": address}
        try:
            ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"cannot connect to a Ray cluster at {address}: {error}") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def cells_on_ray(
    address: str, study: "Study", todo: Mapping[str, "Cell"], out: Path, file: Path | None
) -> Iterator[dict[str, Any]]:
    """Run each cell as a Ray task, and yield its row when it is finished."""
    from minigpt.study.study import run_cell

    ray = connect(address)
    task = ray.remote(run_cell).options(**_resources(ray, study.device), max_retries=RETRIES)
    shared = out.resolve()  # tasks have another working directory
    waiting = [task.remote(study, cell, print_, shared, file=file) for print_, cell in todo.items()]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        yield ray.get(done)


class Writer:
    """A worker that continues prompts."""

    def __init__(
        self, source: str | Path, how: Mapping[str, Any], settings: Mapping[str, Any], batch_size: int
    ) -> None:
        self.model = minigpt.from_pretrained(source, **how)
        self.tokenizer = minigpt.Tokenizer.from_pretrained(source)
        self.settings, self.batch_size = settings, batch_size

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        columns = zip(batch["prompt"].tolist(), batch["max_new_tokens"].tolist(), batch["seed"].tolist(), strict=True)
        given = [Prompt(text, new or None, None if seed == NONE else seed) for text, new, seed in columns]
        numbers = batch["number"].tolist()
        texts = list(complete(self.model, self.tokenizer, given, batch_size=self.batch_size, **self.settings))
        return {
            "number": [numbers[text.prompt] for text in texts],
            "copy": [text.number for text in texts],
            "ids": [text.ids for text in texts],
            "text": [text.text for text in texts],
            "end": [text.end for text in texts],
            "logprobs": [text.logprobs or [] for text in texts],
        }


def complete_on_ray(
    address: str,
    source: str | Path,
    how: Mapping[str, Any],
    prompts: Sequence[Prompt],
    *,
    skip: Container[tuple[int, int]] = (),
    batch_size: int = 16,
    **settings: Any,
) -> Iterator[Completion]:
    """Like ``minigpt.generation.complete``, by workers of a Ray cluster.

    Args:
        source, how: what every worker passes to ``minigpt.from_pretrained``.
        prompts: each with a seed, if the texts are to be repeatable.
    """
    ray = connect(address)
    copies = range(settings.get("num_return_sequences", 1))
    items = [
        {
            "number": number,
            "prompt": prompt.text,
            "max_new_tokens": prompt.max_new_tokens or 0,
            "seed": NONE if prompt.seed is None else prompt.seed,
        }
        for number, prompt in enumerate(prompts)
        if any((number, copy) not in skip for copy in copies)
    ]
    if not items:
        return
    written = ray.data.from_items(items).map_batches(
        Writer, fn_constructor_args=(source, dict(how), settings, batch_size), batch_size=batch_size,
        **_workers(ray, how.get("device")),
    )  # fmt: skip
    has_logprobs = bool(settings.get("output_logprobs"))
    for row in written.iter_rows():
        if (row["number"], row["copy"]) not in skip:
            logprobs = list(row["logprobs"]) if has_logprobs else None
            yield Completion(row["number"], row["copy"], list(row["ids"]), row["text"], row["end"], logprobs)


class Reader:
    """A worker that measures the loss of windows of a text."""

    def __init__(self, source: str | Path, how: Mapping[str, Any], ids: list[int]) -> None:
        self.model, self.ids = minigpt.from_pretrained(source, **how), ids

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        windows = zip(*(batch[name].tolist() for name in ("start", "first", "end")), strict=True)
        return {"first": batch["first"], "loss": [window_loss(self.model, self.ids, *window) for window in windows]}


def perplexity_on_ray(
    address: str, source: str | Path, how: Mapping[str, Any], tokenizer: minigpt.Tokenizer, text: str
) -> float:
    """Like ``minigpt.perplexity``, by workers of a Ray cluster. It returns the same number.

    Args:
        source, how: what every worker passes to ``minigpt.from_pretrained``.

    Raises:
        ConfigError: as ``connect``.
        GenerationError: as ``minigpt.perplexity``.
    """
    ids, context = tokenizer.encode(text), open_checkpoint(Path(source)).config.n_positions
    require_predictable("the text", ids, context)
    ray = connect(address)
    windows = [dict(zip(("start", "first", "end"), window, strict=True)) for window in windows_of(len(ids), context)]
    read = ray.data.from_items(windows).map_batches(
        Reader, fn_constructor_args=(source, dict(how), ids), batch_size=8, **_workers(ray, how.get("device"))
    )
    rows = sorted(read.iter_rows(), key=lambda row: row["first"])  # the order of the windows, for the same sum
    return perplexity_of(sum(row["loss"] for row in rows), len(ids) - 1)


def _workers(ray: Any, device: str | None) -> dict[str, Any]:
    """Return the options of ``map_batches``: as many workers as the cluster has room for."""
    resources = _resources(ray, device)
    most = int(ray.cluster_resources().get("GPU" if resources["num_gpus"] else "CPU", 1))
    return resources | {"compute": ray.data.ActorPoolStrategy(min_size=1, max_size=most)}


def _resources(ray: Any, device: str | None) -> dict[str, int]:
    """Return what one worker needs: a processor, and a GPU if the cluster has one and the model may use it."""
    may_use_gpu = device is None or device.startswith("cuda")
    return {"num_cpus": 1, "num_gpus": int(may_use_gpu and ray.cluster_resources().get("GPU", 0) >= 1)}
