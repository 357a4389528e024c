"""minigpt convert: a checkpoint of any family -> one that transformers loads."""

import sys
from typing import Annotated

import typer

from minigpt.cli.files import progress
from minigpt.cli.options import SOURCE, CheckFinite, Dtype, IgnoreHeads, Revision

EXAMPLES = (
    "Examples:\n\n[bold]minigpt convert out/ckpt.pt my-gpt2[/]\n\n"
    "[bold]minigpt convert gpt2 gpt2-bf16 --dtype bfloat16[/]"
)


def convert(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    directory: Annotated[str, typer.Argument(help="Where to write; an earlier checkpoint there is replaced whole.")],
    dtype: Dtype = None,
    max_shard_bytes: Annotated[int, typer.Option(help="Divide the weights into files of at most so many bytes.")] = (
        5 * 10**9
    ),
    ignore_heads: IgnoreHeads = False,
    check_finite: CheckFinite = False,
    revision: Revision = None,
) -> None:
    """Write a checkpoint as Hugging Face transformers has it: config.json, safetensors, the tokenizer beside them."""
    import minigpt
    from minigpt.checkpoint import has_tokenizer, locate, read_generation_config

    with progress() as say:
        say(f"reading {source}", 0)
        place = locate(source, revision=revision)
        gpt2 = minigpt.from_pretrained(
            place, device="cpu", dtype=dtype, ignore_heads=ignore_heads, check_finite=check_finite
        )
        tokenizer = minigpt.Tokenizer.from_pretrained(place) if has_tokenizer(place) else None
        say(f"writing {directory}", 0.5)
        settings = read_generation_config(place)
        minigpt.save_pretrained(gpt2, directory, tokenizer, max_shard_bytes=max_shard_bytes, generation_config=settings)
    if tokenizer is None:
        print(f"{source} has no tokenizer, so {directory} has none either", file=sys.stderr)
