"""How often the kit and the judge are right: planted faults, right norms, and sums in another order.

python tests/rates.py --json docs/results/rates.json

The plants are those of ``plants.py``. It takes about a quarter of an hour on one idle core.
"""

import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

TESTS = Path(__file__).parent
sys.path += [str(TESTS), str(TESTS / "conformance"), str(TESTS.parent / "scripts")]

import packages  # noqa: E402
import sabotages  # noqa: E402
from bench.results import JsonFile, show  # noqa: E402
from plants import FAST, GRADIENTS, OF_PACKAGES, Plant, plants  # noqa: E402

from minigpt import LayerNorm, Original  # noqa: E402
from minigpt.bench.generate import environment  # noqa: E402
from minigpt.conformance import check_norm  # noqa: E402
from minigpt.conformance.found import UNKNOWN  # noqa: E402

DTYPES = ("float32", "bfloat16", "float16")
TYPES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
KINDS = {  # of faults, by how the name of one begins
    "gradients": "the gradient of|its backward|.*incoming gradient",
    "rounding": "it computes in too few bits|it rounds|its results are cut",
    "calls and modes": "it (remembers|answers|keeps|is right for the first|modifies|differs under)|its (next|values)",
    "some inputs": "wrong (only|with)|a row depends",
    "what it raises": ".*(raise|changes the dtype|given )",
    "formula": "",
}
OF_LAYER_NORM = {  # plants that are right in an RMSNorm, or that make it a LayerNorm
    "HalfTheMean", "NoMean", "DifferenceOfSquares", "DetachedMean", "NarrowScaling", "RowRounded",
    "StatisticsByShape", "group_of_sequence", "one_fewer", "tiles", "lanes", "merged", "quarters", "of_output",
    *(norm.__name__ for norm in packages.FORMULAS),
}  # fmt: skip
NAMES_OF_RMS_NORM = {  # a LayerNorm still subtracts a mean, and rounds once
    "ConstantDeviation": ("each value is computed by itself",),
    "ReciprocalRounded": tuple(f"{narrow}: 1 / sqrt(mean square) is rounded" for narrow in sabotages.NARROW),
    "ReciprocalInHalf": (f"{sabotages.OF_INPUT}1 / sqrt(mean square) is rounded to bfloat16",),
    "StatisticsOfTheInput": tuple(f"{narrow}: the mean square is rounded" for narrow in sabotages.NARROW),
}
AT = {  # where the name of a fault does not say at which dtypes alone it shows
    "SummedInHalf": {"bfloat16", "float16"},
    "ReciprocalInHalf": {*DTYPES},
    "RowInHalf": {*DTYPES},
    "ReturnsFloat32": {"bfloat16", "float16"},
    "flax": {"bfloat16", "float16"},
    "overwrites in half": {"bfloat16", "float16"},
    "ModifiesItsInput": {*DTYPES},
    "BFloat16Throughout": {*DTYPES},
    "WrongInHalfAndBackward": {*DTYPES},
    "standardize": {*DTYPES},
}
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {  # of the sum of a row
    "pieces of 5": lambda x: sum((piece.sum(-1, keepdim=True) for piece in x.split(5, -1)), torch.zeros(())),
    "from the end": lambda x: x.flip(-1).sum(-1, keepdim=True),
    "one by one": lambda x: sum((one[..., None] for one in x.unbind(-1)), torch.zeros(())),
    "every second": lambda x: x[..., ::2].sum(-1, keepdim=True) + x[..., 1::2].sum(-1, keepdim=True),
    "float64": lambda x: x.double().sum(-1, keepdim=True).to(x.dtype),
}
RERUNS = 100


def every_plant() -> Iterator[Plant]:
    """Yield the faults of the tests. They are RMSNorms in ``sabotages.as_rms_norms``."""
    for plant in plants():
        more = ["behaviour"] if plant.cases == GRADIENTS else []
        yield plant._replace(cases=FAST if plant.cases == OF_PACKAGES else [*plant.cases, *more])
    expected = (f"{sabotages.OF_BIAS}wrong only at numbers of rows 65,536, 65,537",)
    yield Plant("LosesAnEighth", sabotages.LosesAnEighth, ["gradients, *"], expected)


