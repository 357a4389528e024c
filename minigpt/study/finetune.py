"""Train a checkpoint further while norms are swapped in on a schedule. The loop is transformers' Trainer."""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

import minigpt
from minigpt import hf
from minigpt.checkpoint.locate import locate
from minigpt.checkpoint.pretrained import norm_parameters
from minigpt.engine import GPT2
from minigpt.errors import ConfigError
from minigpt.placement import resolve_device
from minigpt.study.schedule import Schedule, parse_schedule
from minigpt.study.texts import blocks
from minigpt.study.turns import CallTurns, Turn, install_turns

WEIGHTS = "model.safetensors"
SETTINGS = "settings.json"

Say = Callable[[str, float], None]  # what goes on, and the part that is done


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """What to train, on what, and for how long.

    Attributes:
        model: as ``minigpt.from_pretrained`` takes it.
        norm: a norm's name, or "package.module:Name" or "path/to/file.py:Name"; None trains the norms as they are.
        schedule: as ``parse_schedule`` takes it.
        sites: a pattern; only the sites that match it are swapped.
        text, eval_text: a text file, a .jsonl file with a "text" in each line, or the name of a Hugging Face dataset.
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
    eval_text: str | None = None
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
    checkpoints = Path(out) / "checkpoints"
    _require_same_settings(settings, checkpoints)
    tokenizer = minigpt.Tokenizer.from_pretrained(settings.model)
    set_seed(settings.seed)
    model = load(settings.model)
    context = model.config.n_positions
    train = blocks(settings.text, tokenizer, settings.block_size or context)
    held = blocks(settings.eval_text, tokenizer, settings.block_size or context) if settings.eval_text else None
    turns = install_turns(model.transformer, settings.norm, schedule)
    calls = CallTurns(turns, schedule)
    trained = _with_adapters(model, settings.lora) if settings.lora else model
    trainer = PlainTrainer(
        model=trained,
        args=_arguments(settings, checkpoints, held is not None, turns),
        train_dataset=train,
        eval_dataset=held,
        callbacks=[calls, Report(progress)],
    )
    trainer.remove_callback(PrinterCallback)
    calls.call(0)  # so that a first evaluation sees what the first step will
    last = newest_checkpoint(checkpoints)
    if last is not None:
        calls.call(int(last.name.rpartition("-")[2]))
    result = trainer.train(resume_from_checkpoint=None if last is None else str(last))
    log = trainer.state.log_history
    return Finetuned(
        as_minigpt(trained.merge_and_unload() if settings.lora else trained, settings.model),
        _by_step(log, "loss"),
        _by_step(log, "eval_loss"),  # a resumed run evaluates the step at which it resumes again
        {site: step for site, step in schedule.steps.items() if step <= settings.steps},
        result.metrics["train_runtime"],
    )


def require_trainable(settings: FinetuneSettings) -> None:
    """Check the numbers.

    Raises:
        ConfigError: the message names the setting.
    """
    for name in ("steps", "batch_size", "lora", "block_size", "save_steps", "eval_steps"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}")
    if not 0 < settings.learning_rate < float("inf"):
        raise ConfigError(f"learning_rate must be a positive number, got {settings.learning_rate}")
    if settings.schedule is not None and settings.norm is None:
        raise ConfigError("a schedule needs a norm to swap in; give one with --norm")


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
    steps = {site: step for site, step in schedule.steps.items() if fnmatchcase(site, settings.sites)}
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


def now(norm: nn.Module) -> nn.Module:
    """Return the norm that computes at a site."""
    return (norm.after if norm.turned else norm.before) if isinstance(norm, Turn) else norm


class PlainTrainer(Trainer):
    """Trainer whose checkpoints hold the state_dict as it is: norms in the middle of a schedule, and adapters."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        places: set[int] = set()
        for name, tensor in (state_dict or self.accelerator.unwrap_model(self.model).state_dict()).items():
            if tensor.data_ptr() not in places:
                tensors[name] = tensor.contiguous()
            places.add(tensor.data_ptr())
        save_file(tensors, folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        tensors = load_file(Path(resume_from_checkpoint) / WEIGHTS)
        self.accelerator.unwrap_model(model or self.model).load_state_dict(tensors, strict=False)


class Report(TrainerCallback):
    """Says the step and the losses."""

    def __init__(self, say: Say) -> None:
        self.say, self.losses = say, ""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        loss = {name: value for name, value in (logs or {}).items() if name in ("loss", "eval_loss")}
        for name, value in loss.items():
            self.losses = f"{'held-out loss' if name == 'eval_loss' else 'loss'} {float(value):.4f}"
            self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.say(f"step {state.global_step} of {state.max_steps} {self.losses}", state.global_step / state.max_steps)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that was written to its end. Its last file is trainer_state.json."""
    for place in sorted(folder.glob("checkpoint-*"), key=lambda place: -int(place.name.rpartition("-")[2])):
        try:
            json.loads((place / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return place
    return None


def _arguments(settings: FinetuneSettings, folder: Path, evaluates: bool, turns: dict[str, Turn]) -> TrainingArguments:
    often = max(1, settings.steps // 10)
    has_more = any({*turn.after.parameters()} - {*turn.before.parameters()} for turn in turns.values())
    fields: dict[str, Any] = {
        "max_steps": settings.steps,
        "learning_rate": settings.learning_rate,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "seed": settings.seed,
        "data_seed": settings.seed,
        "save_steps": settings.save_steps or often,
        "save_total_limit": 2,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": settings.eval_steps or often,
        "eval_on_start": evaluates,
        "prediction_loss_only": True,
        "logging_steps": often,
        "use_cpu": resolve_device(settings.device).type == "cpu",
        "disable_tqdm": True,
        "report_to": [],
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": has_more or None,
    }
    try:
        return TrainingArguments(output_dir=str(folder), **fields | dict(settings.training))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"transformers.TrainingArguments does not take these settings: {error}") from error


def _by_step(log: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    """Return the logged values of this name, one for each step."""
    return list({int(entry["step"]): entry[name] for entry in log if name in entry}.items())


def _with_adapters(model: Any, rank: int) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("lora needs peft: pip install 'minigpt[hf]'") from error
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        ),
    )  # fmt: skip


def _require_same_settings(settings: FinetuneSettings, folder: Path) -> None:
    file, fields = folder / SETTINGS, json.loads(json.dumps(dataclasses.asdict(settings)))
    if file.is_file():
        before = json.loads(file.read_text())
        if other := [name for name in fields if before.get(name) != fields[name]]:
            raise ConfigError(
                f"{folder} holds a run with {other[0]} {before.get(other[0])!r}, got {fields[other[0]]!r}; "
                "give the same settings to go on, or another --out"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(fields, indent=2))
    part.replace(file)
