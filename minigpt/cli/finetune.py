"""minigpt finetune: train on, while norms are swapped in."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from minigpt.cli.files import console, progress
from minigpt.cli.options import Device, Fit, Model, norm_names
from minigpt.errors import ConfigError

EXAMPLES = (
    "Examples:\n\n[bold]minigpt finetune --text train.txt --steps 300 --out baseline[/]\n\n"
    "[bold]minigpt finetune --norm frozen --schedule 'h.*.ln_2@20+2, h.*.ln_1@28+2, ln_f@40, first@50' "
    "--text train.txt --eval held.txt --steps 300 --out tuned[/]\n\n"
    "Started again with the same settings, it goes on from its newest checkpoint."
)


def finetune(
    text: Annotated[str, typer.Option(help="A text file, a .jsonl file, or owner/name of a Hugging Face dataset.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")],
    out: Annotated[Path, typer.Option(help="Folder for the trained model and the checkpoints.")],
    model: Model = "demo",
    norm: Annotated[
        str | None,
        typer.Option(help="The norm to swap in. Without it, norms stay as they are.", autocompletion=norm_names),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="'PATTERN@START+GAP, ...'; first@START merges the first position's deviation.")
    ] = None,
    fit: Fit = None,
    eval_text: Annotated[str | None, typer.Option("--eval", help="Held-out text, given as --text is.")] = None,
    distill: Annotated[
        bool, typer.Option("--distill", help="Train towards the original's distribution in place of the text.")
    ] = False,
    train: Annotated[str, typer.Option(help="all, or norms: the Parameters of the norms only.")] = "all",
    residual_loss: Annotated[
        float, typer.Option(help="Weight of the loss that evens out the residual stream's deviations.")
    ] = 0.0,
    lora: Annotated[int | None, typer.Option(help="Train adapters of this rank only.")] = None,
    seed: Annotated[int, typer.Option(help="For the order of the text, dropout and adapters.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="The highest; it falls linearly to 0.")] = 1e-4,
    batch_size: Annotated[int, typer.Option(help="Rows for each device and step.")] = 8,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a row; by default the model's context.")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints; by default a tenth.")] = None,
    eval_steps: Annotated[int | None, typer.Option(help="Steps between held-out losses; by default a tenth.")] = None,
    device: Device = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A field of TrainingArguments, as bf16=true; may be repeated.")
    ] = None,
) -> None:
    """Continue training a checkpoint while norms are swapped in on a schedule, on transformers' Trainer."""
    with progress() as say:
        say("loading", 0.0)
        from minigpt.study import FinetuneSettings
        from minigpt.study import finetune as run
        from minigpt.study.finetune import write

        settings = FinetuneSettings(
            text=text, steps=steps, model=model, norm=norm, schedule=schedule, fit=None if fit is None else str(fit),
            eval_text=eval_text, distill=distill, train=train, residual_loss=residual_loss, lora=lora, seed=seed,
            learning_rate=learning_rate, batch_size=batch_size, block_size=block_size,
            save_steps=save_steps, eval_steps=eval_steps, device=device, training=dict(map(_field, set_ or [])),
        )  # fmt: skip
        result = run(settings, out, say)
        write(result, out, model)
    if result.losses:
        console().print(f"loss {result.losses[-1][1]:.4f} at step {result.losses[-1][0]}")
    if result.eval_losses:
        console().print(f"held-out loss {result.eval_losses[0][1]:.4f} before, {result.eval_losses[-1][1]:.4f} after")
    console().print(f"{out} holds the model")


def _field(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition("=")
    if not equals:
        raise ConfigError(f"--set must be NAME=VALUE, got {given!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
