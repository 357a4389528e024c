"""minigpt convert: write a checkpoint of any family as one that transformers loads."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import minigpt
from minigpt.cli.files import progress
from minigpt.cli.options import SOURCE, Center, Dtype, Fit, Keep, Norm, Revision, parse_keep

EXAMPLES = (
    "Examples:\n\n[bold]minigpt convert out/ckpt.pt my-gpt2[/]\n\n"
    "[bold]minigpt convert gpt2 gpt2-bf16 --dtype bfloat16[/]"
)


def convert(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    directory: Annotated[str, typer.Argument(help="Folder to write to. An earlier checkpoint there is replaced.")],
    norm: Norm = "fused",
    keep: Keep = "scale,shift",
    center: Center = False,
    fit: Fit = None,
    dtype: Dtype = None,
    max_shard_bytes: Annotated[int, typer.Option(help="Divide larger weights into files of at most so many bytes.")] = (
        5 * 10**9
    ),
    revision: Revision = None,
) -> None:
    """Write a checkpoint as Hugging Face transformers reads it: config.json, safetensors and the tokenizer."""
    from minigpt.checkpoint import generation_fields, has_tokenizer, locate
    from minigpt.swap import fit_on_text

    with progress() as say:
        say(f"reading {source}", 0)
        place = locate(source, revision=revision)
        if has_tokenizer(Path(directory)) and not has_tokenizer(place):
            raise minigpt.CheckpointError(
                f"{directory} has a tokenizer, but {source} has none that would replace it; give another folder"
            )
        settings = generation_fields(place)
        gpt2 = minigpt.from_pretrained(
            place, norm="fused" if center else norm, keep=parse_keep(keep), device="cpu", dtype=dtype
        )
        if center:
            minigpt.center_writers(gpt2)
            if norm != "fused":
                minigpt.swap_norms(gpt2, norm, keep=parse_keep(keep))
        tokenizer = minigpt.Tokenizer.from_pretrained(place) if has_tokenizer(place) else None
        if fit is not None:
            fit_on_text(gpt2, tokenizer or minigpt.Tokenizer.from_pretrained(place), fit)
        say(f"writing {directory}", 0.5)
        minigpt.save_pretrained(gpt2, directory, tokenizer, max_shard_bytes=max_shard_bytes, generation_config=settings)
    if tokenizer is None:
        print(f"{source} has no tokenizer, so {directory} has none either", file=sys.stderr)
