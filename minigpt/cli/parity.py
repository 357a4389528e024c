"""minigpt parity: is it still the same model?"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from minigpt.cli.options import Given, JsonFile, OutFile, refuse_if, refuse_others
from minigpt.cli.output import progress, show, write
from minigpt.errors import MiniGPTError
from minigpt.files import read_object
from minigpt.garbage import uncollected

if TYPE_CHECKING:
    from minigpt.judge.original import Original
    from minigpt.judge.original_data import OriginalData
    from minigpt.recipe import Recipe
    from minigpt.report.fields import ReportFields
    from minigpt.report.parity_report import ParityReport

# What the ways of calling this command take; a model is judged by all other options.
REPORT = {"json_file", "csv", "html"}
COMPARES = {"compare", "reports"} | REPORT
READS_OUTPUTS = {"original", "outputs", "device", "budget", "diagnose"} | REPORT
READS_ORIGINAL = {"prompt", "prompts", "text", "gradients"}
JUDGES_ENGINE = {"engine", "engine_option", "as_file", "sensitivity", "budget", "device", "diagnose"} | REPORT
RECORDS = {"record", "model", "revision", "attention", "device", "dtype", "memory"} | READS_ORIGINAL
READS_FOR_ENGINE = RECORDS - {"gradients"}  # with an engine, which gives logits alone
OF_THE_ORIGINAL = {"record", "against", "prompt", "prompts", "text"}  # which a record answers
OF_NORMS = ("sensitivity", "remove", "bisect")
CHANGES = {"norm", "against", "quantize", "center"}  # each makes a model that is not the original itself


def parity(
    reports: list[Path] | None = None,
    *,
    recipes: "list[Recipe]",
    given: Given,
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
    diagnose: bool = False,
    record: OutFile = None,
    original: Path | None = None,
    outputs: Path | None = None,
    engine: Annotated[str | None, typer.Option(metavar="KIND=PATH")] = None,
    engine_option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
    as_file: bool = False,
    json_file: JsonFile = None,
    csv: OutFile = None,
    html: OutFile = None,
    compare: bool = False,
) -> None:
    """Prove by its logits that a model with another norm is still the same model, or show by how much it differs.

    Args:
        reports: Reports to --compare.

    The model:
        norm: A registered norm, package.module:Name, or path/to/file.py:Name; by default the model's own. May be
            repeated: every norm is judged at every --sites, on one original.
        sites: Where to put it, e.g. 'h.*.ln_1', or 'ln_f,h.0.*' for several patterns at once. May be repeated: every
            --norm is judged at each.
        against: The model that --model must equal, which it was finetuned or quantized from; by default --model itself.

    The texts:
        prompt: Text to judge on; may be repeated.
        prompts: File of prompts: plain lines, or JSON lines.
        text: File that both models read, in windows of the context; the verdict is about it too.

    The verdict:
        budget: Limits that decide, 'kl=1e-6,perplexity=0.01%'; top1=1% lets 1 % of the tokens differ.
        gradients: Compare the gradient of the loss for every Parameter.
        diagnose: After a FAIL, name the mistake that gives these logits; of a small model that is the default.

    Searches:
        sensitivity: Swap one site at a time; rank the sites. Of an --engine, rank the tensors of its file.
        remove: Swap site after site, the least harmful first, to the kl of --budget.
        remove_file: Keep the trials of --remove here; started again, the search goes on.
        bisect: Name the swapped sites that break parity, or the budget.

    Other programs:
        record: Keep the original in this file, with the ids that were read; without a --norm nothing is judged.
        original: Judge against this record, which --record wrote.
        outputs: Judge the logits in this file, which another program wrote for a record.
        engine: Judge a model in another program's file: onnx=FILE, gguf=FILE, openvino=FILE or ctranslate2=FOLDER.
        engine_option: An option in that program's own words, e.g. type_k=f32; may be repeated.
        as_file: Judge whether the program is right for the weights in its file. Of a GGUF file no --model is needed.

    Output:
        compare: Show REPORTS, which --json wrote, in one table.
        csv: Write a line for each report to FILE.
        html: Write the report to FILE, as one self-contained page.

    Examples:
        minigpt parity --norm textbook
        minigpt parity --model gpt2 --norm my_norm.py:MyNorm --sites 'h.*.ln_1' --json
        minigpt parity --norm rms --norm dyt --sites '*' --sites ln_f
        minigpt parity --model ./tuned --against gpt2 --text held-out.txt
        minigpt parity --model gpt2 --record r.safetensors
        minigpt parity --original r.safetensors --outputs mine.safetensors --diagnose
        minigpt parity --model gpt2 --engine onnx=model.onnx
        minigpt parity --original r.safetensors --engine gguf=gpt2.gguf --engine-option type_k=f32
        minigpt parity --engine gguf=gpt2-q4.gguf --as-file
        minigpt parity --compare a.json b.json c.json --html page.html

        Exit status: 0 every verdict is a pass, 1 one is not, 2 it could not be judged; --compare only shows.
    """
    _check_options(given, recipes, reports or [])
    if compare:
        _show_comparison(reports or [], json_file, csv, html)
        return
    of_engine = None
    if engine is not None:
        from minigpt.cli.engines import parse_engine

        of_engine = parse_engine(engine, engine_option or [])
    searches: dict[str, Any] = dict(sensitivity=sensitivity, remove=remove, remove_file=remove_file, bisect=bisect)
    with progress() as say:
        with uncollected():
            from minigpt.judge.original import Original
            from minigpt.judge.verdict import parse_budget

        parse_budget(budget)
        opened: Any = None
        if of_engine is not None:
            say(f"opening {of_engine.file}", 0)
            if as_file and not given & {"model", "original"}:
                why = f"needs --model, the checkpoint of which {of_engine.file} was made: only a GGUF file is a model"
                refuse_if((of_engine.kind != "gguf", "as_file", why))
                recipes = [dataclasses.replace(recipes[0], source=of_engine.file)]
            opened = of_engine.open()
        if original is not None:
            say(f"reading {original}", 0)
            read = Original.load(original, device=recipes[0].wanted_device)
            recipes = [_beside_record(recipe, read.truth, given) for recipe in recipes]
        else:
            if prompts is not None:
                from minigpt.generation.promptfile import read_prompts

                prompt = list(prompt or [])
                for line in read_prompts(prompts):
                    prompt.append(line.prompt)
            texts: dict[str, Any] = dict(prompts=prompt, text=text, gradients=gradients)
            read = Original(
                recipes[0], against=against, beside=recipes, progress=lambda step, done: say(step, 0.5 * done), **texts
            )
        if record is not None:
            read.save(record)
        asked: dict[str, Any] = dict(budget=budget, diagnose=diagnose or None)
        if outputs is not None:
            judged = [read.judge_outputs(outputs, **asked, progress=say)]
        elif opened is not None:
            judged = _judge(read, [opened], say, as_file=as_file, sensitivity=sensitivity, **asked)
        elif _only_records(given):
            judged = []
        else:
            judged = _judge(read, recipes, say, gradients=gradients or None, **asked, **searches)
    if not judged:
        truth = read.truth
        version = truth.facts.versions["transformers"]
        show(f"{record} holds {truth.facts.source} as transformers {version} computes it", {})
        return
    from minigpt.report.overview import reports_table
    from minigpt.report.parts import parity_summary

    written = [report.to_dict() for report in judged]
    if len(judged) == 1:
        summary, fields = parity_summary(judged[0]), written[0]
    else:
        summary, fields = reports_table(judged), {"reports": written}
    _show(judged, summary, fields, json_file, csv, html)
    raise typer.Exit(0 if all(report.passed for report in judged) else 1)


def _only_records(given: Given) -> bool:
    """Return whether the original is kept, and nothing is judged against it."""
    return "record" in given and not given & CHANGES


def _check_options(given: Given, recipes: "list[Recipe]", reports: list[Path]) -> None:
    """Refuse options that would do nothing, and options that need others.

    Raises:
        ConfigError: about the first of them.
    """
    if "compare" in given:
        refuse_others(given, COMPARES, "cannot go with --compare, which shows reports that were written before")
        refuse_if((not reports, "compare", "needs the files of two or more reports"))
        return
    refuse_if(
        (reports, "compare", f"must be given to read {reports and reports[0]}; the model to judge is --model"),
        ("outputs" in given and "original" not in given, "outputs", "needs --original, the record that it answers"),
    )
    if "outputs" in given:
        refuse_others(given, READS_OUTPUTS, "cannot go with --outputs, which another program wrote for --original")
        return
    if "engine" in given:
        _check_engine(given)
        return
    for name in ("engine_option", "as_file"):
        refuse_if((name in given, name, "needs --engine, whose file or option it is about"))
    if _only_records(given):
        refuse_others(given, RECORDS, "cannot go with --record alone, which judges nothing; give a --norm to judge")
        return
    if "original" in given:
        answered = "cannot go with --original, a record that has its model and its texts"
        refuse_others(given & OF_THE_ORIGINAL, (), answered)
    refuse_if(("remove_file" in given and "remove" not in given, "remove_file", "is for --remove"))
    has_norm = any(recipe.norm is not None for recipe in recipes)
    for name in OF_NORMS:
        refuse_if((name in given and not has_norm, name, "is about norms that are swapped in; give a --norm"))


def _check_engine(given: Given) -> None:
    """Refuse what an engine, which gives logits alone, has no use for."""
    if "original" in given:
        taken, has = JUDGES_ENGINE | {"original"}, "--engine and --original, a record that has its model and its texts"
    else:
        taken, has = JUDGES_ENGINE | READS_FOR_ENGINE, "--engine, a model in another program's file"
    refuse_others(given, taken, f"cannot go with {has}")


def _beside_record(recipe: "Recipe", truth: "OriginalData", given: Given) -> "Recipe":
    """Return a recipe whose model and attention are the record's, unless others are given."""
    if "attention" not in given:
        recipe = dataclasses.replace(recipe, attention=truth.facts.attention)
    if "model" in given:
        return recipe
    is_there = truth.facts.place.exists() and "revision" not in given
    return dataclasses.replace(recipe, source=truth.facts.place if is_there else truth.facts.source)


