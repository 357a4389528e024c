"""What the suite found, as Markdown."""

from collections.abc import Iterable, Iterator
from typing import Any

from gpu import decoding, norms, parity
from minigpt.judge.parity_report import MOST_NOISE

Row = dict[str, Any]
NORM_COLUMNS = ("norm", "computes", "width", "rows", "ms", "gb_per_s", "share_of_copy", "call_ms")
DECODING_COLUMNS = ("decoder", "batch", "call_s", "call_s_least", "call_s_most", "tokens_per_s", "step_ms",
                    "step_over_limit")  # fmt: skip
PARITY_COLUMNS = ("model", "dtype", "attention", "norm", "case", "max_apart", "scale", "rms_error", "floor", "ratio")


def page(results: Row) -> str:
    """All of it: how it went, what was aimed at, and every part's table."""
    return "\n".join([*_head(results), *_goals(results), *_parity(results["parity"]), *_decoding(results["decoding"]),
                      *_norms(results["norms"]), *_sanitizer(results["sanitizer"])]) + "\n"  # fmt: skip


def goals(results: Row) -> list[Row]:
    """What was aimed at, as far as it was measured."""
    bits = [row for row in results["parity"].get("rows", ()) if row["norm"] == "fused" and row["dtype"] == "float32"
            and row["case"] != "gradients"]  # fmt: skip
    same = sum(row["bitwise"] for row in bits)
    first = [{"goal": "float32 logits with fused norms, bit for bit those of transformers: share of all cases",
              "measured": same / len(bits), "met": same == len(bits)}] if bits else []  # fmt: skip
    return [*first, *decoding.goals(results["decoding"]), *norms.goals(results["norms"])]


def _head(results: Row) -> Iterator[str]:
    told = results["environment"]
    yield f"# {told['hardware']}"
    yield ""
    yield from table([{"what": name, "value": value} for name, value in told.items()], ("what", "value"))
    yield ""
    parts = [{"part": name} | how for name, how in results["parts"].items()]
    yield from table(parts, ("part", "seconds", "finished", "stopped_before", "error"))
    yield ""


def _goals(results: Row) -> Iterator[str]:
    yield from ("## What was aimed at", "", *table(goals(results), ("goal", "measured", "met")), "")


def _parity(results: Row) -> Iterator[str]:
    rows, failed = results.get("rows", []), parity.failures(results)
    yield from ("## Parity with transformers", "")
    yield (f"{len(rows) - len(failed)} of {len(rows)} comparisons hold: the error against float64 is at most "
           f"{MOST_NOISE:g} times transformers' own, and with fused norms the logits are the same bits.")  # fmt: skip
    yield ""
    if failed:
        yield from ("These do not:", "", *table(failed, PARITY_COLUMNS), "")
    yield from (*table(parity.summary(results)), "")
    unable = {(row["dtype"], row["attention"], row["case"]): row["why"] for row in results.get("unable", ())}
    if unable:
        lines = [
            dict(zip(("dtype", "attention", "case"), place, strict=True), why=why) for place, why in unable.items()
        ]
        yield from ("Attention that cannot compute a case here:", "", *table(lines), "")


def _decoding(results: Row) -> Iterator[str]:
    yield from ("## Decoding", "")
    if results:
        yield (f"GPT-2 124M in {results['dtype']}, {results['prompt_tokens']} prompt tokens and "
               f"{results['new_tokens']} new ones, greedy; medians of whole calls, taken in turns. A copy moves "
               f"{results['copy_gb_per_s']:.4g} GB/s; at that rate the weights, "
               f"{results['weight_bytes'] / 1e6:.4g} MB, are read in {results['limit_ms']:.4g} ms. A call reads the "
               "prompt too, and whoever replays a graph records it in every call anew, ours and transformers' alike; "
               "a step is timed without that.")  # fmt: skip
        yield from ("", *table(results["rows"], DECODING_COLUMNS), "")
        yield from (f"{name} could not run: {why}" for name, why in results["absent"].items())
        yield ""


def _norms(results: Row) -> Iterator[str]:
    yield from ("## Norms", "", *table(results.get("rows", []), NORM_COLUMNS), "")
    yield from (f"{name} was left out: {why}" for name, why in results.get("absent", {}).items())
    yield ""


def _sanitizer(results: Row) -> Iterator[str]:
    yield from ("## compute-sanitizer over the kernels' tests", "")
    yield from table(results.get("rows", []), ("check", "clean", "seconds", "said"))
    yield results.get("why", "")


def table(rows: Iterable[Row], columns: Iterable[str] | None = None) -> list[str]:
    """A Markdown table; by default of the first row's columns."""
    rows = list(rows)
    if not rows:
        return ["Nothing was measured."]
    columns = list(columns or rows[0])
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")
