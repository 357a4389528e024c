"""minigpt finetune: train on, while norms are swapped in."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import OutFolder, refuse_if
from minigpt.cli.output import ResultConsole, progress
from minigpt.errors import ConfigError

if TYPE_CHECKING:
    from minigpt.recipe import Recipe


def finetune(
    *,
    recipe: "Recipe",
    text: str,
    steps: int,
    out: OutFolder,
    schedule: str | None = None,
    eval_text: Annotated[str | None, typer.Option("--eval")] = None,
    distill: bool = False,
    train: str = "all",
    residual_loss: float = 0.0,
    lora: int | None = None,
    seed: int = 0,
    learning_rate: float = 1e-4,
    batch_size: int = 8,
    block_size: int | None = None,
    save_steps: int | None = None,
    eval_steps: int | None = None,
    set_: Annotated[list[str] | None, typer.Option("--set")] = None,
) -> None:
    """Continue training a checkpoint while norms are swapped in on a schedule, on transformers' Trainer.

    Args:
        text: A text file, a .jsonl file, or owner/name of a Hugging Face dataset.
        steps: Optimizer steps.
        out: Folder for the trained model and the checkpoints.
        schedule: 'PATTERN@START+GAP, ...'; first@START merges the first position's deviation.
        eval_text: Held-out text, given as --text is.
        distill: Train towards the original's distribution in place of the text.
        train: all, or norms: the Parameters of the norms only.
        residual_loss: Weight of the loss that evens out the residual stream's deviations.
        lora: Train adapters of this rank only.
        seed: For the order of the text, dropout and adapters.
        learning_rate: The highest; it falls linearly to 0.
        batch_size: Rows for each device and step.
        block_size: Tokens in a row; by default the model's context.
        save_steps: Steps between checkpoints; by default a tenth.
        eval_steps: Steps between held-out losses; by default a tenth.
        set_: A field of TrainingArguments, as bf16=true; may be repeated.

    Examples:
        minigpt finetune --text train.txt --steps 300 --out baseline
        minigpt finetune --norm frozen --schedule 'h.*.ln_2@20+2, ln_f@40' --text train.txt --steps 300 --out tuned

        Started again with the same settings, it goes on from its newest checkpoint.
    """
    refuse_if((eval_steps is not None and eval_text is None, "eval_steps", "is for --eval, a held-out text"))
    with progress() as say:
        say("loading", 0.0)
        from minigpt.checkpoint import holds_model
        from minigpt.study.settings import Training, checked_schedule
        from minigpt.study.training import checkpoints_of
        from minigpt.study.training import finetune as run

        training = Training(
            text=text, steps=steps, schedule=schedule, eval_text=eval_text, distill=distill, train=train,
            residual_loss=residual_loss, lora=lora, learning_rate=learning_rate, batch_size=batch_size,
            block_size=block_size, save_steps=save_steps, eval_steps=eval_steps,
            training=dict(map(_field, set_ or [])),
        )  # fmt: skip
        checked_schedule(recipe, training)
        if holds_model(out) and not checkpoints_of(recipe, training, out, seed).exists():
            raise ConfigError(f"{out} holds a model of another run; give its settings to go on, or another --out")
        result = run(recipe, training, out, say, seed=seed)
        result.save(out)
    console = ResultConsole()
    if result.losses:
        step, loss = result.losses[-1]
        console.print(f"loss {loss:.4f} at step {step}")
    if result.eval_losses:
        _, before = result.eval_losses[0]
        _, after = result.eval_losses[-1]
        console.print(f"held-out loss {before:.4f} before, {after:.4f} after")
    console.print(f"{out} holds the model")


def _field(words: str) -> tuple[str, Any]:
    name, equals, value = words.partition("=")
    if not equals:
        raise ConfigError(f"must be NAME=VALUE, got {words!r}", argument="set")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
