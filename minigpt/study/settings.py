"""The settings of a training, and the checks before hours are spent on them."""

import dataclasses
import importlib.util
import inspect
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from minigpt import norms
from minigpt.checkpoint import Files, read_checkpoint, read_stable
from minigpt.checkpoint.norms import Pairs, norms_in_config
from minigpt.choices import KEEP, check_option
from minigpt.errors import ConfigError, GenerationError, MiniGPTError, NormError, to_install
from minigpt.files import hash_file
from minigpt.judge.checkpoint_facts import read_facts
from minigpt.norms import is_registered
from minigpt.norms.foreign.locate import locate
from minigpt.norms.frozen import FrozenLayerNorm, needs_text
from minigpt.recipe import Recipe
from minigpt.study.schedule import MERGE, Schedule, parse_schedule
from minigpt.swap.sites import matching

OWN_NORMS, LAYER_NORM = "own", "fused"  # names of a model's own norms in a study, the second if they are LayerNorm
TRIAL_WIDTH = 64  # of a norm that is built to ask it something
LEAST = {
    "steps": 1, "batch_size": 1, "save_steps": 1, "eval_steps": 1, "lora": 1, "block_size": 2, "learning_rate": 0,
    "residual_loss": 0,
}  # fmt: skip
DATASET = re.compile(r"[\w.-]+/[\w-]+(:[\w.-]+)?")  # owner/name, or owner/name:split


class DivergedError(MiniGPTError):
    """The loss or a weight is not finite: more steps of the same training cannot mend it."""


@dataclass(frozen=True)
class Training:
    """The training of a model: its texts, its method and its steps.

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
    training: dict[str, Any] = field(default_factory=dict, hash=False)

    def texts(self) -> list[str]:
        """Return the names of the texts: the one to train on, and the held-out one if there is one."""
        if self.eval_text:
            return [self.text, self.eval_text]
        return [self.text]


def training_fingerprint(training: Training) -> list[Any]:
    """Return the settings of a training and the digests of its texts, for a fingerprint. A dataset has no digest."""
    digests = []
    for text in training.texts():
        if Path(text).is_file():
            digests.append(hash_file(text))
    return [dataclasses.asdict(training), digests]


def base_of(recipe: Recipe) -> Recipe:
    """Return the recipe of the model as training begins: with its own norms, before the first swap.

    A checkpoint whose norms are code that is not registered keeps the recipe's norm, which names that code.
    """
    if not swaps_norms(recipe):
        return dataclasses.replace(recipe, fit=None)
    return dataclasses.replace(recipe, norm=None, sites="*", keep=KEEP, fit=None)


def checked_schedule(recipe: Recipe, training: Training) -> Schedule:
    """Return the schedule, after a check that training is possible here and that recipe and training fit together.

    Raises:
        ConfigError: the message names the package or the setting.
        NormError: if the norm cannot be built, or the schedule does not fit the model.
        GenerationError: the message names a text that is missing.
    """
    _check_values(training)
    recipe.check_fit()
    for text in training.texts():
        if not Path(text).is_file() and not DATASET.fullmatch(text):
            raise GenerationError(f"{text} is not a file, and not the owner/name of a Hugging Face dataset")
    _check_packages(training)
    _check_model(recipe)
    if swaps_norms(recipe):
        return _schedule_of_swap(recipe, training)
    if training.schedule is not None:
        raise ConfigError("needs a norm to swap in, other than the model's own", argument="schedule")
    return Schedule({})


def _check_packages(training: Training) -> None:
    needed = ["accelerate"]
    if training.lora:
        needed.append("peft")
    if not all(Path(text).is_file() for text in training.texts()):
        needed.append("datasets")
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"training needs {package}, which is not installed; {to_install('hf')}")


def _check_values(training: Training) -> None:
    """Check the type and the range of every setting, and that the settings do not contradict each other."""
    check_types(training)
    for name, least in LEAST.items():
        value = getattr(training, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"must be {least} or more, got {value}", argument=name)
    check_option("train", training.train, ("all", "norms"))
    if training.train == "norms" and training.lora is not None:
        raise ConfigError("trains adapters and train='norms' the norms only; give one of the two", argument="lora")


def _check_model(recipe: Recipe) -> None:
    """Check that the model is a GPT-2 whose weights can be trained."""
    architecture = Files.at(recipe.place()).architecture
    if architecture is not None:
        raise ConfigError(
            f"must be a GPT-2, and {recipe.source} is a {architecture}; train it with transformers, then judge it",
            argument="model",
        )
    if recipe.quantize is not None:
        raise ConfigError("makes weights that cannot be trained", argument="quantize")


def _schedule_of_swap(recipe: Recipe, training: Training) -> Schedule:
    """Return the schedule of the recipe's sites, after a check that it swaps one of them in time."""
    facts, _ = read_facts(recipe.place())
    schedule = parse_schedule(training.schedule, facts.sites)
    chosen = chosen_sites(recipe)
    steps = {site: step for site, step in schedule.steps.items() if site in chosen}
    if not steps:
        raise NormError(
            f"has no stage for a site of {', '.join(recipe.sites)}; leave it out, or add one", argument="schedule"
        )
    for stage, step in [*steps.items(), (MERGE, schedule.merge or 0)]:
        if step > training.steps:
            raise NormError(f"has {stage} at step {step}, after the last, {training.steps}", argument="schedule")
    return dataclasses.replace(schedule, steps=steps)


