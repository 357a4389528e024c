"""minigpt convert: write a checkpoint of any family as one that transformers loads."""

import shutil
from pathlib import Path

import minigpt
from minigpt.cli.files import console, progress
from minigpt.cli.options import norm_at, parse_keep

OF_AN_EARLIER_MODEL = ("pytorch_model*.bin", "pytorch_model.bin.index.json", "finetune.json", "checkpoints")


def convert(
    model: str,
    out: Path,
    *,
    norm: str = "fused",
    sites: str = "*",
    keep: str = "scale,shift",
    center: bool = False,
    fit: Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    revision: str | None = None,
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
    from minigpt.checkpoint import TOKENIZER_FILES, generation_fields, has_tokenizer, holds_model, locate
    from minigpt.swap import fit_on_text

    replaces = holds_model(out)
    if replaces and not force:
        raise minigpt.CheckpointError(f"{out} holds a model; give another folder, or --force to replace it")
    put = norm_at(norm, sites)
    with progress() as say:
        say(f"reading {model}", 0)
        place = locate(model, revision=revision)
        if replaces and place.resolve().is_relative_to(out.resolve() / "checkpoints"):
            raise minigpt.CheckpointError(f"{model} would be removed with {out}; give another folder")
        settings = generation_fields(place)
        first = "fused" if center else put
        gpt2 = minigpt.from_pretrained(place, norm=first, keep=parse_keep(keep), device="cpu", dtype=dtype)
        if center:
            minigpt.center_writers(gpt2)
            if norm != "fused":
                minigpt.swap_norms(gpt2, norm, sites.split(","), keep=parse_keep(keep))
        tokenizer = minigpt.Tokenizer.from_pretrained(place) if has_tokenizer(place) or fit else None
        if fit is not None and tokenizer is not None:
            fit_on_text(gpt2, tokenizer, fit)
        say(f"writing {out}", 0.5)
        minigpt.save_pretrained(gpt2, out, tokenizer, max_shard_bytes=max_shard_bytes, generation_config=settings)
        if replaces:  # remove what the earlier model has left beside the new one
            patterns = (*OF_AN_EARLIER_MODEL, *(() if tokenizer else TOKENIZER_FILES))
            for path in [path for pattern in patterns for path in out.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    size = sum(parameter.numel() for parameter in gpt2.parameters())
    changed = f" with {norm}" if norm != "fused" else ""
    without = "" if tokenizer else f", without a tokenizer, since {model} has none"
    console().print(f"{out} holds {model}{changed}: {size:,} parameters{without}")
