"""How a model is trained, and what must fit together before hours are spent on it."""

import dataclasses
import functools
import importlib.util
import inspect
import math
import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import torch

from minigpt import norms
from minigpt.checkpoint import open_checkpoint
from minigpt.errors import ConfigError, GenerationError, MiniGPTError, NormError
from minigpt.files import hash_file
from minigpt.model import GPT2
from minigpt.norms import is_registered
from minigpt.recipe import Recipe
from minigpt.study.schedule import Schedule, parse_schedule, site_of
from minigpt.swap import match_sites
from minigpt.swap.sites import KEEP

LEAST = {"steps": 1, "batch_size": 1, "block_size": 2, "save_steps": 1, "eval_steps": 1, "lora": 1,
         "learning_rate": 0, "residual_loss": 0}  # fmt: skip
DATASET = re.compile(r"[\w.-]+/[\w-]+(:[\w.-]+)?")  # owner/name, or owner/name:split


class DivergedError(MiniGPTError):
    """The loss or a weight is not finite: more steps of the same training cannot mend it."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What a model is trained on, how, and for how long.

    Attributes:
        text, eval_text: a text file, a .jsonl file with a "text" in each line, or the name of a Hugging Face dataset.
        schedule: when each site gets the recipe's norm, as ``parse_schedule`` takes it; None swaps all before step 0.
        distill: train towards the original's distribution (KL divergence, temperature 1) in place of the text.
        train: "all", or "norms" to train the Parameters of the norm sites only.
        residual_loss: weight of a loss that evens out the deviations of the residual stream (``training.unevenness``).
        lora: rank of the adapters that are trained in place of the model's weights, or None.
        block_size: tokens in a row to train on; None is the model's context.
        save_steps, eval_steps: steps between checkpoints, and between held-out losses; None is ten times in all.
        training: further fields of ``transformers.TrainingArguments``, as gradient_accumulation_steps or bf16.
    """

    text: str
    steps: int
    schedule: str | None = None
    eval_text: str | None = None
    distill: bool = False
    train: str = "all"
    residual_loss: float | int = 0.0
    lora: int | None = None
    learning_rate: float | int = 1e-4
    batch_size: int = 8
    block_size: int | None = None
    save_steps: int | None = None
    eval_steps: int | None = None
    training: dict[str, Any] = dataclasses.field(default_factory=dict)


def base_of(recipe: Recipe) -> Recipe:
    """Return the recipe of the model as training begins: with its own norms, before the first swap.

    A checkpoint whose norms are code that is not registered keeps the recipe's norm, which names that code.
    """
    if recipe.norm is None or _names_code(recipe):
        return dataclasses.replace(recipe, fit=None)
    return dataclasses.replace(recipe, norm=None, sites="*", keep=KEEP, fit=None)


def checked_schedule(recipe: Recipe, training: Training) -> Schedule:
    """Return the schedule, after a check that training is possible here and that recipe and training fit together.

    Raises:
        ConfigError: the message names the package or the setting.
        NormError: if the norm cannot be built, or the schedule does not fit the model.
        GenerationError: the message names a text that is missing.
    """
    for package in ("accelerate", *(("peft",) if training.lora else ())):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"training needs {package}, which is not installed; pip install 'minigpt[hf]'")
    check_types(training)
    for name, least in LEAST.items():
        if (value := getattr(training, name)) is not None and not least <= value < math.inf:
            raise ConfigError(f"must be {least} or more, got {value}", argument=name)
    if training.train not in ("all", "norms"):
        raise ConfigError(f"must be 'all' or 'norms', got {training.train!r}", argument="train")
    if training.train == "norms" and training.lora is not None:
        raise ConfigError("trains adapters and train='norms' the norms only; give one of the two", argument="lora")
    if recipe.quantize is not None:
        raise ConfigError("makes weights that cannot be trained", argument="quantize")
    for text in filter(None, (training.text, training.eval_text)):
        if not Path(text).is_file() and not DATASET.fullmatch(text):
            raise GenerationError(f"{text} is not a file, and not the owner/name of a Hugging Face dataset")
    if recipe.norm is None or _names_code(recipe):
        if training.schedule is not None:
            raise ConfigError("needs a norm to swap in, other than the model's own", argument="schedule")
        return Schedule({})
    if not isinstance(recipe.norm, str | type):
        raise ConfigError("must be one norm, to be swapped in at its turn", argument="norm")
    return _schedule(recipe, training)


def _schedule(recipe: Recipe, training: Training) -> Schedule:
    shape = shape_of(recipe)
    schedule, sites = parse_schedule(training.schedule, shape.norm_sites()), match_sites(shape, recipe.sites)
    steps = {turn: step for turn, step in schedule.steps.items() if site_of(turn) in sites}
    if not steps:
        raise NormError(
            f"has no stage for a site of {', '.join(recipe.sites)}; leave it out, or add one", argument="schedule"
        )
    halves = {turn: step for turn, step in steps.items() if turn != site_of(turn)} | schedule.merges
    if late := [name for name, step in halves.items() if step > training.steps and name != "first"]:
        raise NormError(
            f"has the turn of {late[0]} at step {halves[late[0]]}, after the last, {training.steps}",
            argument="schedule",
        )
    return dataclasses.replace(schedule, steps=steps)


def what_decides(training: Training) -> list[Any]:
    """Return the settings of a training and the digests of its texts, for a fingerprint. A dataset has no digest."""
    files = [text for text in (training.text, training.eval_text) if text and Path(text).is_file()]
    return [dataclasses.asdict(training), [hash_file(file) for file in files]]


def check_types(settings: Any) -> None:
    """Check the values of a dataclass against its annotations.

    Raises:
        ConfigError: the message names the field.
    """
    for field in dataclasses.fields(settings):
        if not _fits(value := getattr(settings, field.name), field.type):
            kind = inspect.formatannotation(field.type)
            raise ConfigError(f"must be of type {kind}, got {value!r:.100}", argument=field.name)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is int and isinstance(value, bool):
        return False
    return isinstance(value, get_origin(kind) or kind)


def shape_of(recipe: Recipe) -> GPT2:
    """Return the recipe's model without values, after a trial of its norm.

    Raises:
        CheckpointError: if the model cannot be read.
        NormError: if the norm cannot be built.
    """
    model = _shape(recipe.place())
    for _, norm in recipe.pairs():
        norms.build(norm, model.config.n_embd, eps=model.config.layer_norm_epsilon, keep=recipe.keep)
    return model


@functools.cache
def _shape(place: Path) -> GPT2:
    with torch.device("meta"):
        return GPT2(open_checkpoint(place).config)


def _names_code(recipe: Recipe) -> bool:
    """Return True if a norm of the checkpoint is code, which the recipe must name for the model to be opened."""
    return not all(is_registered(norm) for _, norm in open_checkpoint(recipe.place()).norms)
