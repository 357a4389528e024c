"""minigpt convert: write a checkpoint of any family as one that transformers loads."""

import dataclasses
import shutil
from typing import TYPE_CHECKING

from minigpt.cli.options import Given, OutPlace, refuse_if
from minigpt.cli.output import ResultConsole, progress
from minigpt.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from minigpt.recipe import Recipe

OF_AN_EARLIER_MODEL: tuple[str, ...] = (
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "finetune.json",
    "checkpoints",
)


def convert(
    recipe: "Recipe",
    out: OutPlace,
    *,
    given: Given = frozenset(),
    max_shard_bytes: int = 5 * 10**9,
    force: bool = False,
) -> None:
    """Write a checkpoint as Hugging Face transformers reads it: config.json, safetensors and the tokenizer.

    Args:
        out: Folder to write to.
        max_shard_bytes: Divide larger weights into files of at most so many bytes.
        force: Replace the model that OUT holds.

    Examples:
        minigpt convert out/ckpt.pt my-gpt2
        minigpt convert gpt2 gpt2-bf16 --dtype bfloat16

        --force replaces the model in OUT: its config, weights, tokenizer, finetune.json and checkpoints/ go. Other
        files stay, and so does a ckpt.pt.
    """
    from minigpt.checkpoint import holds_model
    from minigpt.checkpoint.norms import described_norms
    from minigpt.checkpoint.save import save_pretrained

    refuse_if(("attention" in given, "attention", "is for a model that computes; a checkpoint does not keep it"))
    replaces = holds_model(out)
    if replaces and not force:
        raise CheckpointError(f"{out} holds a model; give another folder, or --force to replace it")
    with progress() as say:
        say(f"reading {recipe.source}", 0)
        if replaces and recipe.place().resolve().is_relative_to(out.resolve() / "checkpoints"):
            raise CheckpointError(f"{recipe.source} would be removed with {out}; give another folder")
        loaded = dataclasses.replace(recipe, device=recipe.device or "cpu").load()
        say(f"writing {out}", 0.5)
        save_pretrained(loaded.model, out, loaded.tokenizer, max_shard_bytes=max_shard_bytes)
        if replaces:
            _remove_leftovers(out, has_tokenizer=loaded.tokenizer is not None)
    size = sum(parameter.numel() for parameter in loaded.model.parameters())
    line = f"{out} holds {recipe.source} with {described_norms(loaded.model)}: {size:,} parameters"
    if not loaded.tokenizer:
        line += f", without a tokenizer, since {recipe.source} has none"
    ResultConsole().print(line)


def _remove_leftovers(folder: "Path", *, has_tokenizer: bool) -> None:
    """Remove the files of the earlier model that the new one has not replaced."""
    from minigpt.checkpoint.contents import TOKENIZER_FILES

    patterns = OF_AN_EARLIER_MODEL
    if not has_tokenizer:
        patterns += TOKENIZER_FILES
    leftovers: list[Path] = []
    for pattern in patterns:
        leftovers += folder.glob(pattern)
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
