"""minigpt parity: is it still the same model?"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from minigpt.cli.options import JsonFile, OutFile, refuse_if
from minigpt.cli.output import progress, show
from minigpt.errors import MiniGPTError
from minigpt.files import read_object

if TYPE_CHECKING:
    from minigpt.recipe import Recipe
    from minigpt.report.parity_report import ParityReport


def parity(
    reports: list[Path] | None = None,
    *,
    recipes: "list[Recipe]",
    against: str | None = None,
    prompt: list[str] | None = None,
    prompts: Path | None = None,
    text: Path | None = None,
    gradients: bool = False,
    sensitivity: bool = False,
    remove: bool = False,
    remove_file: OutFile = None,
    bisect: bool = False,
    budget: str | None = None,
    record: OutFile = None,
    original: Path | None = None,
    outputs: Path | None = None,
    json_file: JsonFile = None,
    html: OutFile = None,
    compare: bool = False,
) -> None:
    """Prove by its logits that a model with another norm is still the same model, or show by how much it differs.

    Args:
        reports: Reports to --compare.
        norm: A registered norm, package.module:Name, or path/to/file.py:Name; by default the model's own. May be
            repeated: every norm is judged at every --sites, on one original.
        sites: Where to put it, e.g. 'h.*.ln_1', or 'ln_f,h.0.*' for several patterns at once. May be repeated: every
            --norm is judged at each.
        against: The original that the model was finetuned or quantized from.
        prompt: Text to judge on; may be repeated.
        prompts: File of prompts: plain lines, or JSON lines.
        text: File that the models read in windows; it decides too.
        gradients: Compare the gradient of the loss for every Parameter.
        sensitivity: Swap one site at a time; rank the sites.
        remove: Swap site after site, the least harmful first, to the kl of --budget.
        remove_file: Keep the trials of --remove here; started again, the search goes on.
        bisect: Name the swapped sites that break parity, or the budget.
        budget: Limits that decide, 'kl=1e-6,perplexity=0.01%'; top1=1% lets 1 % of the tokens differ.
        record: Keep the original in this file, with the ids that were read; without a --norm nothing is judged.
        original: Judge against this record.
        outputs: Judge the logits in this file, which another program wrote for a record.
        html: Write the report here as one self-contained page.
        compare: Show --json reports in one table.

    Examples:
        minigpt parity --norm textbook
        minigpt parity --model gpt2 --norm my_norm.py:MyNorm --sites 'h.*.ln_1' --json
        minigpt parity --norm rms --norm dyt --sites '*' --sites ln_f
        minigpt parity --model ./tuned --against gpt2 --text held-out.txt
        minigpt parity --model gpt2 --record r.safetensors
        minigpt parity --original r.safetensors --outputs mine.safetensors
        minigpt parity --compare a.json b.json c.json --html page.html

        Exit status: 0 every verdict is a pass, 1 one is not, 2 it could not be judged; --compare only shows.
    """
    if compare:
        refuse_if((not reports, "compare", "needs the files of two or more reports"))
        _compare(reports or [], html)
        return
    answered = "has its model and its texts; it cannot go with --record, --against, --prompt or --text"
    refuse_if(
        (remove_file and not remove, "remove_file", "is for --remove"),
        (outputs and not original, "outputs", "needs --original, the record that it answers"),
        (outputs and any(recipe.norm for recipe in recipes), "norm", "cannot go with --outputs, of another program"),
        (original and (record or against or prompt or prompts or text), "original", answered),
        (reports, "compare", f"must be given to read {reports and reports[0]}; the model to judge is --model"),
    )
    if prompts is not None:
        from minigpt.generation.promptfile import read_prompts

        prompt = [*(prompt or []), *(line.prompt for line in read_prompts(prompts))]
    from minigpt.judge.original import Original, read_original

    parts: dict[str, Any] = dict(
        gradients=gradients or None, sensitivity=sensitivity, remove=remove,
        remove_file=remove_file, bisect=bisect, budget=budget,
    )  # fmt: skip
    judged: list[ParityReport] = []
    with progress() as say:
        if original is not None:
            say(f"reading {original}", 0)
            truth = Original.load(original)
            if all(recipe.source == "demo" for recipe in recipes):  # by default: the record's own model
                recipes = [dataclasses.replace(recipe, source=truth.source) for recipe in recipes]
        else:
            begin = lambda step, done: say(step, 0.5 * done)  # noqa: E731
            truth = read_original(
                recipes[0], against, prompts=prompt, text=text, gradients=gradients, progress=begin, check=recipes
            )
        if record is not None:
            truth.save(record)
        if outputs is not None:
            judged = [truth.judge_outputs(outputs, **parts)]
        elif record is None or recipes[0].norm is not None or against is not None:

            def tell(step: str, done: float) -> None:
                recipe = recipes[len(judged)]
                about = f"{recipe.norm} at {','.join(recipe.sites)}: " if len(recipes) > 1 else ""
                say(about + step, 0.5 + 0.5 * (len(judged) + done) / len(recipes))

            for recipe in recipes:
                judged.append(truth.judge(recipe, progress=tell, **parts))
    if not judged:
        show(f"{record} holds {truth.source} as transformers {truth.versions['transformers']} computes it", {}, None)
        return
    from minigpt.report.page import report_page
    from minigpt.report.terminal import parity_summary, reports_table

    fields = [report.to_dict() for report in judged]
    is_one = len(judged) == 1
    summary = parity_summary(fields[0]) if is_one else reports_table(fields)
    show(summary, fields[0] if is_one else {"reports": fields}, json_file, html, lambda: report_page(*fields))
    raise typer.Exit(0 if all(report.passed for report in judged) else 1)


def _compare(files: list[Path], html: Path | None) -> None:
    from minigpt.report.page import report_page
    from minigpt.report.terminal import reports_table

    reports: list[dict[str, Any]] = []
    for file in files:
        fields = read_object(file, MiniGPTError)
        reports += fields.get("reports", [fields])  # one command may have written several
    show(reports_table(reports), reports, html=html, page=lambda: report_page(*reports))
