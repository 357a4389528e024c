"""Train a checkpoint further while norms are swapped in on a schedule: `finetune`."""

import contextlib
import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, set_seed

from minigpt import hf
from minigpt.checkpoint.save import save_pretrained
from minigpt.device import resolve_device
from minigpt.errors import CheckpointError, ConfigError, GenerationError, to_install
from minigpt.files import finite, hash_json, locked, write_atomically
from minigpt.host import Shape
from minigpt.inputs import check_known
from minigpt.model import GPT2
from minigpt.norms.foreign.arrays import require_gradients
from minigpt.norms.textbook import FusedLayerNorm
from minigpt.precision import HALVES
from minigpt.progress import Progress, quiet_transformers
from minigpt.recipe import Recipe
from minigpt.scoring import join_texts, texts_in
from minigpt.study.export import can_save_frozen, save_frozen
from minigpt.study.resume import note_cut, remove_cut, resumable_step, writing
from minigpt.study.schedule import NormSchedule, Schedule, ScheduledNorm
from minigpt.study.settings import DivergedError, Training, base_of, checked_schedule, training_fingerprint
from minigpt.study.trainer import EachStep, SwapTrainer, arguments
from minigpt.swap import swap_norms
from minigpt.swap.fit import rows_to_fit_on, tokens_to_fit_on
from minigpt.tokenizer import Tokenizer

CURVE = "finetune.json"
FORMAT = 3  # of the checkpoints; a run does not continue from another format


@dataclasses.dataclass(frozen=True)
class Finetuned:
    """A trained model and how its loss went.

    Attributes:
        model: in eval mode, with the new norms at their sites.
        tokenizer: the checkpoint's.
        losses, eval_losses: (step, loss in nats a token).
        swaps: the step before which each site was swapped.
        tokens: of the text to train on.
        tokens_seen: that the training read, a token again each time.
        resumes_at: the step that the same command would go on from; None if there is no checkpoint.
    """

    model: GPT2
    tokenizer: Tokenizer
    losses: list[tuple[int, float]]
    eval_losses: list[tuple[int, float]]
    swaps: dict[str, int]
    tokens: int
    tokens_seen: int
    resumes_at: int | None = None

    def save(self, folder: Path) -> None:
        """Write the model, its tokenizer, and finetune.json with the curves, into ``folder``.

        A model whose norms are all frozen is written as a plain GPT-2.

        Raises:
            CheckpointError: if it cannot be written, as on a full disk.
        """
        write = save_frozen if can_save_frozen(self.model) else save_pretrained
        write(self.model, folder, self.tokenizer)
        with writing(folder, lambda: self.resumes_at):
            write_atomically(folder / CURVE, json.dumps(finite(self.curves()), indent=2) + "\n")

    def curves(self) -> dict[str, Any]:
        """Return the losses and the swaps."""
        return {"losses": self.losses, "eval_losses": self.eval_losses, "swaps": self.swaps}


def finetune(
    recipe: Recipe, training: Training, out: str | Path, progress: Progress = lambda *_: None, *, seed: int = 0
) -> Finetuned:
    """Train, and keep Trainer's checkpoints under ``out``/checkpoints. Started again, it goes on from the newest.

    The model begins with the checkpoint's own norms. The recipe's norm comes to its sites at the steps of the schedule,
    and is fitted then if the recipe says so. A resumed run ends with the same weights as an undisturbed one. With other
    settings, or on other texts, another norm or other weights, it begins at step 0.

    Args:
        recipe: the model, and the norm that is swapped in. It is trained in float32 if ``dtype`` is None. In half
            precision on the CPU its own LayerNorms are trained as ``textbook``, whose sums are float32, unless the
            norm is "fused" or ``arithmetic`` is "reference".
        seed: for the order of the text, dropout and adapters.

    Raises:
        ConfigError: if a setting cannot be used, or another process trains in ``out``.
        NormError: if the norm is unknown or gives no gradients, or the schedule does not fit the model.
        CheckpointError: if the model cannot be read or has no tokenizer, or ``out`` cannot be written.
        GenerationError: if a text cannot be read.
        DivergedError: if the loss or a weight is not finite.
    """
    for _, norm in recipe.pairs():
        require_gradients(norm)
    schedule = checked_schedule(recipe, training)
    checkpoints = checkpoints_of(recipe, training, Path(out), seed)
    with writing(Path(out), lambda: resumable_step(checkpoints, training.steps)):
        checkpoints.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes of a distributed run work in it too
            try:
                stack.enter_context(locked(checkpoints.parent))
            except BlockingIOError as error:
                raise ConfigError(f"is {out}, where another process trains", argument="out") from error
            note_cut(checkpoints, training.steps)
            remove_cut(checkpoints.parent)
        return _finetune(recipe, training, schedule, checkpoints, progress, seed)


