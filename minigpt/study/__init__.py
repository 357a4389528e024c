"""What a norm costs after the model has adapted to it: training with swaps on a schedule, and tables of many cells."""

from minigpt.study.finetune import Finetuned, FinetuneSettings, finetune
from minigpt.study.schedule import Schedule, parse_schedule

__all__ = [
    "FinetuneSettings",
    "Finetuned",
    "Schedule",
    "finetune",
    "parse_schedule",
]
