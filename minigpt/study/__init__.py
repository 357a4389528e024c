"""What a norm costs after the model has adapted to it: training with swaps on a schedule, and tables of many cells."""

from typing import TYPE_CHECKING, Any

from minigpt.study.run import run_study
from minigpt.study.schedule import Schedule, parse_schedule
from minigpt.study.study import Cell, DivergedError, Study, Training, read_study

if TYPE_CHECKING:
    from minigpt.study.training import Finetuned, finetune

__all__ = [
    "Cell", "DivergedError", "Finetuned", "Schedule", "Study", "Training", "finetune", "parse_schedule", "read_study",
    "run_study",
]  # fmt: skip


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what trains when it is first used: transformers' Trainer takes seconds."""
        if name not in ("Finetuned", "finetune"):
            raise AttributeError(f"module 'minigpt.study' has no attribute {name!r}")
        from minigpt.study import training

        return getattr(training, name)
