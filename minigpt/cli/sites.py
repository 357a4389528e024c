"""minigpt sites: what each norm of a model is given on a text."""

from pathlib import Path

import minigpt
from minigpt.cli.files import progress, require_writable, show
from minigpt.cli.options import JsonFile


def sites(
    model: str,
    *,
    text: Path,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    json_file: JsonFile = None,
    html: Path | None = None,
) -> None:
    """Show what each norm is given on a text: deviations, the mean's share, massive channels.

    Args:
        text: File to read.
        html: Write the table and maps of the sites here, as a page.

    Examples:
        minigpt sites demo --text tales.txt
        minigpt sites gpt2 --text wiki.txt --html sites.html

        A site whose output a constant deviation explains well is safe to freeze. It reads at most 16 rows of the text.
    """
    from minigpt.checkpoint import locate
    from minigpt.judge.look import look
    from minigpt.report.look_summary import look_page, look_summary
    from minigpt.swap.fit import rows_of_text

    require_writable(json_file, html)
    with progress() as say:
        say(f"reading {model}", 0)
        place = locate(model, revision=revision)
        gpt2 = minigpt.from_pretrained(place, device=device, dtype=dtype)
        ids = rows_of_text(gpt2, minigpt.Tokenizer.from_pretrained(place), text)
        say(f"reading {text}", 0.5)
        found = look(gpt2, ids)
    about = f"{ids.numel():,} tokens of {text}, in rows of {ids.shape[1]:,}"
    fields = {"model": model, "text": str(text), "tokens": ids.numel(), "row": ids.shape[1],
              "norm_sites": found}  # fmt: skip
    title = f"Norm sites of {model}"
    show(look_summary(found, about), fields, json_file, html, lambda: look_page(found, title, about))
