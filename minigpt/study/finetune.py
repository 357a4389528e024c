"""Train a checkpoint further while norms are swapped in on a schedule. The loop is transformers' Trainer."""

import copy
import dataclasses
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

import minigpt
from minigpt import hf
from minigpt.checkpoint.frozen_norms import can_save_frozen, save_frozen
from minigpt.checkpoint.locate import locate
from minigpt.checkpoint.pretrained import norm_parameters
from minigpt.engine import GPT2
from minigpt.errors import ConfigError, NormError
from minigpt.study.fingerprint import contents
from minigpt.study.schedule import Schedule, parse_schedule, site_of
from minigpt.study.texts import blocks, require_text
from minigpt.study.turns import Turn, Turns
from minigpt.swap.fit import rows_of_text

SETTINGS, CURVE = "settings.json", "finetune.json"

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
    residual_loss: float = 0.0
    lora: int | None = None
    seed: int = 0
    learning_rate: float = 1e-4
    batch_size: int = 8
    block_size: int | None = None
    save_steps: int | None = None
    eval_steps: int | None = None
    device: str | None = None
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Finetuned:
    """A trained model and how its loss went.

    Attributes:
        model: in eval mode, with the new norms at their sites.
        losses, eval_losses: (step, loss in nats a token).
        swaps: the step before which each site was swapped.
        seconds: of the last run; a resumed run does not know those before it.
    """

    model: GPT2
    losses: list[tuple[int, float]]
    eval_losses: list[tuple[int, float]]
    swaps: dict[str, int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return all but the model as JSON's own types."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "model"}


def finetune(settings: FinetuneSettings, out: str | Path, progress: Say = lambda *_: None) -> Finetuned:
    """Train, and keep Trainer's checkpoints under ``out``/checkpoints. Started again, it goes on from the newest.

    A resumed run ends with the same weights as an undisturbed one.

    Raises:
        ConfigError: if a setting cannot be used, or ``out`` holds a run with other settings.
        NormError: if the norm is unknown, or the schedule does not fit the model.
        CheckpointError: if the model cannot be read.
        GenerationError: if a text cannot be read.
    """
    require_trainable(settings)
    schedule = checked_schedule(settings)
    from transformers import PrinterCallback, set_seed

    from minigpt.study import training

    checkpoints = Path(out) / "checkpoints"
    _require_same_settings(settings, checkpoints)
    tokenizer = minigpt.Tokenizer.from_pretrained(settings.model)
    set_seed(settings.seed)
    model = load(settings.model)
    context, end = model.config.n_positions, tokenizer.encode("<|endoftext|>")
    train = blocks(settings.text, tokenizer, settings.block_size or context)
    held = blocks(settings.eval_text, tokenizer, settings.block_size or context) if settings.eval_text else None
    end_of_text = end[0] if len(end) == 1 else None
    rows = rows_of_text(model.transformer, tokenizer, settings.fit) if settings.fit else None
    turns = Turns(model.transformer, settings.norm, schedule, end_of_text, rows)
    trained = _with_adapters(model, settings.lora) if settings.lora else model
    turns.split_attention(model.transformer)
    if settings.train == "norms":
        sites = tuple(f"transformer.{site}." for site in model.transformer.norm_sites())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(sites))
    trainer = training.SwapTrainer(
        model=trained,
        args=training.arguments(settings, checkpoints, held is not None, turns),
        train_dataset=train,
        eval_dataset=held,
        callbacks=[training.CallTurns(turns), training.Report(progress)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.end_of_text = end_of_text
    original = load(settings.model) if settings.distill else None
    trainer.aim(original, settings.residual_loss, model.transformer.ln_f)
    last = training.newest_checkpoint(checkpoints)
    if last is None:
        turns.call(0)  # so that the first evaluation sees what the first step will
    else:
        turns.call(int(last.name.rpartition("-")[2]) - 1, fits=False)
    result = trainer.train(resume_from_checkpoint=None if last is None else str(last))
    log = trainer.state.log_history
    trainer.accelerator.free_memory()  # gradients and the optimizer's state, before the model is loaded again
    trainer.optimizer = None
    trained.zero_grad()
    return Finetuned(
        as_minigpt(trained.merge_and_unload() if settings.lora else trained, settings.model),
        _by_step(log, "loss"),
        _by_step(log, "eval_loss"),  # a resumed run evaluates the step at which it resumes again
        {site: step for site, step in schedule.steps.items() if step <= settings.steps},
        result.metrics["train_runtime"],
    )


def require_trainable(settings: FinetuneSettings) -> None:
    """Check that training is possible here and the settings fit together.

    Raises:
        ConfigError: the message names the package or the setting.
        GenerationError: the message names a text that is missing.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("training needs accelerate, which is not installed; pip install 'minigpt[hf]'")
    if settings.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("lora needs peft, which is not installed; pip install 'minigpt[hf]'")
    for name in ("steps", "batch_size", "lora", "block_size", "save_steps", "eval_steps"):
        value = getattr(settings, name)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ConfigError(f"{name} must be a whole number of 1 or more, got {value!r}")
    for name in ("learning_rate", "residual_loss"):
        value = getattr(settings, name)
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be 0 or a positive number, got {value!r}")
    if not isinstance(settings.distill, bool):
        raise ConfigError(f"distill must be true or false, got {settings.distill!r}")
    if settings.train not in ("all", "norms"):
        raise ConfigError(f"train must be 'all' or 'norms', got {settings.train!r}")
    if settings.train == "norms" and settings.lora is not None:
        raise ConfigError("lora trains adapters and train='norms' the norms only; give one of the two")
    for name in ("schedule", "fit"):
        if getattr(settings, name) is not None and settings.norm is None:
            raise ConfigError(f"{name} needs a norm to swap in; give one with --norm")
    for source in filter(None, (settings.text, settings.eval_text)):
        require_text(source)
    if settings.lora is not None and settings.norm == "frozen":
        logging.getLogger("minigpt").warning(
            "adapters of rank %d may not recover what frozen norms cost; all weights recover more", settings.lora
        )


def checked_schedule(settings: FinetuneSettings) -> Schedule:
    """Return the schedule, after a trial on a model without values.

    Raises:
        NormError: if the norm cannot be built, or the schedule does not fit the model.
    """
    if settings.norm is None:
        return Schedule({})
    from minigpt.checkpoint import open_checkpoint

    config = open_checkpoint(locate(settings.model)).config
    with torch.device("meta"):
        sites = GPT2(config).norm_sites()
    minigpt.norms.build(settings.norm, config.n_embd, eps=config.layer_norm_epsilon)
    schedule = parse_schedule(settings.schedule, sites)
    steps = {turn: step for turn, step in schedule.steps.items() if fnmatchcase(site_of(turn), settings.sites)}
    if not steps:
        raise NormError(f"schedule: no stage swaps a site of {settings.sites!r}; leave the schedule out, or add one")
    halves = {turn: step for turn, step in steps.items() if turn != site_of(turn)} | schedule.merges
    if late := [name for name, step in halves.items() if step > settings.steps and name != "first"]:
        raise NormError(f"schedule: {late[0]} has its turn at step {halves[late[0]]}, after the last, {settings.steps}")
    return dataclasses.replace(schedule, steps=steps)


def load(source: str) -> Any:
    """Return the checkpoint as a transformers model in float32. Any family that ``from_pretrained`` reads will do."""
    ours = minigpt.from_pretrained(source, device="cpu", dtype="float32")
    import transformers

    model = hf.GPT2LMHeadModel(transformers.GPT2Config(**ours.config.to_dict()))
    model.loss_type = "ForCausalLM"  # transformers warns if it is not named
    own = {f"transformer.{name}": tensor for name, tensor in ours.state_dict().items() if name != "lm_head.weight"}
    own["lm_head.weight"] = ours.state_dict().get("lm_head.weight", ours.wte.weight)
    model.load_state_dict(own)
    model.tie_weights()
    return model


def as_minigpt(model: Any, source: str) -> GPT2:
    """Return a trained transformers model as minigpt's own, with the norms that it has now."""
    ours = minigpt.from_pretrained(source, device="cpu", dtype="float32")
    body = model.transformer
    norms = {site: copy.deepcopy(now(body.get_submodule(site))).cpu() for site in ours.norm_sites()}
    with torch.no_grad():
        trained = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
        for name, parameter in ours.named_parameters():
            if name not in norm_parameters(ours):
                parameter.copy_(trained[name])
    for site, norm in norms.items():
        ours.set_submodule(site, norm)
    return ours.eval()


def write(result: Finetuned, out: Path, source: str) -> None:
    """Write the model, its tokenizer, and finetune.json with the curves of its loss, into ``out``."""
    save_model(result.model, out, source)
    (out / CURVE).write_text(json.dumps(result.to_dict(), indent=2) + "\n")


def save_model(model: GPT2, out: Path, source: str) -> None:
    """Write a model and the tokenizer of ``source`` into ``out``; as a plain GPT-2 if its norms are all frozen."""
    save = save_frozen if can_save_frozen(model) else minigpt.save_pretrained
    save(model, out, minigpt.Tokenizer.from_pretrained(source))


def now(norm: nn.Module) -> nn.Module:
    """Return the norm that computes at a site."""
    return (norm.after if norm.turned else norm.before) if isinstance(norm, Turn) else norm


def _by_step(log: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    """Return the logged values of this name, one for each step."""
    return list({int(entry["step"]): entry[name] for entry in log if name in entry}.items())


def _with_adapters(model: Any, rank: int) -> Any:
    import peft

    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        ),
    )  # fmt: skip


def _require_same_settings(settings: FinetuneSettings, folder: Path) -> None:
    """Check that a run in ``folder`` was begun with these settings, on the same text, norm and weights."""
    file, fields = folder / SETTINGS, json.loads(json.dumps(dataclasses.asdict(settings)))
    fields["contents"] = contents(settings.model, (settings.norm,), (settings.text, settings.eval_text, settings.fit))
    if file.is_file():
        before = json.loads(file.read_text())
        way_out = "give the same settings to go on, or another --out"
        if other := [name for name in fields if name != "contents" and before.get(name) != fields[name]]:
            raise ConfigError(
                f"{folder} holds a run with {other[0]} {before.get(other[0])!r}, got {fields[other[0]]!r}; {way_out}"
            )
        known = before.get("contents", {})
        if other := [name for name, digest in fields["contents"].items() if known.get(name) != digest]:
            raise ConfigError(f"{folder} holds a run from before {other[0]} changed; undo that, or give another --out")
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(fields, indent=2))
    part.replace(file)