def _judge(
    original: "Original", candidates: list[Any], say: Callable[[str, float], None], **options: Any
) -> "list[ParityReport]":
    """Judge candidates, several of which are recipes, in the second half of the progress."""
    judged: list[ParityReport] = []

    def tell(step: str, done: float) -> None:
        if len(candidates) > 1:
            recipe = candidates[len(judged)]
            step = f"{recipe.norm} at {','.join(recipe.sites)}: {step}"
        say(step, 0.5 + 0.5 * (len(judged) + done) / len(candidates))

    for candidate in candidates:
        judged.append(original.judge(candidate, progress=tell, **options))
    return judged


def _show(
    reports: "Sequence[ReportFields]",
    summary: RenderableType,
    fields: dict[str, Any],
    json_file: Path | None,
    csv: Path | None,
    html: Path | None,
) -> None:
    """Print the summary of reports; write them as JSON, as CSV and as a page."""
    from minigpt.report.overview import csv_of

    def page() -> str:
        from minigpt.report.page import report_page  # imported here: nothing else needs templates

        return report_page(*reports)

    show(summary, fields, json_file, html, page)
    if csv is not None:
        write(csv, csv_of(reports))


def _show_comparison(files: list[Path], json_file: Path | None, csv: Path | None, html: Path | None) -> None:
    """Show reports that were written before in one table."""
    from minigpt.report.overview import reports_table
    from minigpt.report.parity_report import read_reports

    for name, output in (("json_file", json_file), ("csv", csv), ("html", html)):
        refuse_if((output in files, name, f"would replace {output}, one of the reports; name another file"))
    written: list[dict[str, Any]] = []
    for file in files:
        fields = read_object(file, MiniGPTError)
        written += fields.get("reports", [fields])  # one command may have written several
    reports = read_reports(written)
    _show(reports, reports_table(reports), {"reports": written}, json_file, csv, html)
