"""How often a diagnosis names the mistake of a GPT-2: planted ones, right programs, and pairs of mistakes.

python tests/diagnosis_rates.py --json docs/results/diagnosis.json

The plants are those of ``planted.py``. It takes about fifteen minutes on one idle core.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import typer

TESTS = Path(__file__).parent
sys.path += [str(TESTS), str(TESTS.parent / "scripts")]

import planted  # noqa: E402
from bench.results import JsonFile, show  # noqa: E402

from minigpt import Original  # noqa: E402
from minigpt.bench.generate import environment  # noqa: E402
from minigpt.judge.candidate import candidate_of  # noqa: E402
from minigpt.judge.diagnosis import find_mistakes  # noqa: E402
from minigpt.judge.evidence import Sums  # noqa: E402
from minigpt.judge.reference import judging  # noqa: E402
from minigpt.progress import Steps  # noqa: E402
from minigpt.report.fields import Diagnosed  # noqa: E402
from minigpt.report.noise import MOST_NOISE  # noqa: E402

DTYPES = ("float32", "bfloat16")
TITLES = {"singles": "one mistake", "rights": "no mistake", "pairs": "two or three mistakes"}
Row = dict[str, Any]


def diagnose(original: Original, program: Any) -> tuple[float, float, list[Diagnosed]]:
    """Return a program's error over the noise floor, the seconds of a diagnosis, and what it finds."""
    with judging():
        runner, sums = candidate_of(original.truth, program).runner, Sums()
        for prompt in original.truth.texts.prompts:
            sums.add(runner.logits(prompt).double() - original.truth.logits(prompt))
        begun = time.perf_counter()
        found, _ = find_mistakes(original.truth, runner, Steps(None))
    return sums.rms / original.truth.floor.prompts.rms, time.perf_counter() - begun, found


def row(ratio: float, seconds: float, found: list[Diagnosed], result: str) -> Row:
    names = [one.mistake for one in found]
    return {"result": result, "ratio": ratio, "seconds": round(seconds, 1), "named": names}


def result_of(ratio: float, found: list[Diagnosed], expected: tuple[str, ...]) -> str:
    """Return "passes", "named", "named in part", "not named" or "named wrongly"."""
    if ratio <= MOST_NOISE:
        return "passes"
    if not found:
        return "not named"
    named = [one.mistake for one in found]
    right = [words for words in expected if any(words in name for name in named)]
    if len(right) == len(expected) == len(named):
        return "named"
    if len(right) == len(named):
        return "named in part"
    return "named wrongly"


def singles(original: Original, dtype: torch.dtype) -> dict[str, Row]:
    rows = {}
    for words, settings in planted.single_plants(original.truth):
        program = planted.Program(original.truth.facts.place, dtype, **settings)
        ratio, seconds, found = diagnose(original, lambda ids, program=program: program(ids))
        rows[words] = row(ratio, seconds, found, result_of(ratio, found, (words,)))
        print(words, rows[words], file=sys.stderr, flush=True)
    return rows


def rights(original: Original, dtype: torch.dtype) -> dict[str, Row]:
    rows = {}
    for name, make in planted.right_programs(original.truth.facts.place):
        ratio, seconds, found = diagnose(original, make())
        result = "named wrongly" if found else "not named"
        rows[name] = row(ratio, seconds, found, "passes" if ratio <= MOST_NOISE else result)
        print(name, rows[name], file=sys.stderr, flush=True)
    return rows


def pairs(original: Original, dtype: torch.dtype) -> dict[str, Row]:
    rows = {}
    for first, second, *words in planted.PAIRS:
        program = planted.Program(original.truth.facts.place, dtype, **first, **second)
        ratio, seconds, found = diagnose(original, lambda ids, program=program: program(ids))
        name = " + ".join(words)
        rows[name] = row(ratio, seconds, found, result_of(ratio, found, tuple(words)))
        print(name, rows[name], file=sys.stderr, flush=True)
    return rows


def counts(rows: dict[str, Row]) -> str:
    """Return how many programs there are, and of those that fail how many are named, in part, and wrongly."""
    results = [one["result"] for one in rows.values()]
    if not results:
        return "not measured"
    failing = [result for result in results if result != "passes"]
    named, part, wrong = (failing.count(name) for name in ("named", "named in part", "named wrongly"))
    return f"{len(results)} programs, {len(failing)} fail: {named} named, {part} in part, {wrong} wrongly"


def table(results: Row) -> str:
    """Return the rates as a table in Markdown."""
    lines = [["planted", *DTYPES], ["---"] * (1 + len(DTYPES))]
    for kind, title in TITLES.items():
        lines.append([title, *(counts(results[dtype].get(kind, {})) for dtype in DTYPES)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(
    source: str = "demo", dtype: list[str] | None = None, kind: list[str] | None = None, json_file: JsonFile = None
) -> None:
    torch.set_num_threads(1)
    results: Row = {"model": source, "environment": environment("transformers")}
    for name in dtype or DTYPES:
        original = Original(source, device="cpu", dtype=name)
        parts = {}
        for measure in (singles, rights, pairs):
            if measure.__name__ in (kind or TITLES):
                parts[measure.__name__] = measure(original, getattr(torch, name))
        results[name] = parts
    show(results, json_file)


if __name__ == "__main__":
    typer.run(main)