def faults(kind: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Count the plants in norms of a kind: how many are caught at each dtype, named, and named as another mistake."""
    is_rms, missed = kind == "rms_norm", list[dict[str, str]]()
    counts = defaultdict[str, dict[str, list[int]]](lambda: {dtype: [0, 0, 0, 0] for dtype in DTYPES})
    with sabotages.as_rms_norms() if is_rms else nullcontext():
        for name, norm, cases, starts, *_ in every_plant():
            expected = tuple(start for one in starts for start in ([one] if isinstance(one, str) else one))
            if is_rms and name in OF_LAYER_NORM:
                continue
            if is_rms:
                norm, expected = sabotages.rms_norm_of(norm), NAMES_OF_RMS_NORM.get(name, expected)
            report = check_norm(norm, kind=kind, device="cpu", cases=cases, seed=0)
            told = re.findall("float32|bfloat16|float16|float64", " ".join(expected))
            group = next(group for group, words in KINDS.items() if re.match(words, expected[0]))
            say(f"{kind} {name}: {report.dtypes} {report.diagnoses[:1]}")
            for dtype in DTYPES:
                if dtype not in AT.get(name, told or DTYPES) or dtype not in report.dtypes:
                    continue
                caught, first = not report.dtypes[dtype], next(iter(report.diagnoses_at(dtype)), "")
                has_name, is_right = caught and UNKNOWN not in first, first.startswith(expected)
                figures = (1, caught, has_name and is_right, has_name and not is_right)
                counts[group][dtype] = [a + b for a, b in zip(counts[group][dtype], figures, strict=True)]
                if not caught or (has_name and not is_right):
                    missed.append({"fault": name, "dtype": dtype, "diagnosis": first})
    return {"counts": counts, "missed": missed}


def alarms(kind: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Count the right norms of a kind that fail the kit at each dtype."""
    import test_public_styles as styles

    right = styles.RIGHT_RMS
    if kind == "layer_norm":
        orders = [norm for norm in packages.ORDERS if norm.__name__ != "kahan"]  # a loop in Python, which takes long
        right = [*styles.RIGHT, *styles.RIGHT_BUT_AT_FLOAT64, packages.SERIAL, *orders]
    failed: dict[str, list[str]] = {dtype: [] for dtype in DTYPES}
    for norm in right:
        report = check_norm(norm, kind=kind, device="cpu", cases=["widths", *FAST])
        say(f"{kind} {styles.name_of(norm)}: {report.dtypes} {report.diagnoses}")
        for dtype in DTYPES:
            failed[dtype] += [styles.name_of(norm)] * (not report.dtypes[dtype])
    return {"norms": len(right), "failed": failed}


def reordered(order: str, kind: str) -> type[LayerNorm]:
    """Return a right norm that adds in another order."""

    def standardize(self: Any, x: Tensor) -> Tensor:
        mean = lambda x: ORDERS[order](x) / x.shape[-1]  # noqa: E731
        x = x - mean(x) if kind == "layer_norm" else x
        return x / torch.sqrt(mean(x * x) + self.eps)

    return type("Reordered", (LayerNorm,), {"standardize": standardize, "exact": kind})


def random_model(kind: str, seed: int) -> Any:
    """Return a small GPT-2, or a small Llama for RMSNorms, whose weights are random."""
    import architectures

    if kind == "layer_norm":
        return architectures.random_model("gpt2", seed, n_positions=64)
    return architectures.random_model("llama", seed, max_position_embeddings=64, pad_token_id=None)


def reorders(kind: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Count how often a right norm that adds in another order fails parity, at two dtypes."""
    results = {}
    for dtype in DTYPES[:2]:
        failed, ratios = [], []
        for seed in range(RERUNS):
            torch.set_num_threads(1 + seed % 2)
            with tempfile.TemporaryDirectory() as place:
                random_model(kind, seed).save_pretrained(place)
                prompts = [torch.randint(96, (length,)).tolist() for length in (9, 17, 30)]
                original = Original(place, dtype=dtype, device="cpu", prompts=prompts, max_new_tokens=6)
                order = [*ORDERS][seed % len(ORDERS)]
                report = original.judge(norm=reordered(order, kind), device="cpu")
            ratios.append(report.logits.ratio)
            if report.outcome != "PASS":
                failed.append(f"seed {seed}, {order}: {report.reasons[0]}")
        say(f"{kind} {dtype}: {failed}")
        results[dtype] = {"reruns": RERUNS, "failed": failed, "largest_ratio": max(ratios)}
    torch.set_num_threads(1)
    return results


def table(results: dict[str, Any]) -> str:
    """Return the rates as a table in Markdown."""
    lines = [["", "", *DTYPES], ["---"] * 5]
    for kind, title in TYPES.items():
        for group, at in sorted(results["faults"][kind]["counts"].items()):
            cells = ["{1} of {0}, {2}, {3}".format(*at[dtype]) if at[dtype][0] else "" for dtype in DTYPES]
            lines.append([f"faults in {title}s", group, *cells])
    for kind, title in TYPES.items():
        one = results["alarms"][kind]
        lines.append([f"right {title}s that fail", "", *(f"{len(one['failed'][d])} of {one['norms']}" for d in DTYPES)])
    for kind, title in TYPES.items():
        by = results["reorders"][kind]
        cells = [f"{len(by[d]['failed'])} of {by[d]['reruns']}" if d in by else "" for d in DTYPES]
        lines.append([f"right {title}s in another order of sums that fail parity", "", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(json_file: JsonFile = None) -> None:
    say = partial(print, file=sys.stderr, flush=True)
    results: dict[str, Any] = {"environment": environment("transformers")}
    for part in (faults, alarms, reorders):
        results[part.__name__] = {kind: part(kind, say) for kind in TYPES}
    show(results, json_file)


if __name__ == "__main__":
    typer.run(main)
