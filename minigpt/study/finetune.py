"""Train a checkpoint further while norms are swapped in on a schedule. The loop is transformers' Trainer."""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import torch

import minigpt
from minigpt import hf
from minigpt.checkpoint import locate, open_checkpoint
from minigpt.checkpoint.frozen_norms import can_save_frozen, save_frozen
from minigpt.checkpoint.pretrained import norm_parameters
from minigpt.errors import ConfigError, NormError
from minigpt.model import GPT2
from minigpt.study.fingerprint import contents, fingerprint
from minigpt.study.schedule import Schedule, parse_schedule, site_of
from minigpt.study.texts import blocks, require_text
from minigpt.study.turns import Turn, Turns
from minigpt.swap.fit import rows_of_text

CURVE = "finetune.json"
LEAST = {"steps": 1, "batch_size": 1, "block_size": 1, "save_steps": 1, "eval_steps": 1, "lora": 1, "seed": 0,
         "learning_rate": 0, "residual_loss": 0}  # fmt: skip

Say = Callable[[str, float], None]  # what goes on, and the part that is done


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """What to train, on what, and for how long.

    Attributes:
        model: as ``minigpt.from_pretrained`` takes it.
        norm: a norm's name, or "package.module:Name" or "path/to/file.py:Name"; None trains the norms as they are.
        schedule: as ``parse_schedule`` takes it.
        sites: a pattern; only the sites that match it are swapped.
        fit: a text that the new norms' Parameters are fitted on at their turn (``minigpt.fit_norms``), or None.
        text, eval_text: a text file, a .jsonl file with a "text" in each line, or the name of a Hugging Face dataset.
        distill: train towards the original's distribution (KL divergence, temperature 1) in place of the text.
        train: "all", or "norms" to train the Parameters of the norm sites only.
        residual_loss: weight of a loss that evens out the deviations of the residual stream (``training.unevenness``).
        lora: rank of the adapters that are trained in place of the model's weights, or None.
        block_size: tokens in a row; None is the model's context.
        save_steps, eval_steps: steps between checkpoints, and between held-out losses; None is ten times in all.
        training: further fields of ``transformers.TrainingArguments``, as gradient_accumulation_steps or bf16.
    """

    text: str
    steps: int
    model: str = "demo"
    norm: str | None = None
    schedule: str | None = None
    sites: str = "*"
    fit: str | None = None
    eval_text: str | None = None
    distill: bool = False
    train: str = "all"
    residual_loss: float | int = 0.0
    lora: int | None = None
    seed: int = 0
    learning_rate: float | int = 1e-4
    batch_size: int = 8
    block_size: int | None = None
    save_steps: int | None = None
    eval_steps: int | None = None
    device: str | None = None
    training: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Finetuned:
    """A trained model and how its loss went.

    Attributes:
        model: in eval mode, with the new norms at their sites.
        losses, eval_losses: (step, loss in nats a token).
        swaps: the step before which each site was swapped.
    """

    model: GPT2
    losses: list[tuple[int, float]]
    eval_losses: list[tuple[int, float]]
    swaps: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return all but the model as JSON's own types."""
        return {name: value for name, value in vars(self).items() if name != "model"}


def finetune(settings: FinetuneSettings, out: str | Path, progress: Say = lambda *_: None) -> Finetuned:
    """Train, and keep Trainer's checkpoints under ``out``/checkpoints. Started again, it goes on from the newest.

    A resumed run ends with the same weights as an undisturbed one. With other settings, or on other texts, another norm
    or other weights, it begins at step 0.

    Raises:
        ConfigError: if a setting cannot be used.
        NormError: if the norm is unknown, or the schedule does not fit the model.
        CheckpointError: if the model cannot be read.
        GenerationError: if a text cannot be read.
    """
    schedule = checked_schedule(settings)
    from transformers import set_seed

    from minigpt.study import training

    checkpoints = checkpoints_of(settings, Path(out))
    tokenizer = minigpt.Tokenizer.from_pretrained(settings.model)
    set_seed(settings.seed)
    model = load(settings.model)
    end = tokenizer.encode("<|endoftext|>")
    end_of_text = end[0] if len(end) == 1 else None
    train, held = (
        blocks(text, tokenizer, settings.block_size or model.config.n_positions) if text else None
        for text in (settings.text, settings.eval_text)
    )
    rows = rows_of_text(model.transformer, tokenizer, settings.fit) if settings.fit else None
    turns = Turns(model.transformer, settings.norm, schedule, end_of_text, rows)
    trained = _with_adapters(model, settings.lora) if settings.lora else model
    turns.split_attention(model.transformer)
    if settings.train == "norms":
        sites = tuple(f"transformer.{site}." for site in model.transformer.norm_sites())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(sites))
    trainer = training.SwapTrainer(
        settings,
        model.transformer.ln_f,
        end_of_text,
        model=trained,
        args=training.arguments(settings, checkpoints),
        train_dataset=train,
        eval_dataset=held,
        callbacks=[training.EachStep(turns, progress)],
    )
    step = training.resumable_step(checkpoints, settings.steps)
    if step is None:
        turns.call(0)  # so that the first evaluation sees what the first step will
    else:
        turns.call(step - 1, fits=False)
    trainer.train(resume_from_checkpoint=None if step is None else str(checkpoints / f"checkpoint-{step}"))
    log = trainer.state.log_history
    trainer.accelerator.free_memory()  # gradients and the optimizer's state, before the model is loaded again
    trainer.optimizer = None
    trained.zero_grad()
    return Finetuned(
        as_minigpt(trained.merge_and_unload() if settings.lora else trained, settings.model),
        _by_step(log, "loss"),
        _by_step(log, "eval_loss"),  # a resumed run evaluates the step at which it resumes again
        {site: step for site, step in schedule.steps.items() if step <= settings.steps},
    )


