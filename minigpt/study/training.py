"""The loop, which is transformers' Trainer, with what a swap needs of it."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from minigpt.device import resolve_device
from minigpt.errors import ConfigError
from minigpt.study.finetune import FinetuneSettings, Say, load
from minigpt.study.turns import Turns

WEIGHTS = "weights.pt"
RESIDUAL_EPS = 1e-5


class SwapTrainer(Trainer):
    """Trainer with the losses of a swap.

    Its checkpoints hold the state_dict as it is: norms in the middle of a schedule, and adapters.

    Args:
        final_norm: the module that reads the residual stream for ``unevenness``.
        end_of_text: the id of that token, if there is one.
        trainers: Trainer's own arguments.
    """

    stream: Tensor  # what the last norm read: the residual stream (B, T, C)

    def __init__(
        self, settings: FinetuneSettings, final_norm: nn.Module, end_of_text: int | None, **trainers: Any
    ) -> None:
        super().__init__(**trainers)
        self.remove_callback(PrinterCallback)
        self.residual_loss, self.end_of_text = settings.residual_loss, end_of_text
        self.original: Any = load(settings.model).to(self.args.device).eval() if settings.distill else None
        if self.residual_loss:
            final_norm.register_forward_pre_hook(lambda _, inputs: setattr(self, "stream", inputs[0]))
        if self.original or self.residual_loss:
            self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss in nats a token. A held-out loss is the text's in any case."""
        if not model.training or not (self.original or self.residual_loss):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ids = inputs["input_ids"]  # (B, T)
        if self.original is None:
            loss = model(**inputs).loss
        else:
            with torch.no_grad():
                wanted = self.original(input_ids=ids).logits.float().log_softmax(-1)  # (B, T, V)
            given = model(input_ids=ids).logits.float().log_softmax(-1)
            loss = F.kl_div(given, wanted, reduction="sum", log_target=True) / ids.numel()
        if self.residual_loss:
            loss = loss + self.residual_loss * unevenness(self.stream, ids, self.end_of_text)
        return loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state_dict or self.accelerator.unwrap_model(self.model).state_dict(), folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        tensors = torch.load(Path(resume_from_checkpoint) / WEIGHTS, map_location="cpu", weights_only=True)
        self.accelerator.unwrap_model(model or self.model).load_state_dict(tensors)


def unevenness(stream: Tensor, ids: Tensor, end_of_text: int | None) -> Tensor:
    """Return the mean squared distance of each row's deviation from that of the usual rows.

    The auxiliary loss of arXiv 2507.02559, which makes the deviation that a frozen norm divides by fit more rows.

    Args:
        stream: the residual stream (B, T, C) before the last norm.
        ids: (B, T). A row is usual if it is not the first and its token is not end-of-text.
    """
    deviation = (stream.float().var(-1, correction=0) + RESIDUAL_EPS).sqrt()  # (B, T)
    usual = torch.ones_like(ids, dtype=torch.bool) if end_of_text is None else ids != end_of_text
    usual[:, 0] = False
    return (deviation - deviation[usual].mean().detach()).square().mean()


class EachStep(TrainerCallback):
    """Calls the turns before every step, and those of the last step at the end. Says the step and the losses."""

    def __init__(self, turns: Turns, say: Say) -> None:
        self.turns, self.say, self.loss = turns, say, ""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.call(state.global_step)

    on_train_end = on_step_begin

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name, title in {"loss": "loss", "eval_loss": "held-out loss"}.items():
            if name in logs:
                self.loss = f"{title} {float(logs[name]):.4f}"
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.say(f"step {state.global_step} of {state.max_steps} {self.loss}", state.global_step / state.max_steps)


def resumable_step(folder: Path, steps: int) -> int | None:
    """Return the step of the newest checkpoint in ``folder`` that was written to its end; None if there is none.

    Trainer would add a step to one of the last step, so that is left out. A checkpoint's last file is
    trainer_state.json.
    """
    for step in sorted((int(place.name.rpartition("-")[2]) for place in folder.glob("checkpoint-*")), reverse=True):
        try:
            json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        if step < steps:
            return step
    return None


def arguments(settings: FinetuneSettings, folder: str | Path) -> TrainingArguments:
    """Return Trainer's arguments.

    Raises:
        ConfigError: if a field of ``settings.training`` is unknown or invalid.
    """
    often, evaluates = max(1, settings.steps // 10), settings.eval_text is not None
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
        "ddp_find_unused_parameters": True if settings.norm else None,  # of a norm before its turn
    }
    try:
        return TrainingArguments(output_dir=str(folder), **fields | settings.training)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"transformers.TrainingArguments does not take these settings: {error}") from error
