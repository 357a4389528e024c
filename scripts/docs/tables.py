"""Print the tables of speed and of the studies in Markdown, from the kept results in docs/results.

python scripts/docs/tables.py
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from minigpt.study.study import CellRow
from minigpt.study.table import FINAL, SWAPPED, TRAINED, over_seeds, shown, worded

GGML_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}  # our kinds, and llama.cpp's names
RESULTS = Path(__file__).parents[2] / "docs" / "results"
TIMED = {
    "one text, float32": "float32", "one text, bfloat16": "bfloat16", "one text, int8": "int8",
    "16 texts, float32": "float32-16", "16 texts, bfloat16": "bfloat16-16",
    "16 texts, int8": "int8-16",
}  # fmt: skip
SPEED_HEADS = ["tokens a second, prompt included", "minigpt", "transformers", "CTranslate2", "llama.cpp",
               "decoding, share of memory's limit"]  # fmt: skip
AT_THE_SWAP = ("kl_mean", "kl_median", "top1_agreement", "perplexity_after")
AFTER = ("loss", "over_baseline", "perplexity_recovered", "kl_recovered", "entropy", "calibration_error")
STUDIES = {"swap": AT_THE_SWAP, "centred": ("ratio", *AT_THE_SWAP), "one-site": AT_THE_SWAP, "recover": AFTER,
           "remove-layernorm": AFTER, "distil": AFTER[:-1], "seeds": AFTER, "thirds": AFTER[:3],
           "recipes": AFTER[:4], "order": AFTER[:4]}  # fmt: skip
COLUMNS = SWAPPED | TRAINED | FINAL


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def tokens_a_second(report: dict[str, Any], name: str) -> str:
    """Return a contestant's new tokens a second, with its kind where that is another than ours."""
    found = next((other for other in report["contestants"] if other["name"] == name), None)
    if found is None:
        return ""
    plan = report["plan"]
    speed = plan["batch"] * plan["new_tokens"] / found["total_ms"]["median"] * 1000
    is_same = found["kind"] in (plan["kind"], GGML_TYPES[plan["kind"]])
    return f"{speed:.1f}" + ("" if is_same else f" ({found['kind']})")


def speed() -> str:
    """Return the table of ``minigpt bench generate``."""
    lines = []
    for label, name in TIMED.items():
        report = json.loads((RESULTS / f"generate-cpu-zen4-{name}.json").read_text(encoding="utf-8"))
        speeds = [tokens_a_second(report, name) for name in ("minigpt", "transformers", "ctranslate2", "llama.cpp")]
        lines.append([label, *speeds, f"{report['share_of_limit']['by_memory']:.0%}"])
    return markdown(SPEED_HEADS, lines)


def rows(study: str) -> list[CellRow]:
    """Return the kept rows of a study."""
    return [json.loads(line) for line in (RESULTS / f"study-{study}.jsonl").read_text(encoding="utf-8").splitlines()]


def of_study(study: str) -> str:
    """Return the table of a study: what varies, then its most telling figures."""
    cells, names = over_seeds(rows(study))
    heads = [*(name.replace("_", " ") for name in names), *(COLUMNS[name].title for name in STUDIES[study])]
    lines = [
        [*(worded(cell.get(name)) for name in names), *(shown(cell[name], COLUMNS[name]) for name in STUDIES[study])]
        for cell in cells
    ]
    return markdown(heads, lines).replace("*", r"\*")


def attention() -> str:
    """Return the table of ``minigpt parity --attention-maps``: sinks, and the entropy of each layer's heads."""
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


if __name__ == "__main__":
    print(f"speed\n\n{speed()}\n")
    print(f"attention\n\n{attention()}\n")
    for study in STUDIES:
        print(f"{study}\n\n{of_study(study)}\n")
