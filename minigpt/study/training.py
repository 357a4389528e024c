"""The loop, which is transformers' Trainer, with what a swap needs of it."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from minigpt.errors import ConfigError
from minigpt.placement import resolve_device
from minigpt.study.finetune import FinetuneSettings, Say
from minigpt.study.turns import Turns

WEIGHTS = "model.safetensors"
RESIDUAL_EPS = 1e-5


class SwapTrainer(Trainer):
    """Trainer with the losses of a swap.

    Its checkpoints hold the state_dict as it is: norms in the middle of a schedule, and adapters.

    Attributes:
        original: the model whose distribution the trained one is drawn to (KL at temperature 1), or None for the text.
        residual_loss: the weight of ``unevenness``. A held-out loss is the text's in any case.
    """

    original: nn.Module | None = None
    residual_loss = 0.0
    stream: Tensor  # what the last norm read: the residual stream (B, T, C)
    end_of_text: int | None = None

    def aim(self, original: nn.Module | None, residual_loss: float, final_norm: nn.Module) -> None:
        """Train towards ``original``'s distribution, and with a share of the unevenness before ``final_norm``."""
        self.original, self.residual_loss = original, residual_loss
        if original is not None:
            original.to(self.args.device).eval().requires_grad_(False)
        if residual_loss:
            final_norm.register_forward_pre_hook(lambda _, inputs: setattr(self, "stream", inputs[0]))
        if original is not None or residual_loss:
            self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss in nats a token."""
        if not model.training or not (self.original or self.residual_loss):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ids = inputs["input_ids"]  # (B, T)
        if self.original is None:
            outputs = model(**inputs)
            loss = outputs.loss
        else:
            outputs = model(input_ids=ids)
            with torch.no_grad():
                wanted = self.original(input_ids=ids).logits.float().log_softmax(-1)  # (B, T, V)
            given = outputs.logits.float().log_softmax(-1)
            loss = F.kl_div(given, wanted, reduction="sum", log_target=True) / ids.numel()
        if self.residual_loss:
            loss = loss + self.residual_loss * unevenness(self.stream, ids, self.end_of_text)
        return (loss, outputs) if return_outputs else loss

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


def unevenness(stream: Tensor, ids: Tensor, end_of_text: int | None) -> Tensor:
    """Return the mean squared distance of each row's deviation from that of the usual rows.

    The auxiliary loss of arXiv 2507.02559, which makes the deviation that a frozen norm divides by fit more rows.

    Args:
        stream: the residual stream (B, T, C) before the last norm.
        ids: (B, T). A row is usual if it is not the first and its token is not end-of-text.
    """
    deviation = (stream.float().var(-1, correction=0) + RESIDUAL_EPS).sqrt()  # (B, T)
    usual = torch.ones_like(ids, dtype=torch.bool)
    usual[:, 0] = False
    if end_of_text is not None:
        usual &= ids != end_of_text
    return (deviation - deviation[usual].mean().detach()).square().mean()


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


class CallTurns(TrainerCallback):
    """Calls the turns before every step, and those of the last step at the end."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.call(state.global_step)

    on_train_end = on_step_begin


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that was written to its end. Its last file is trainer_state.json."""
    for place in sorted(folder.glob("checkpoint-*"), key=lambda place: -int(place.name.rpartition("-")[2])):
        try:
            json.loads((place / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return place
    return None


def arguments(
    settings: FinetuneSettings, folder: str | Path, evaluates: bool, turns: Turns | None = None
) -> TrainingArguments:
    """Return Trainer's arguments.

    Raises:
        ConfigError: if a field of ``settings.training`` is unknown or invalid.
    """
    often = max(1, settings.steps // 10)
    of_turns = [] if turns is None else turns.of.values()
    has_more = any({*turn.after.parameters()} - {*turn.before.parameters()} for turn in of_turns)
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