def _finetune(
    recipe: Recipe, training: Training, schedule: Schedule, checkpoints: Path, progress: Progress, seed: int
) -> Finetuned:
    set_seed(seed)
    base = dataclasses.replace(base_of(recipe), device="cpu", dtype=recipe.dtype or "float32")
    untrained, tokenizer = base.open()
    if tokenizer is None:
        raise CheckpointError(f"{recipe.source} has no tokenizer, which training on a text needs")
    model = as_transformers(untrained, recipe)
    body = model.transformer
    context = untrained.config.n_positions
    original = copy.deepcopy(model) if training.distill else None
    rows = None if recipe.fit is None else rows_to_fit_on(body, tokens_to_fit_on(tokenizer, recipe.fit))
    norms = NormSchedule(body, recipe.norm, schedule, keep=recipe.keep, rows=rows)
    trained = _with_adapters(model, training.lora) if training.lora else model
    if training.train == "norms":  # no other Parameter takes gradients
        sites = tuple(f"transformer.{site}." for site in body.site_names())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(sites))
    ids = token_ids(training.text, tokenizer, untrained)
    held_out = []
    if training.eval_text is not None:
        held_out = token_ids(training.eval_text, tokenizer, untrained)
    trainer = SwapTrainer(
        training,
        norms=list(body.norm_modules().values()),
        end_of_text=next(iter(untrained.config.eos_token_ids), None),
        original=original,
        held_out=held_out,
        context=context,
        model=trained,
        args=arguments(recipe, training, checkpoints, seed),
        train_dataset=blocks(training.text, ids, training.block_size or context),
        eval_dataset=[{}],  # Trainer requires one; ``evaluate`` reads the windows of perplexity instead
        callbacks=[EachStep(norms, progress)],
    )
    _train(trainer, norms, checkpoints, training.steps)
    trained.zero_grad()
    whole = trained.merge_and_unload() if training.lora else trained
    for name, weight in whole.named_parameters():
        if not weight.isfinite().all():
            steps = training.steps
            raise DivergedError(f"training diverged: {name} is not finite after {steps} steps; train more gently")
    log = trainer.state.log_history
    return Finetuned(
        model=as_minigpt(whole, untrained),
        tokenizer=tokenizer,
        losses=_by_step(log, "loss"),
        eval_losses=_by_step(log, "eval_loss"),  # a resumed run evaluates the step at which it resumes again
        swaps=schedule.steps,
        tokens=len(ids),
        tokens_seen=trainer.state.num_input_tokens_seen,
        resumes_at=resumable_step(checkpoints, training.steps),
    )


def _train(trainer: SwapTrainer, norms: NormSchedule, checkpoints: Path, steps: int) -> None:
    """Train from the newest whole checkpoint, or from the beginning; then free what only training needs."""
    step = resumable_step(checkpoints, steps)
    resumed = None
    if step is None:
        norms.before_step(0)  # so that the first evaluation sees what the first step will
    else:
        norms.before_step(step - 1, fits=False)
        resumed = str(checkpoints / f"checkpoint-{step}")
    with quiet_transformers():  # it doubts the order of its checkpoints
        trainer.train(resume_from_checkpoint=resumed)
    trainer.accelerator.free_memory()  # gradients and the optimizer's state
    trainer.optimizer = None


def checkpoints_of(recipe: Recipe, training: Training, out: Path, seed: int = 0) -> Path:
    """Return the folder of a run's checkpoints, which is named after all that decides the result."""
    return out / "checkpoints" / hash_json([FORMAT, recipe.fingerprint(), seed, *training_fingerprint(training)])


