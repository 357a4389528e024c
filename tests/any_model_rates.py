"""How often a diagnosis names the mistake of a port of another architecture: planted ones, right programs, and pairs.

python tests/any_model_rates.py --json docs/results/any-model.json

The ports are those of ``ported.py``, of tiny random models. It takes about half an hour on one idle core.
"""

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import typer

TESTS = Path(__file__).parent
sys.path += [str(TESTS), str(TESTS.parent / "scripts")]

import ported  # noqa: E402
from bench.results import JsonFile, show  # noqa: E402
from diagnosis_rates import DTYPES, Row, diagnose, result_of, row  # noqa: E402

from minigpt import Original  # noqa: E402
from minigpt.bench.generate import environment  # noqa: E402
from minigpt.report.noise import MOST_NOISE  # noqa: E402

FOLDER = tempfile.TemporaryDirectory()


@cache
def original_of(family: str, dtype: str) -> Original:
    place = Path(FOLDER.name) / family
    if not place.exists():
        ported.random_family(family, place)
    return Original(place, prompts=ported.PROMPTS, max_new_tokens=8, device="cpu", dtype=dtype)


def told(name: str, one: Row) -> Row:
    print(name, one, file=sys.stderr, flush=True)
    return one


def ask(family: str, dtype: str, program: Any, expected: tuple[str, ...]) -> Row:
    ratio, seconds, found = diagnose(original_of(family, dtype), program)
    result = result_of(ratio, found, expected) if expected or ratio <= MOST_NOISE or not found else "named wrongly"
    one = row(ratio, seconds, found, result)
    return told(f"{family}, {dtype}", {name: one[name] for name in ("result", "ratio", "named")})


def singles(dtype: str) -> dict[str, Row]:
    rows = {}
    for family, words, settings in ported.single_plants():
        port = ported.Port(original_of(family, dtype).truth.facts.place, getattr(torch, dtype), **settings)
        rows[f"{family}: {words}"] = ask(family, dtype, port, (words,))
    return rows


def pairs(dtype: str) -> dict[str, Row]:
    rows = {}
    for family, first, second, *words in ported.PAIRS:
        port = ported.Port(original_of(family, dtype).truth.facts.place, getattr(torch, dtype), **first, **second)
        name = f"{family}: {' + '.join(words)}"
        rows[name] = ask(family, dtype, port, tuple(words))
    return rows


def rights(dtype: str) -> dict[str, Row]:
    rows = {}
    for family, name, make in ported.right_programs():
        program = make(original_of(family, dtype).truth.facts.place, getattr(torch, dtype))
        rows[f"{family}: {name}"] = ask(family, dtype, program, ())
    return rows


MEASURES = {"singles": singles, "rights": rights, "pairs": pairs}


def main(dtype: list[str] | None = None, kind: list[str] | None = None, json_file: JsonFile = None) -> None:
    torch.set_num_threads(1)
    results: Row = {"model": "tiny random models", "environment": environment("transformers")}
    for name in dtype or DTYPES:
        results[name] = {kind_name: MEASURES[kind_name](name) for kind_name in kind or MEASURES}
    show(results, json_file)


if __name__ == "__main__":
    typer.run(main)
