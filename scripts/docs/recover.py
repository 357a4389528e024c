"""Print the tables of docs/study.md from the kept results of the studies in configs/studies, and draw its picture.

python scripts/docs/recover.py     # needs minigpt[page] and writes docs/images/recover.svg
"""

import json
from pathlib import Path

from minigpt.study.table import FINAL, SWAPPED, TRAINED, Row, over_seeds, said, shown

DOCS = Path(__file__).parents[2] / "docs"
AT_THE_SWAP = ("kl_mean", "kl_median", "top1_agreement", "perplexity_after")
AFTER = ("loss", "over_baseline", "perplexity_recovered", "kl_recovered", "entropy", "calibration_error")
STUDIES = {"swap": AT_THE_SWAP, "centred": ("ratio", *AT_THE_SWAP), "one-site": AT_THE_SWAP, "recover": AFTER,
           "remove-layernorm": AFTER, "distil": AFTER[:-1], "seeds": AFTER}  # fmt: skip
FORMS = SWAPPED | TRAINED | FINAL


def rows(study: str) -> list[Row]:
    """Return the kept rows of a study."""
    lines = (DOCS / "results" / f"study-{study}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(study: str) -> str:
    """Return a study as a Markdown table: what varies, then its most telling figures."""
    cells, names = over_seeds(rows(study))
    heads = [*(name.replace("_", " ") for name in names), *(FORMS[name][0] for name in STUDIES[study])]
    lines = [heads, ["---"] * len(heads)]
    for cell in cells:
        figures = (shown(cell[name], FORMS[name][1]) for name in STUDIES[study])
        lines.append([*(said(cell.get(name)) for name in names), *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("*", r"\*")


def picture(path: Path) -> None:
    """Draw the held-out loss of DyT, as it is and fitted, and of frozen norms, against the steps."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "minigpt"  # the same bytes every time
    plain, dyt, fitted = rows("recover")
    frozen = rows("remove-layernorm")[-1]
    curves = {"DyT, as it is": dyt, "DyT, fitted": fitted, "frozen, by schedule": frozen, "LayerNorm": plain}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for (name, row), style in zip(curves.items(), (":", "-", "--", "-."), strict=True):
        axes.plot(*zip(*row["eval_losses"], strict=True), style, label=name)
    axes.set(yscale="log", xlabel="step", ylabel="held-out loss, nats a token", xlim=(0, 300))
    axes.set_yticks([0.25, 0.5, 1, 2, 5], ["0.25", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    picture(DOCS / "images" / "recover.svg")
    for study in STUDIES:
        print(f"{study}\n\n{table(study)}\n")
