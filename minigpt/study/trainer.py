"""Transformers' Trainer with the losses of a swap, the norms' turns at each step, and its settings."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from minigpt.device import resolve_device
from minigpt.errors import ConfigError
from minigpt.files import remove
from minigpt.progress import Progress
from minigpt.recipe import Recipe
from minigpt.scoring import read_windows, scored
from minigpt.study.resume import TRAINED_WEIGHTS, is_cut, reading, resumable_step, writing
from minigpt.study.schedule import NormSchedule
from minigpt.study.settings import DivergedError, Training

RESIDUAL_EPS = 1e-5
LOSSES = {"loss": "loss", "eval_loss": "held-out loss"}  # as Trainer logs them, and in words


class SwapTrainer(Trainer):
    """Trainer with the losses of a swap.

    Its checkpoints hold the state_dict as it is: norms in the middle of a schedule, and adapters.

    Args:
        norms: the modules at the norm sites. The last reads the residual stream for ``unevenness``.
        end_of_text: the id of that token, if there is one.
        original: the model to train towards, or None for the text.
        held_out: the tokens of the held-out text.
        context: the tokens of a window of it.
        trainers: Trainer's own arguments.

    Attributes:
        stream: what the last norm read: the residual stream (B, T, C).
    """

    stream: Tensor

    def __init__(
        self, training: Training, norms: list[nn.Module], end_of_text: int | None, original: Any, held_out: list[int],
        context: int, **trainers: Any,
    ) -> None:  # fmt: skip
        self.norms = norms
        super().__init__(**trainers)
        self.remove_callback(PrinterCallback)
        self.residual_loss = training.residual_loss
        self.end_of_text = end_of_text
        self.held_out = held_out
        self.context = context
        self.original: Any = original
        if original is not None:
            original.to(self.args.device).eval()
        if self.residual_loss:
            norms[-1].register_forward_pre_hook(self._keep_stream)
        if original is not None or self.residual_loss:
            self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch

    def _keep_stream(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.stream = inputs[0]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return all but biases and what norms hold, whatever their classes: Trainer knows some norms by class only."""
        of_norms: set[int] = set()
        for norm in self.norms:
            of_norms.update(map(id, norm.parameters()))
        decayed = []
        for name, parameter in model.named_parameters():
            if id(parameter) not in of_norms and not name.endswith("bias"):
                decayed.append(name)
        return decayed

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss in nats a token."""
        if self.original is None and not self.residual_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ids = inputs["input_ids"]  # (B, T)
        if self.original is None:
            loss = model(**inputs).loss
        else:
            with torch.no_grad():
                towards = self.original(input_ids=ids).logits.float().log_softmax(-1)  # (B, T, V)
            present = model(input_ids=ids).logits.float().log_softmax(-1)
            loss = F.kl_div(present, towards, reduction="sum", log_target=True) / ids.numel()
        if self.residual_loss:
            loss = loss + self.residual_loss * unevenness(self.stream, ids, self.end_of_text)
        return loss

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return and log the loss of the held-out text in nats a token, in the windows of ``minigpt.perplexity``."""
        model = self.model
        assert model is not None

        def read(ids: list[int], counted: int) -> Iterator[Tensor]:
            rows = torch.tensor([ids], device=self.args.device)
            with self.compute_loss_context_manager():
                yield model(input_ids=rows).logits[0, -counted - 1 : -1]

        model.eval()
        losses = []
        for (_start, first, end), parts in read_windows(read, self.held_out, self.context):
            losses.append(scored(end - first, parts).loss)
        model.train()
        metrics = {"eval_loss": sum(losses) / max(1, len(self.held_out) - 1)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder = Path(self.args.output_dir or ".")
        new = folder / f"checkpoint-{self.state.global_step}"
        try:
            with writing(folder, lambda: resumable_step(folder, self.args.max_steps)):
                super()._save_checkpoint(*args, **kwargs)
        except BaseException:
            if self.args.should_save and is_cut(new):  # it would fill the disk
                remove(new)
            raise

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = state_dict or self.accelerator.unwrap_model(self.model).state_dict()
        torch.save(tensors, folder / TRAINED_WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with reading(resume_from_checkpoint):
            tensors = torch.load(Path(resume_from_checkpoint) / TRAINED_WEIGHTS, map_location="cpu", weights_only=True)
            self.accelerator.unwrap_model(model or self.model).load_state_dict(tensors)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading(checkpoint or ""):
            super()._load_optimizer_and_scheduler(checkpoint)


def unevenness(stream: Tensor, ids: Tensor, end_of_text: int | None) -> Tensor:
    """Return the mean squared distance of each row's deviation from that of the usual rows.

    The auxiliary loss of arXiv 2507.02559, which makes the deviation that a frozen norm divides by fit more rows.

    Args:
        stream: the residual stream (B, T, C) before the last norm.
        ids: (B, T). A row is usual if it is not the first and its token is not end-of-text.
    """
    deviation = (stream.float().var(-1, correction=0) + RESIDUAL_EPS).sqrt()  # (B, T)
    usual = torch.ones_like(ids, dtype=torch.bool)
    if end_of_text is not None:
        usual = ids != end_of_text
    usual[:, 0] = False
    return (deviation - deviation[usual].mean().detach()).square().mean()


class EachStep(TrainerCallback):
    """Switches norms on before every step, and the last step's at the end. Reports the step and the losses."""

    def __init__(self, norms: NormSchedule, progress: Progress) -> None:
        self.norms = norms
        self.progress = progress
        self.loss = ""  # the newest, in words

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.norms.before_step(state.global_step)

    on_train_end = on_step_begin

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for kind, words in LOSSES.items():
            if kind in logs:
                self._note_loss(words, logs[kind], state.global_step)
        self.on_step_end(args, state, control)

    def _note_loss(self, kind: str, loss: float, step: int) -> None:
        self.loss = f"{kind} {float(loss):.4f}"
        if not math.isfinite(loss) and step:
            raise DivergedError(
                f"training diverged: the {kind} is {loss} at step {step}; "
                "lower the learning rate, or give the swaps more steps"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, steps = state.global_step, state.max_steps
        self.progress(f"step {step} of {steps} {self.loss}", step / steps)


def arguments(recipe: Recipe, training: Training, folder: str | Path, seed: int = 0) -> TrainingArguments:
    """Return Trainer's arguments.

    Raises:
        ConfigError: if a field of ``training.training`` is unknown or invalid.
    """
    often = max(1, training.steps // 10)
    evaluates = training.eval_text is not None
    fields: dict[str, Any] = {
        "max_steps": training.steps,
        "learning_rate": training.learning_rate,
        "per_device_train_batch_size": training.batch_size,
        "seed": seed,
        "data_seed": seed,
        "save_steps": training.save_steps or often,
        "save_total_limit": 2,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": training.eval_steps or often,
        "eval_on_start": evaluates,
        "logging_steps": often,
        "logging_nan_inf_filter": False,  # a loss that is not finite must show
        "use_cpu": resolve_device(recipe.device).type == "cpu",
        "disable_tqdm": True,
        "report_to": [],
        "include_num_input_tokens_seen": True,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": True if recipe.norm else None,  # of a norm before its step
    }
    try:
        return TrainingArguments(output_dir=str(folder), **fields | training.training)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"transformers.TrainingArguments does not take these settings: {error}") from error


def optimizer_facts(arguments: TrainingArguments) -> dict[str, str]:
    """Return the optimizer and the schedule of the learning rate in words."""
    algorithm = _member_name(arguments.optim)
    if algorithm.startswith("adamw"):
        algorithm = "AdamW"
    betas = f"betas {arguments.adam_beta1:g} and {arguments.adam_beta2:g}"
    clipping = "no clipping"
    if arguments.max_grad_norm:
        clipping = f"gradients clipped at norm {arguments.max_grad_norm:g}"
    schedule = _member_name(arguments.lr_scheduler_type)
    warmup = arguments.get_warmup_steps(arguments.max_steps)
    if warmup:
        schedule += f" after {warmup} steps of warm-up"
    return {
        "optimizer": f"{algorithm}, {betas}, weight decay {arguments.weight_decay:g}, {clipping}",
        "learning rate schedule": schedule,
    }


def _member_name(member: object) -> str:
    """Return the name of an enum's member without its class, in lower case."""
    return str(member).rpartition(".")[2].lower()
