# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Cells of a study and the windows of a corpus on a Ray cluster.

Ray places the work, and retries it when a machine is lost. Every worker loads the model once. Files that a model or a
norm is read from must be readable under the same path on every machine.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minigpt
from minigpt.checkpoint import open_checkpoint
from minigpt.errors import ConfigError
from minigpt.judge.measures import perplexity_of
from minigpt.judge.perplexity import require_predictable, window_loss, windows_of

if TYPE_CHECKING:
    from minigpt.study.study import Cell, Study

LOCAL = "local"  # the address of a cluster that is started on this machine for the run
RETRIES = 3  # of work on a machine that was lost
WINDOWS = 8  # that a worker reads at a time


def connect(address: str) -> Any:
    """Connect to a Ray cluster, or start one on this machine; return the module ``ray``.

    Raises:
        ConfigError: if Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
        import ray.util
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'minigpt[ray]'") from error
    if not ray.is_initialized():
        where: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {"address": address}
        try:
            ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"cannot connect to a Ray cluster at {address}: {error}") from error
    return ray


def cells_on_ray(
    address: str, study: "Study", todo: Mapping[str, "Cell"], out: Path, file: Path | None
) -> Iterator[dict[str, Any]]:
    """Run each cell as a Ray task, and yield its row when it is finished."""
    from minigpt.study.study import run_cell

    ray = connect(address)
    task = ray.remote(run_cell).options(**_resources(ray, study.device), max_retries=RETRIES)
    shared = out.resolve()  # tasks have another working directory
    waiting = [task.remote(study, cell, print_, shared, file) for print_, cell in todo.items()]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        yield ray.get(done)


class Worker:
    """A process that loads the model once, and does a part of the work at each call."""

    def __init__(self, source: str | Path, how: Mapping[str, Any]) -> None:
        self.model = minigpt.from_pretrained(source, **how)
        self.tokenizer = minigpt.Tokenizer.from_pretrained(source)

    def do(self, work: Callable[..., Any], part: list[Any]) -> Any:
        return work(self.model, self.tokenizer, part)


def spread(
    address: str,
    source: str | Path,
    how: Mapping[str, Any],
    work: Callable[..., list[Any]],
    items: list[Any],
    size: int,
) -> Iterator[Any]:
    """Give workers ``size`` items at a time, and yield the results as they are finished.

    Args:
        source, how: what every worker passes to ``minigpt.from_pretrained``.
        work: a function of the model, the tokenizer and some items.
    """
    ray = connect(address)
    resources, parts = _resources(ray, how.get("device")), [items[i : i + size] for i in range(0, len(items), size)]
    room = int(ray.cluster_resources().get("GPU" if resources["num_gpus"] else "CPU", 1))
    kind = ray.remote(Worker).options(**resources, max_restarts=-1, max_task_retries=RETRIES)
    pool = ray.util.ActorPool([kind.remote(source, dict(how)) for _ in range(min(room, len(parts)))])
    for results in pool.map_unordered(lambda worker, part: worker.do.remote(work, part), parts):
        yield from results


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
    windows = [(ids[start:end], start, first) for start, first, end in windows_of(len(ids), context)]
    losses = dict(spread(address, source, how, _losses, windows, WINDOWS))
    return perplexity_of(sum(losses[first] for _, _, first in windows), len(ids) - 1)  # in order, for the same sum


def _losses(
    model: minigpt.GPT2, _: minigpt.Tokenizer, windows: list[tuple[list[int], int, int]]
) -> list[tuple[int, float]]:
    return [(first, window_loss(model, ids, 0, first - start, len(ids))) for ids, start, first in windows]


def _resources(ray: Any, device: str | None) -> dict[str, int]:
    """Return what one worker needs: a processor, and a GPU if the cluster has one and the model may use it."""
    may_use_gpu = device is None or device.startswith("cuda")
    return {"num_cpus": 1, "num_gpus": int(may_use_gpu and ray.cluster_resources().get("GPU", 0) >= 1)}
