"""minigpt sites: what each norm of a model is given on a text."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group

from minigpt.cli.options import JsonFile, OutFile
from minigpt.cli.output import progress, show
from minigpt.errors import GenerationError
from minigpt.files import read_text

if TYPE_CHECKING:
    from minigpt.recipe import Recipe


def sites(recipe: "Recipe", *, text: Path, json_file: JsonFile = None, html: OutFile = None) -> None:
    """Show what each norm is given on a text: deviations, the mean's share, massive channels.

    Args:
        text: File to read.
        html: Write the table and maps of the sites here, as a page.

    Examples:
        minigpt sites demo --text tales.txt
        minigpt sites gpt2 --text wiki.txt --html sites.html

        A site with little unexplained is safe to freeze. It reads at most 16 rows of the text.
    """
    from minigpt.judge.look import look_parts, site_statistics
    from minigpt.report.page import render
    from minigpt.report.part import Sheet
    from minigpt.report.terminal import printed
    from minigpt.swap.fit import rows_to_fit_on, tokens_to_fit_on

    read_text(text, GenerationError)  # before the model
    with progress() as say:
        say(f"reading {recipe.source}", 0)
        model, tokenizer = recipe.load(any_architecture=True)[:2]
        text_ids = tokens_to_fit_on(tokenizer, text)
        ids = rows_to_fit_on(model, text_ids)
        say(f"reading {text}", 0.5)
        seen = site_statistics(model, ids)
    tokens = ids.numel()
    width = ids.shape[1]
    about = f"{tokens:,} tokens of {text}, in rows of {width:,}"
    fields: dict[str, Any] = {"model": str(recipe.source), "text": str(text), "tokens": tokens, "row": width}
    fields["norm_sites"] = list(map(dataclasses.asdict, seen))
    parts = look_parts(seen, about)

    def page() -> str:
        title = f"Norm sites of {recipe.source}"
        return render(title, [Sheet(title, parts, about=about)])

    show(Group(*printed(parts)), fields, json_file, html, page)