def checkpoints_of(settings: FinetuneSettings, out: Path) -> Path:
    """Return the folder of a run's checkpoints, which is named after all that decides the result."""
    decides = contents(settings.model, (settings.norm,), (settings.text, settings.eval_text, settings.fit))
    return out / "checkpoints" / fingerprint(dataclasses.asdict(settings) | decides)


def checked_schedule(settings: FinetuneSettings) -> Schedule:
    """Return the schedule, after a check that training is possible here and the settings fit together and the model.

    Raises:
        ConfigError: the message names the package or the setting.
        NormError: if the norm cannot be built, or the schedule does not fit the model.
        GenerationError: the message names a text that is missing.
    """
    for package in ("accelerate", *(("peft",) if settings.lora else ())):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"training needs {package}, which is not installed; pip install 'minigpt[hf]'")
    check_types(settings)
    for name, least in LEAST.items():
        if (value := getattr(settings, name)) is not None and not least <= value < math.inf:
            raise ConfigError(f"{name} must be {least} or more, got {value}")
    if settings.train not in ("all", "norms"):
        raise ConfigError(f"train must be 'all' or 'norms', got {settings.train!r}")
    if settings.train == "norms" and settings.lora is not None:
        raise ConfigError("lora trains adapters and train='norms' the norms only; give one of the two")
    for name in ("schedule", "fit"):
        if getattr(settings, name) is not None and settings.norm is None:
            raise ConfigError(f"{name} needs a norm to swap in; give one with --norm")
    for source in filter(None, (settings.text, settings.eval_text)):
        require_text(source)
    if settings.norm is None:
        return Schedule({})
    schedule = parse_schedule(settings.schedule, shape_of(settings.model, settings.norm).norm_sites())
    steps = {turn: step for turn, step in schedule.steps.items() if fnmatchcase(site_of(turn), settings.sites)}
    if not steps:
        raise NormError(f"schedule: no stage swaps a site of {settings.sites!r}; leave the schedule out, or add one")
    halves = {turn: step for turn, step in steps.items() if turn != site_of(turn)} | schedule.merges
    if late := [name for name, step in halves.items() if step > settings.steps and name != "first"]:
        raise NormError(f"schedule: {late[0]} has its turn at step {halves[late[0]]}, after the last, {settings.steps}")
    return dataclasses.replace(schedule, steps=steps)


def check_types(settings: Any) -> None:
    """Check the values of a dataclass against its annotations.

    Raises:
        ConfigError: the message names the field.
    """
    for field in dataclasses.fields(settings):
        if not _fits(value := getattr(settings, field.name), field.type):
            kind = inspect.formatannotation(field.type)
            raise ConfigError(f"{field.name} must be of type {kind}, got {value!r:.100}")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, get_args(kind)[0]) for one in value)
    return isinstance(value, get_origin(kind) or kind)


@functools.cache
def shape_of(source: str, norm: str) -> GPT2:
    """Return a checkpoint's model without values, after a trial of a norm.

    Raises:
        CheckpointError: if the model cannot be read.
        NormError: if the norm cannot be built.
    """
    config = open_checkpoint(locate(source)).config
    minigpt.norms.build(norm, config.n_embd, eps=config.layer_norm_epsilon)
    with torch.device("meta"):
        return GPT2(config)


def load(source: str) -> Any:
    """Return the checkpoint as a transformers model in float32. Any family that ``from_pretrained`` reads will do."""
    ours = minigpt.from_pretrained(source, device="cpu", dtype="float32")
    import transformers

    model = hf.GPT2LMHeadModel(transformers.GPT2Config(**ours.config.to_dict()))
    model.loss_type = "ForCausalLM"  # transformers warns if it is not named
    tensors = ours.state_dict()
    model.lm_head.load_state_dict({"weight": tensors.pop("lm_head.weight", ours.wte.weight)})
    model.transformer.load_state_dict(tensors)
    return model


def as_minigpt(model: Any, source: str) -> GPT2:
    """Return a trained transformers model as minigpt's own, with the norms that it has now."""
    ours = minigpt.from_pretrained(source, device="cpu", dtype="float32")
    with torch.no_grad():
        trained = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
        for name, parameter in ours.named_parameters():
            if name not in norm_parameters(ours):
                parameter.copy_(trained[name])
    for site in ours.norm_sites():
        norm = model.transformer.get_submodule(site)
        ours.set_submodule(site, copy.deepcopy(norm.present if isinstance(norm, Turn) else norm).cpu())
    return ours.eval()


def write(result: Finetuned, out: Path, source: str) -> None:
    """Write the model, its tokenizer, and finetune.json with the curves of its loss, into ``out``."""
    save_model(result.model, out, source)
    (out / CURVE).write_text(json.dumps(result.to_dict(), indent=2) + "\n")


def save_model(model: GPT2, out: Path, source: str) -> None:
    """Write a model and the tokenizer of ``source`` into ``out``; as a plain GPT-2 if its norms are all frozen."""
    save = save_frozen if can_save_frozen(model) else minigpt.save_pretrained
    save(model, out, minigpt.Tokenizer.from_pretrained(source))


def _by_step(log: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    """Return the logged values of this name, one for each step."""
    return list({int(entry["step"]): entry[name] for entry in log if name in entry}.items())


def _with_adapters(model: Any, rank: int) -> Any:
    import peft

    layers = ["c_attn", "c_proj", "c_fc"]
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=layers, fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)