def as_transformers(model: GPT2, recipe: Recipe) -> Any:
    """Return a model as one of transformers, with copies of its weights and of its norms.

    Norms that would add gradients in half precision become ``textbook``.
    """
    fields: dict[str, Any] = {**model.config.to_dict(), "attn_implementation": recipe.attention}
    hf_model = hf.GPT2LMHeadModel(GPT2Config(**fields), norm="fused", arithmetic=recipe.arithmetic)
    nn.Module.to(hf_model, model.wte.weight.dtype)
    hf_model.loss_type = "ForCausalLM"  # transformers warns if it is not named
    for site, norm in model.norm_modules().items():
        hf_model.transformer.set_submodule(site, copy.deepcopy(norm))
    tensors = model.state_dict()
    head = tensors.pop("lm_head.weight", model.wte.weight)
    hf_model.lm_head.load_state_dict({"weight": head})
    hf_model.transformer.load_state_dict(tensors)
    if sums_in_half(hf_model.dtype, recipe):
        sites = [site for site, norm in model.norm_modules().items() if type(norm) is FusedLayerNorm]
        swap_norms(hf_model.transformer, "textbook", sites)
    return hf_model


def sums_in_half(dtype: torch.dtype, recipe: Recipe) -> bool:
    """Return True where PyTorch adds the gradients of scale and shift in half precision, and nobody asks for its bits.

    On other devices than the CPU it adds them in float32.
    """
    is_on_cpu = resolve_device(recipe.device).type == "cpu"
    return dtype in HALVES and is_on_cpu and recipe.arithmetic == "fast"


@torch.no_grad()
def as_minigpt(hf_model: Any, model: GPT2) -> GPT2:
    """Return ``model`` with the weights of a trained model of transformers, and the norms that it has now."""
    weights = {}
    for name, tensor in hf_model.state_dict().items():
        weights[name.removeprefix("transformer.")] = tensor
    sites = tuple(f"{site}." for site in model.site_names())
    for name, parameter in model.named_parameters():
        if not name.startswith(sites):
            parameter.copy_(weights[name])
    for site in model.site_names():
        norm, is_own = hf_model.transformer.get_submodule(site), True
        if isinstance(norm, ScheduledNorm):
            norm, is_own = norm.present, not norm.is_on
        before = model.get_submodule(site)
        if is_own and type(before) is FusedLayerNorm:  # which may have been trained as textbook
            before.load_state_dict(norm.state_dict())
        else:
            model.set_submodule(site, copy.deepcopy(norm).cpu())
    return model.eval()


def blocks(name: str, ids: list[int], size: int) -> list[dict[str, Tensor]]:
    """Return token ids cut into rows of ``size`` tokens, each row its own labels.

    What is left at the end is dropped, if there is a whole row before it.

    Raises:
        GenerationError: if there are fewer than two tokens.
    """
    size = min(size, len(ids))
    if size < 2:
        raise GenerationError(f"{name} has {len(ids)} tokens; training needs 2 or more")
    whole = len(ids) // size * size
    rows = torch.tensor(ids[:whole]).view(-1, size)
    return [{"input_ids": row, "labels": row} for row in rows]


def token_ids(source: str, tokenizer: Tokenizer, model: GPT2) -> list[int]:
    """Return the tokens of the texts of a file or a dataset, one after another with an end of text between.

    Raises:
        GenerationError: if the source cannot be read, or has a token that the model has no embedding for.
    """
    file = Path(source)
    texts = texts_in(file) if file.is_file() else _texts_of_dataset(source)
    ids = join_texts(texts, tokenizer, Shape.of(model.config))
    check_known(torch.tensor([ids], dtype=torch.long), model.config.vocab_size)
    return ids


def _texts_of_dataset(source: str) -> Iterator[str]:
    name, _, split = source.partition(":")
    try:
        from datasets import load_dataset

        yield from load_dataset(name, split=split or "train")["text"]
    except ImportError as error:
        raise GenerationError(f"the dataset {source} needs datasets: {to_install('hf')}") from error
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise GenerationError(f"cannot read the dataset {name}: {reason}") from error


def _by_step(log: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    """Return the logged values of this name, one for each step."""
    values: dict[int, float] = {}
    for entry in log:
        if name in entry:
            values[int(entry["step"])] = entry[name]
    return list(values.items())


def _with_adapters(model: Any, rank: int) -> Any:
    import peft

    layers = ["c_attn", "c_proj", "c_fc"]
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=layers, fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)
