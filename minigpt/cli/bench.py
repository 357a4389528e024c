"""minigpt bench: how fast is it on this machine?"""

from typing import Annotated

import typer

from minigpt.choices import words_of
from minigpt.cli.options import Count, JsonFile, add, parse_draft, refuse_if
from minigpt.cli.output import progress, show


def generate(
    *,
    model: str | None = None,
    preset: str | None = None,
    dtype: str = "float32",
    quantize: str | None = None,
    batch: Count = 1,
    prompt_tokens: Count = 64,
    same_length: bool = False,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Count = 7,
    draft: str = "auto",
    against: str = "transformers",
    json_file: JsonFile = None,
) -> None:
    """Time prefill and decoding against others, on the same weights in the same run, and against the limit.

    Args:
        dtype: float32, bfloat16, float16, float64.
        batch: Rows. Several differ in length, from half a prompt to a whole.
        same_length: Give each row a whole prompt.
        prompt_tokens: Tokens of the longest prompt.
        new_tokens: Tokens to write.
        repeats: Rounds; each contestant is timed once in a round.
        against: transformers or transformers:DTYPE; '' for none.

    Examples:
        minigpt bench generate
        minigpt bench generate --quantize int8 --against transformers:bfloat16
        minigpt bench generate --batch 16 --json -
    """
    from minigpt.bench.generate import BenchPlan, bench_generate, bench_summary

    has_two_models = model and preset
    has_two_dtypes = quantize and dtype != "float32"
    refuse_if(
        (has_two_models, "preset", f"is for random weights; leave it out, or --model {model}"),
        (has_two_dtypes, "dtype", f"must be left out: --quantize {quantize} computes in float32"),
    )
    others = filter(None, words_of(against))
    plan = BenchPlan(
        model=model, preset=preset or "gpt2", kind=quantize or dtype, batch=batch,
        prompt_tokens=prompt_tokens, same_length=same_length, new_tokens=new_tokens, repeats=repeats,
        draft=parse_draft(draft), against=tuple(others),
    )  # fmt: skip
    with progress() as say:
        report = bench_generate(plan, progress=say)
    show(bench_summary(report), report, json_file)


bench = typer.Typer(help="Measure speed and memory, against others in the same run.")
add(bench, generate)
