"""Print the tables of speed and of the studies in Markdown, from the kept results in docs/results.

python scripts/docs/tables.py
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from minigpt.study.study import CellRow
from minigpt.study.table import format_figure, format_setting, summarize

GGML_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}  # our kinds, and llama.cpp's names
RESULTS = Path(__file__).parents[2] / "docs" / "results"
TIMED = {  # a row: its result, and which of our contestants
    "one text, float32": ("float32", "undrafted"), "one text, float32, drafts": ("float32", "minigpt"),
    "one text, bfloat16": ("bfloat16", "undrafted"), "one text, bfloat16, drafts": ("bfloat16", "minigpt"),
    "one text, int8": ("int8", "minigpt"),
    **{f"16 texts, {kind}": (f"{kind}-16", "minigpt") for kind in GGML_TYPES},
}  # fmt: skip
PEERS = ("transformers", "ctranslate2", "llama.cpp")
SPEED_HEADS = ["tokens a second, prompt included", "minigpt", "transformers", "CTranslate2", "llama.cpp"]
READ_HEADS = ["reading 512 tokens, ms", "minigpt", "transformers", "llama.cpp"]
AT_THE_SWAP = ("kl_mean", "kl_median", "top1_agreement", "perplexity_after")
AFTER = ("loss", "over_baseline", "perplexity_recovered", "kl_recovered", "entropy")
STUDIES = {"swap": AT_THE_SWAP, "centred": ("ratio", *AT_THE_SWAP), "one-site": AT_THE_SWAP, "recover": AFTER,
           "remove-layernorm": AFTER, "distil": AFTER, "seeds": AFTER, "thirds": AFTER[:3],
           "recipes": AFTER[:4], "order": AFTER[:4], "lora": AFTER[:4]}  # fmt: skip


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def timed(name: str) -> dict[str, Any]:
    """Return a result of ``minigpt bench generate``, its contestants by name."""
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return report | {"contestants": {one["name"]: one for one in report["contestants"]}}


def figure(report: dict[str, Any], name: str, phase: str, format: str) -> str:
    """Return a contestant's figure, with its kind where that is another than ours; "" if it was not timed."""
    ours = report["plan"]["kind"]
    if (one := report["contestants"].get(name)) is None:
        return ""
    number = one[phase] if isinstance(one[phase], float) else one[phase]["median"]
    return f"{number:{format}}" + ("" if one["kind"] in (ours, GGML_TYPES[ours]) else f" ({one['kind']})")


def speed() -> str:
    """Return the table of ``minigpt bench generate``."""
    lines = []
    for label, (name, ours) in TIMED.items():
        report = timed(f"generate-cpu-zen4-{name}")
        lines.append([label, *(figure(report, one, "tokens_per_second", ".1f") for one in (ours, *PEERS))])
    return markdown(SPEED_HEADS, lines)


def reading() -> str:
    """Return the table of reading a prompt."""
    reports = {kind: timed(f"read-cpu-zen4-{kind}") for kind in GGML_TYPES}
    names = ("minigpt", "transformers", "llama.cpp")
    lines = [[kind, *(figure(report, name, "prefill_ms", ".0f") for name in names)] for kind, report in reports.items()]
    return markdown(READ_HEADS, lines)


def rows(study: str) -> list[CellRow]:
    """Return the kept rows of a study."""
    return [json.loads(line) for line in (RESULTS / f"study-{study}.jsonl").read_text(encoding="utf-8").splitlines()]


def of_study(study: str) -> str:
    """Return the table of a study: what varies, then its most telling figures."""
    table, figures = summarize(rows(study)), STUDIES[study]
    heads = [*(name.replace("_", " ") for name in table.varying), *map(table.head, figures)]
    lines = [
        [*(format_setting(cell.settings.get(name)) for name in table.varying),
         *(format_figure(cell.figures[name], table.columns[name]) for name in figures)]
        for cell in table.cells
    ]  # fmt: skip
    return markdown(heads, lines).replace("*", r"\*")


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


if __name__ == "__main__":
    print(f"gpu\n\n{gpu()}\n")
    print(f"speed\n\n{speed()}\n\n{reading()}\n")
    print(f"attention\n\n{attention()}\n")
    for study in STUDIES:
        print(f"{study}\n\n{of_study(study)}\n")