def check_types(settings: Any) -> None:
    """Check the values of a dataclass against its annotations.

    Raises:
        ConfigError: the message names the field.
    """
    for setting in fields(settings):
        check_type(setting.name, getattr(settings, setting.name), setting.type)


def check_type(name: str, value: Any, kind: Any) -> None:
    """Check a value against the type of a field: a class, a union, or a list of one of these.

    Raises:
        ConfigError: the message names the field.
    """
    if get_origin(kind) is list and isinstance(value, list):
        (item_kind,) = get_args(kind)
        for item in value:
            check_type(name, item, item_kind)
        return
    classes = _classes_of(kind)
    is_stray_bool = isinstance(value, bool) and bool not in classes  # a bool is an int to Python
    if is_stray_bool or not isinstance(value, classes):
        raise ConfigError(f"must be of type {inspect.formatannotation(kind)}, got {value!r:.100}", argument=name)


def _classes_of(kind: Any) -> tuple[type, ...]:
    """Return the classes of a type or of a union's members, as ``isinstance`` takes them."""
    members = (kind,)
    if isinstance(kind, UnionType):
        members = get_args(kind)
    classes = []
    for member in members:
        classes.append(get_origin(member) or member)
    return tuple(classes)


def chosen_sites(recipe: Recipe) -> set[str]:
    """Return the recipe's sites, after a trial of its norm.

    Raises:
        CheckpointError: if the model cannot be read.
        NormError: if the norm cannot be built, or a pattern matches no site.
    """
    facts, _ = read_facts(recipe.place())
    for _, norm in recipe.pairs():
        norms.build(norm, facts.shape.n_embd, keep=recipe.keep)
    sites = set[str]()
    for pattern in recipe.sites:
        sites.update(matching(pattern, facts.sites))
    return sites


def takes_text(norm: str) -> bool:
    """Return whether a norm takes constants from a text before it can run. One that cannot be built does not."""
    try:
        factory = locate(norm)
        cls = getattr(factory, "func", factory)
        if not (isinstance(cls, type) and issubclass(cls, FrozenLayerNorm)):
            return False
        return needs_text(norms.build(norm, TRIAL_WIDTH))
    except NormError:  # the check of all cells says why
        return False


def own_norms(recipe: Recipe) -> Pairs:
    """Return the norms that the checkpoint's config.json names, by patterns of sites. Its weights are not read."""
    files = Files.at(recipe.place())
    if files.architecture is not None:
        return []
    if files.config is None:  # a trainer's file carries its config
        return read_stable(files.place, read_checkpoint).norms
    return norms_in_config(files.config)


def name_of_own(recipe: Recipe) -> str:
    """Return the name of the model's own norms in a study: LAYER_NORM in a GPT-2 that has no other, else OWN_NORMS."""
    is_gpt2 = Files.at(recipe.place()).architecture is None
    if is_gpt2 and not own_norms(recipe):
        return LAYER_NORM
    return OWN_NORMS


def swaps_norms(recipe: Recipe) -> bool:
    """Return True if the recipe's norm replaces the model's own.

    If config.json names code that is not registered, the recipe's norm is that code, and the model's own.
    """
    if recipe.norm is None:
        return False
    return all(is_registered(norm) for _, norm in own_norms(recipe))
