"""Print the tables of speed and of the studies in Markdown, from the kept results in docs/results.

python scripts/docs/tables.py
"""

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from minigpt.report.numerals import brief
from minigpt.study.study import CellRow
from minigpt.study.table import format_setting, summarize

KINDS = ("float32", "bfloat16", "int8")
LEVELS = ("bf16", "avx2")  # in the tables of speed
RESULTS = Path(__file__).parents[2] / "docs" / "results"
AT_THE_SWAP = ("kl_mean", "kl_median", "top1_agreement", "perplexity_after")
AFTER = ("loss", "over_baseline", "perplexity_recovered", "kl_recovered", "entropy")
STUDIES = {"swap": AT_THE_SWAP, "centred": ("ratio", *AT_THE_SWAP), "one-site": AT_THE_SWAP, "recover": AFTER,
           "remove-layernorm": AFTER, "distil": AFTER, "seeds": AFTER, "thirds": AFTER[:3],
           "recipes": AFTER[:4], "order": AFTER[:4], "lora": AFTER[:4]}  # fmt: skip


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


COLUMNS = {  # of the tables of speed: a shape of levels.py, its figure, its digits, and whether more is better
    "one text, tokens/s": ("one text", "tokens_per_second", ".1f", max),
    "16 texts, tokens/s": ("16 texts", "tokens_per_second", ".1f", max),
    "reading 64, ms": ("one text", "prefill_ms", ".0f", min),
    "16 x 64": ("16 texts", "prefill_ms", ".0f", min),
    "512": ("reading 512", "prefill_ms", ".0f", min),
    "a step of 1 row, ms": ("one text", "step_ms", ".1f", min),
    "8 rows": ("8 texts", "step_ms", ".1f", min),
    "16 rows": ("16 texts", "step_ms", ".1f", min),
}
IN_SHORT = ("one text, tokens/s", "16 texts, tokens/s", "512")


def speed(level: str, columns: Iterable[str] = COLUMNS) -> str:
    """Return the table of a level from ``levels-cpu-epyc.json``, errors beside it. The best of each kind is bold."""
    results = json.loads((RESULTS / "levels-cpu-epyc.json").read_text(encoding="utf-8"))
    timed: dict[str, dict[str, dict[str, dict[str, Any]]]] = {kind: {} for kind in KINDS}  # kind, name, shape: a row
    for row in results["rows"]:
        if row["level"] == level and not row["name"].startswith(("transformers", "CTranslate2")):
            timed[row["kind"]].setdefault(shown_name(row), {})[row["shape"]] = row
    lines = []
    for programs in timed.values():
        line_of = {name: [name] for name in programs}
        for shape, figure, digits, best_of in map(COLUMNS.__getitem__, columns):
            figures = {}
            for name, rows in programs.items():
                if shape in rows and (figure == "tokens_per_second" or not name.endswith("drafts")):
                    figures[name] = rows[shape][figure]
            for name, line in line_of.items():
                shown = f"{figures[name]:{digits}}" if name in figures else "-"
                line.append(f"**{shown}**" if name == best_of(figures, key=lambda who: figures[who]) else shown)
        for name, line in line_of.items():
            error = results["parity"][name.removeprefix("minigpt ").removesuffix(", drafts")]
            lines.append([*line, brief(error["ratio"]), brief(error["kl"])])
    return markdown([f"at {level}", *columns, "error", "KL"], lines).replace("_", r"\_")


def shown_name(row: dict[str, Any]) -> str:
    """Return the name of a row of ``levels.py`` in a table: ours by kind, and with drafts if there were some."""
    if row["name"] not in ("minigpt", "undrafted"):
        return row["name"]
    return f"minigpt {row['kind']}{', drafts' if row['acceptance'] else ''}"


def rows(study: str) -> list[CellRow]:
    """Return the kept rows of a study."""
    return [json.loads(line) for line in (RESULTS / f"study-{study}.jsonl").read_text(encoding="utf-8").splitlines()]


def of_study(study: str) -> str:
    """Return the table of a study: what varies, then its most telling figures."""
    table, figures = summarize(rows(study)), STUDIES[study]
    heads = [*(name.replace("_", " ") for name in table.varying), *map(table.head, figures)]
    lines = [
        [*(format_setting(cell.settings.get(name)) for name in table.varying),
         *(format_setting(cell.figures[name]) for name in figures)]
        for cell in table.cells
    ]  # fmt: skip
    text = markdown(heads, lines).replace("*", r"\*")
    text = text.replace(" \u00b1 ", "\u00a0\u00b1\u00a0").replace(" % ", "\u00a0% ")  # so that a page breaks no number
    return re.sub(r"e-(\d)", "e-\u2060\\1", text)


def attention() -> str:
    """Return the table of ``attention.json``: sinks, and the entropy of each layer's heads."""
    maps = json.loads((RESULTS / "attention.json").read_text(encoding="utf-8"))["after"]
    lines = []
    for norm, figures in maps.items():
        heads = {(layer, head): share for layer, row in enumerate(figures["first"]) for head, share in enumerate(row)}
        layer, head = max(heads, key=lambda place: heads[place])
        largest = f"{100 * heads[layer, head]:.0f} (h.{layer}, head {head})"
        entropies = [f"{fmean(row):.2f}" for row in figures["entropy"]]
        lines.append([norm.replace("_", r"\_"), f"{100 * fmean(heads.values()):.1f}", largest, *entropies])
    layers = [f"entropy in h.{layer}, nats" for layer in range(len(lines[0]) - 3)]
    return markdown(["norm", "first position, mean of heads, %", "most of a head, %", *layers], lines)


