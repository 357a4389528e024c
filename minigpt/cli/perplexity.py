"""minigpt perplexity: how well a model predicts texts."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from minigpt.choices import MINIGPT_TYPE
from minigpt.cli.options import JsonFile
from minigpt.cli.output import progress, show
from minigpt.errors import CheckpointError, GenerationError

if TYPE_CHECKING:
    from minigpt.recipe import Recipe
    from minigpt.scoring import Perplexity


def perplexity(
    recipe: "Recipe",
    text: list[Path],
    *,
    against: str | None = None,
    window: int | None = None,
    stride: int | None = None,
    bos: bool = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the perplexity of texts: exp of the mean negative log-likelihood of a token.

    The original's own stands beside that of a changed model.

    Args:
        text: Text files in UTF-8, or JSON lines with a "text" in each.
        against: The original that the model was finetuned or quantized from; of a --norm its own model.
        window: Tokens that the model reads at once; by default its context.
        stride: Tokens between the beginnings of two windows; by default half the window.
        bos: Begin every window with the beginning-of-text token.

    Examples:
        minigpt perplexity gpt2 held-out.txt
        minigpt perplexity gpt2 wiki.test.raw --stride 1024
        minigpt perplexity gpt2-q4.gguf held-out.txt --against gpt2
        minigpt perplexity ./tuned one.txt two.txt stories.jsonl --norm rms --json
    """
    from minigpt.report.numerals import count, precise
    from minigpt.report.part import Cell, Number, Part, cell
    from minigpt.report.terminal import printed
    from minigpt.scoring import mean_perplexities, named_texts

    original = _original_of(recipe, against)
    with progress() as say:
        say(f"reading {text[0]}", 0)
        texts = [named for file in text for named in named_texts(file)]
        if not texts:
            raise GenerationError(f"{text[0]} has no text")
        how: dict[str, Any] = dict(window=window, stride=stride, bos=bos)
        models = 1 if original is None else 2
        norms, results = _measure(recipe, texts, lambda words, done: say(words, done / models), how)
        expected = None
        if original is not None:
            _, expected = _measure(original, texts, lambda words, done: say(words, (1 + done) / models), how)
    fields: dict[str, Any] = {"model": str(recipe.source), "norm": norms, "sites": list(recipe.sites)}
    if original is not None:
        fields["original"] = str(original.source)
    by = f"by {recipe.source} with {norms}"
    texts_fields, rows = list[dict[str, Any]](), list[list[Cell]]()
    for number, ((name, _), result) in enumerate(zip(texts, results, strict=True)):
        of_text = {"text": name} | dataclasses.asdict(result)
        del of_text["rows"]
        row: list[Cell] = [name, cell(result, "perplexity", precise)]
        if expected is not None:
            of_text["perplexity_of_the_original"] = expected[number].perplexity
            row.append(cell(expected[number], "perplexity", precise))
        texts_fields.append(of_text)
        rows.append([*row, cell(result, "loss", precise), cell(result, "scored", count)])
    if len(results) == 1 and texts[0][0] == str(text[0]):
        lines = [f"{precise(results[0].perplexity)}  perplexity of {text[0]} {by}", results[0].protocol]
        if original is not None and expected is not None:
            lines.insert(1, f"{precise(expected[0].perplexity)}  that of the original, {original.source}")
        summary: RenderableType = "\n".join(lines)
        fields |= texts_fields[0]
    else:
        means = mean_perplexities(results)
        of_all, by_text = [Number(means["perplexity"], precise)], [Number(means["perplexity_by_text"], precise)]
        if expected is not None:
            expected_means = mean_perplexities(expected)
            means["perplexity_of_the_original"] = expected_means["perplexity"]
            of_all.append(Number(expected_means["perplexity"], precise))
            by_text.append(Number(expected_means["perplexity_by_text"], precise))
        rows.append(["all tokens", *of_all, None, Number(means["scored"], count)])
        rows.append(["each text counted once", *by_text, None, None])
        heads = ["text", "perplexity", *["of the original"] * (models - 1), "loss, nats", "tokens scored"]
        summary = Group(*printed([Part("texts", "Perplexity", f"Of texts, {by}.", heads, rows)]))
        fields |= means
        fields["texts"] = texts_fields
    show(summary, fields, json_file)


def _original_of(recipe: "Recipe", against: str | None) -> "Recipe | None":
    """Return the recipe of the model that another changes; None if it changes none, or one with norms of its own."""
    from minigpt.checkpoint.contents import Files
    from minigpt.recipe import Recipe

    kept = ("attention", "device", "dtype", "memory", "local_files_only")
    how = {name: getattr(recipe, name) for name in kept}
    if against is not None:
        return Recipe(against, **how)
    plain = Recipe(recipe.source, revision=recipe.revision, **how)
    config = Files.at(recipe.place()).config or {}
    return None if plain == recipe or config.get("model_type") == MINIGPT_TYPE else plain


def _measure(
    recipe: "Recipe", texts: list[tuple[str, str]], say: Callable[[str, float], None], how: dict[str, Any]
) -> "tuple[str, list[Perplexity]]":
    """Return the names of a model's norms, and its perplexity of each text, which has a name."""
    from minigpt.checkpoint.norms import described_norms
    from minigpt.scoring import measure_perplexity

    say(f"reading {recipe.source}", 0)
    model, tokenizer = recipe.load(any_architecture=True)[:2]
    if tokenizer is None:
        raise CheckpointError(f"{texts[0][0]} needs a tokenizer, and {recipe.source} has none")
    results: list[Perplexity] = []

    def within(words: str, share: float) -> None:
        done = len(results)
        say(f"{texts[done][0]}: {words}", (done + share) / len(texts))

    for name, content in texts:
        within("turning the text into tokens", 0)
        result = measure_perplexity(model, tokenizer, content, name=name, progress=within, **how)
        if not math.isfinite(result.perplexity):
            raise GenerationError(
                f"the perplexity of {name} is {result.perplexity}, since the logits are not finite, or too large"
            )
        results.append(result)
    return described_norms(model), results
