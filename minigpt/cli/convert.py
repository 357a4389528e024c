"""minigpt convert: write a checkpoint of any family as one that transformers loads."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

import minigpt
from minigpt.cli.files import console, progress
from minigpt.cli.options import SOURCE, Center, Dtype, Fit, Keep, Norm, Revision, Sites, norm_at, parse_keep

EXAMPLES = (
    "Examples:\n\n[bold]minigpt convert out/ckpt.pt my-gpt2[/]\n\n"
    "[bold]minigpt convert gpt2 gpt2-bf16 --dtype bfloat16[/]\n\n"
    "--force replaces the model in OUT: its config, weights, tokenizer, finetune.json and checkpoints/ go. Other "
    "files stay, and so does a ckpt.pt."
)
OF_AN_EARLIER_MODEL = ("pytorch_model*.bin", "pytorch_model.bin.index.json", "finetune.json", "checkpoints")


def convert(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=SOURCE)],
    directory: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write to.")],
    norm: Norm = "fused",
    sites: Sites = "*",
    keep: Keep = "scale,shift",
    center: Center = False,
    fit: Fit = None,
    dtype: Dtype = None,
    max_shard_bytes: Annotated[int, typer.Option(help="Divide larger weights into files of at most so many bytes.")] = (
        5 * 10**9
    ),
    revision: Revision = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that OUT holds.")] = False,
) -> None:
    """Write a checkpoint as Hugging Face transformers reads it: config.json, safetensors and the tokenizer."""
    from minigpt.checkpoint import generation_fields, has_tokenizer, holds_model, locate
    from minigpt.swap import fit_on_text

    replaces = holds_model(directory)
    if replaces and not force:
        raise minigpt.CheckpointError(f"{directory} holds a model; give another folder, or --force to replace it")
    put = norm_at(norm, sites)
    with progress() as say:
        say(f"reading {source}", 0)
        place = locate(source, revision=revision)
        if replaces and place.resolve().is_relative_to(directory.resolve() / "checkpoints"):
            raise minigpt.CheckpointError(f"{source} would be removed with {directory}; give another folder")
        settings = generation_fields(place)
        gpt2 = minigpt.from_pretrained(
            place, norm="fused" if center else put, keep=parse_keep(keep), device="cpu", dtype=dtype
        )
        if center:
            minigpt.center_writers(gpt2)
            if norm != "fused":
                minigpt.swap_norms(gpt2, norm, sites.split(","), keep=parse_keep(keep))
        tokenizer = minigpt.Tokenizer.from_pretrained(place) if has_tokenizer(place) else None
        if fit is not None:
            fit_on_text(gpt2, tokenizer or minigpt.Tokenizer.from_pretrained(place), fit)
        say(f"writing {directory}", 0.5)
        minigpt.save_pretrained(gpt2, directory, tokenizer, max_shard_bytes=max_shard_bytes, generation_config=settings)
        if replaces:
            _remove_earlier(directory, with_tokenizer=tokenizer is None)
    size = sum(parameter.numel() for parameter in gpt2.parameters())
    changed = f" with {norm}" if norm != "fused" else ""
    without = "" if tokenizer else f", without a tokenizer, since {source} has none"
    console().print(f"{directory} holds {source}{changed}: {size:,} parameters{without}")


def _remove_earlier(directory: Path, with_tokenizer: bool) -> None:
    """Remove what an earlier model has left beside the new one."""
    from minigpt.checkpoint import TOKENIZER_FILES

    patterns = (*OF_AN_EARLIER_MODEL, *(TOKENIZER_FILES if with_tokenizer else ()))
    for path in [path for pattern in patterns for path in directory.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
