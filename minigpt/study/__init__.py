"""What a norm costs after the model has adapted to it: training with swaps on a schedule, and tables of many cells."""

from minigpt.study.finetune import Finetuned, FinetuneSettings, finetune
from minigpt.study.schedule import Schedule, parse_schedule
from minigpt.study.study import Study, read_study, run_study

__all__ = [
    "FinetuneSettings",
    "Finetuned",
    "Schedule",
    "Study",
    "finetune",
    "parse_schedule",
    "read_study",
    "run_study",
]
