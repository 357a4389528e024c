# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""lm-eval tasks as columns of a study, through the transformers class of ``minigpt.hf``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import minigpt
from minigpt import hf
from minigpt.errors import ConfigError


def check_tasks(tasks: Sequence[str]) -> None:
    """Check that lm-eval is installed and knows the tasks. A task is a name, or the path of a YAML file.

    Raises:
        ConfigError: if lm-eval is not installed, or has no such task.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ConfigError(f"tasks need lm-eval: {error.name} is not installed; pip install 'lm-eval[hf]'") from error
    known = TaskManager().all_tasks
    if unknown := [task for task in tasks if not Path(task).is_file() and task not in known]:
        raise ConfigError(f"lm-eval has no task {unknown[0]!r}")


def task_scores(tasks: Sequence[str], folder: Path, norm: str, sites: str) -> dict[str, float]:
    """Return the scores of a saved model by task and metric, e.g. {"lambada_openai acc": 0.41}."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    named: dict[str, Any] = {} if norm in minigpt.norms.available() else {"norm": {sites: norm}}
    model = hf.GPT2LMHeadModel.from_pretrained(folder, **named).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    judged = HFLM(pretrained=model, tokenizer=tokenizer, max_length=model.config.n_positions)
    found: Any = lm_eval.simple_evaluate(model=judged, tasks=list(tasks), bootstrap_iters=0, log_samples=False)
    return {
        f"{task} {metric.partition(',')[0]}": float(value)
        for task, scores in found["results"].items()
        for metric, value in scores.items()
        if isinstance(value, float) and "stderr" not in metric
    }
