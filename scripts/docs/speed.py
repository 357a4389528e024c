"""Print the table of speed in Markdown, from the kept results of ``minigpt bench generate``.

python scripts/docs/speed.py
"""

import json
from pathlib import Path
from typing import Any

from minigpt.bench.llama import GGML_TYPES

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ROWS = {
    "one text, float32": "generate-cpu-zen4-float32.json",
    "one text, bfloat16": "generate-cpu-zen4-bfloat16.json",
    "one text, int8": "generate-cpu-zen4-int8.json",
    "16 texts, float32": "generate-cpu-zen4-float32-16.json",
    "16 texts, bfloat16": "generate-cpu-zen4-bfloat16-16.json",
}
HEAD = (
    "| tokens a second, prompt included | minigpt | transformers | CTranslate2 | llama.cpp "
    "| decoding, share of memory's limit |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def tokens_a_second(report: dict[str, Any], name: str) -> str:
    """Return a contestant's new tokens a second, with its kind where that is another than ours."""
    found = next((other for other in report["contestants"] if other["name"] == name), None)
    if found is None:
        return ""
    plan = report["plan"]
    speed = plan["batch"] * plan["new_tokens"] / found["total_ms"]["median"] * 1000
    is_same = found["kind"] in (plan["kind"], GGML_TYPES[plan["kind"]])
    kind = "" if is_same else f" ({found['kind']})"
    return f"{speed:.1f}{kind}"


def table() -> str:
    """Return the table."""
    lines = [HEAD]
    for label, file in ROWS.items():
        report = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        speeds = [tokens_a_second(report, name) for name in ("minigpt", "transformers", "ctranslate2", "llama.cpp")]
        lines.append(f"| {label} | {' | '.join(speeds)} | {report['share_of_limit']['by_memory']:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
