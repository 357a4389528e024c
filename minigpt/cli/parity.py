"""minigpt parity: is it still the same model?"""

from itertools import product
from pathlib import Path
from typing import Any

import typer

import minigpt
from minigpt.cli.files import progress, require_writable, show
from minigpt.cli.options import Json, parse_keep
from minigpt.files import read_object


def parity(
    reports: list[Path] | None = None,
    *,
    model: str = "demo",
    norm: list[str] | None = None,
    sites: list[str] | None = None,
    keep: str = "scale,shift",
    center: bool = False,
    against: str | None = None,
    prompt: list[str] | None = None,
    attention: str = "sdpa",
    device: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    revision: str | None = None,
    prompts: Path | None = None,
    text: Path | None = None,
    fit: Path | None = None,
    noise: bool = False,
    sensitivity: bool = False,
    remove: bool = False,
    remove_file: Path | None = None,
    bisect: bool = False,
    budget: str | None = None,
    json_file: Json = None,
    html: Path | None = None,
    compare: bool = False,
) -> None:
    """Prove by its logits that a model with another norm is still the same model, or show by how much it differs.

    Args:
        reports: Reports to --compare.
        norm: A registered norm, package.module:Name, or path/to/file.py:Name; by default fused. May be repeated: every
            norm is judged at every --sites.
        sites: Where to put it, e.g. 'h.*.ln_1', or 'ln_f,h.0.*' for several patterns at once. May be repeated: every
            --norm is judged at each.
        against: The original that the model was finetuned or quantized from.
        prompt: Text to judge on; may be repeated.
        prompts: File of prompts: plain lines, or JSON lines.
        text: File to measure the perplexity of, before and after.
        noise: Measure ordinary differences too, e.g. bfloat16.
        sensitivity: Swap one site at a time; rank the sites.
        remove: Swap site after site, the least harmful first, to the kl of --budget.
        remove_file: Keep the trials of --remove here; started again, the search goes on.
        bisect: Name the swapped sites that break parity, or the budget.
        budget: Limits that decide, 'kl=1e-6,perplexity=0.01%'; top1=1% lets 1 % of the tokens differ.
        html: Write the report here as one self-contained page.
        compare: Show --json reports side by side.

    Examples:
        minigpt parity --norm textbook
        minigpt parity --model gpt2 --norm my_norm.py:MyNorm --sites 'h.*.ln_1' --json -
        minigpt parity --norm rms --norm dyt --sites '*' --sites ln_f
        minigpt parity --model ./tuned --against gpt2 --text held-out.txt
        minigpt parity --compare a.json b.json c.json --html page.html

        Exit status: 0 every verdict is a pass, 1 one is not, 2 it could not be judged; --compare only shows.
    """
    if compare:
        _compare(reports or [], html)
        return
    if remove_file is not None and not remove:
        raise minigpt.ConfigError("--remove-file is for --remove")
    if reports:
        raise minigpt.ConfigError(f"{reports[0]} is only read with --compare; give the model to judge as --model")
    require_writable(json_file, html, remove_file)
    if prompts is not None:
        from minigpt.generation.promptfile import read_prompts

        prompt = [*(prompt or []), *(line.prompt.text for line in read_prompts(prompts))]
    pairs = list(product(norm or ["fused"], [one.split(",") for one in sites or ["*"]]))
    judged: list[minigpt.ParityReport] = []
    with progress() as say:

        def said(step: str, done: float) -> None:
            name, where = pairs[len(judged)]
            about = f"{name} at {','.join(where)}: " if len(pairs) > 1 else ""
            say(about + step, (len(judged) + done) / len(pairs))

        for name, where in pairs:
            judged.append(minigpt.parity(
                model, norm=name, sites=where, keep=parse_keep(keep), center=center, against=against, prompts=prompt,
                attention=attention, device=device, dtype=dtype, quantize=quantize, revision=revision, noise=noise,
                sensitivity=sensitivity, remove=remove, remove_file=remove_file, bisect=bisect, text=text, fit=fit,
                budget=budget, progress=said,
            ))  # fmt: skip
    from minigpt.report.comparison import reports_table
    from minigpt.report.page import report_page
    from minigpt.report.parity_summary import parity_summary

    fields = [report.to_dict() for report in judged]
    is_one = len(judged) == 1
    summary = parity_summary(judged[0]) if is_one else reports_table(fields)
    show(summary, fields[0] if is_one else {"reports": fields}, json_file, html, lambda: report_page(*fields))
    raise typer.Exit(0 if all(report.passed for report in judged) else 1)


def _compare(files: list[Path], html: Path | None) -> None:
    if not files:
        raise minigpt.ConfigError("--compare needs the files of two or more reports")
    require_writable(html)
    from minigpt.report.comparison import reports_table
    from minigpt.report.page import report_page

    reports: list[dict[str, Any]] = []
    for file in files:
        fields = read_object(file, minigpt.MiniGPTError)
        reports += fields.get("reports", [fields])  # one command may have written several
    show(reports_table(reports), reports, html=html, page=lambda: report_page(*reports))
