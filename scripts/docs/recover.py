"""Print what the demo recovers after a swap, as Markdown tables, from the kept results of ``minigpt study``.

python scripts/docs/recover.py
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STUDIES = {"at once": "recover-at-once.jsonl", "by schedule": "recover-by-schedule.jsonl"}


def cells(file: str) -> dict[str, dict[str, Any]]:
    """Return the cells of a study by their norms."""
    lines = (RESULTS / file).read_text(encoding="utf-8").splitlines()
    return {cell["norm"]: cell for cell in map(json.loads, lines)}


def table() -> str:
    """Return the held-out loss of each norm at some steps, and the perplexity at the end."""
    studies = {name: cells(file) for name, file in STUDIES.items()}
    steps = [step for step, _ in next(iter(studies["at once"].values()))["eval_losses"]]
    lines = [
        f"| norm, swapped | {' | '.join(f'step {step}' for step in steps)} | perplexity |",
        "| --- " * (len(steps) + 2) + "|",
    ]
    for norm in studies["at once"]:
        for name, study in studies.items():
            if norm == "fused" and name == "by schedule":
                continue  # it is the same run
            cell = study[norm]
            losses = " | ".join(f"{loss:.3f}" for _, loss in cell["eval_losses"])
            label = "fused, the baseline" if norm == "fused" else f"{norm}, {name}"
            lines.append(f"| {label} | {losses} | {cell['perplexity_recovered']:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