def norms_elsewhere(kind: str) -> str:
    """Return the table of other packages' norms of a kind, from ``elsewhere-norms.json``."""
    results = json.loads((RESULTS / "elsewhere-norms.json").read_text(encoding="utf-8"))
    heads = [
        "norm", "default eps", "ordinary", "massive", "shifted", "width 4,096", "constant rows", "shifted at bfloat16",
        "rounds at bfloat16", "same bits alone", "float32, bfloat16, float16", "measured",
    ]  # fmt: skip
    lines = []
    for row in results["rows"]:
        if row["kind"] == kind:
            lines.append(norm_line(row))
    return markdown(heads, lines)


def norm_line(row: dict[str, Any]) -> list[str]:
    """Return the cells of a norm: errors over PyTorch's own at float32, then what it does at others."""
    wide, half = row["float32"], row["bfloat16"]
    line = [f"{row['package']} {row['version']} `{row['norm']}`", eps_of(row["default_eps"])]
    for rows in ("ordinary", "massive", "shifted", "wide"):
        line.append(ratio_of(wide[rows]) if rows in wide else "raises")
    line.append(f"{wide['constant']['error']:.1g}" if "constant" in wide else "raises")
    line.append(ratio_of(half["shifted"]) if "shifted" in half else "raises")
    line.append(half.get("rounds", "raises"))
    alone = [figures["same_bits_alone"] for figures in (wide, half) if "same_bits_alone" in figures]
    if not alone:
        line.append("raises")
    else:
        line.append("yes" if all(alone) else "no")
    return [*line, ", ".join(row["verdicts"].values()), row["date"]]


def eps_of(eps: float | None) -> str:
    return "none" if eps is None else f"{eps:g}"


def ratio_of(figures: dict[str, float]) -> str:
    """Return an error over PyTorch's own."""
    return f"{figures['error'] / figures['pytorch']:.2g}"


def gpu() -> str:
    """Return the table of parity on a GPU: comparisons and ratios to the noise floor, by dtype and norm."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))["parity"]["rows"]:
        groups.setdefault((row["dtype"], row["norm"]), []).append(row)
    lines = [
        [*key, f"{sum(row['passed'] for row in group)} of {len(group)}", f"{sum(row['bitwise'] for row in group)}",
         f"{max(row['ratio'] for row in group):.4f}"]
        for key, group in groups.items()
    ]  # fmt: skip
    return markdown(["dtype", "norm", "comparisons that hold", "with transformers' bits", "largest ratio"], lines)


def elsewhere_gpt2() -> str:
    """Return the table of GPT-2 in other programs: verdict, error over transformers' own, what is said of it, cause."""
    results = json.loads((RESULTS / "elsewhere-gpt2.json").read_text(encoding="utf-8"))
    lines = []
    for rows in results["rows"].values():
        for row in rows:
            decoding = row["decoding_ratio"]
            one_by_one = "-" if decoding is None else brief(decoding)
            verdict, at = row["verdict"].upper(), row["dtype"]
            name = f"{row['program']}, {row['how']}"
            figures = [brief(row["ratio"]), one_by_one]
            lines.append(
                [name, row["version"], row["date"], f"{verdict} at {at}", *figures, named(row), row["cause"] or "-"]
            )
    heads = ["program", "version", "date", "verdict", "ratio", "one by one", "the report says", "cause, by experiment"]
    return markdown(heads, lines).replace("_", r"\_")


def accounts() -> str:
    """Return the table of what makes the error of files in other programs, from ``elsewhere-gpt2.json``."""
    results = json.loads((RESULTS / "elsewhere-gpt2.json").read_text(encoding="utf-8"))
    lines = []
    for row in itertools.chain.from_iterable(results["rows"].values()):
        account = row.get("account")
        if account is None:
            continue
        line = [f"{row['program']}, {row['how']}"]
        for figure in ("ratio", "kl"):
            line += [brief(account[part][figure]) for part in ("total", "weights", "own")]
        left = (account["own"], *account["steps"])[-1]["ratio"]
        best = f"{brief(account['calm_left'])} of {brief(account['calm_noise'])}"
        best = f"{best} at {account['calm']} of {account['positions']}"
        lines.append([*line, best, f"{brief(left)} of {brief(account['noise'])}" if account["steps"] else "-"])
    heads = [
        "file", "all", "weights", "arithmetic", "KL of all", "of the weights", "of the arithmetic",
        "left where it agrees, of noise", "left in all, of noise",
    ]  # fmt: skip
    return markdown(heads, lines).replace("_", r"\_")


def named(row: dict[str, Any]) -> str:
    """Return what a report says of the cause of an error."""
    if row["verdict"] == "pass":
        return "-"
    return " ".join(row["sentences"]) or "nothing"


if __name__ == "__main__":
    for kind in ("layer_norm", "rms_norm"):
        print(f"{kind} elsewhere\n\n{norms_elsewhere(kind)}\n")
    print(f"elsewhere\n\n{elsewhere_gpt2()}\n")
    print(f"accounts\n\n{accounts()}\n")
    print(f"gpu\n\n{gpu()}\n")
    for level in LEVELS:
        print(f"speed at {level}\n\n{speed(level)}\n")
    print(f"in short\n\n{speed('bf16', IN_SHORT)}\n")
    print(f"attention\n\n{attention()}\n")
    for study in STUDIES:
        print(f"{study}\n\n{of_study(study)}\n")
