"""Run one contestant in a separate process, which measures its memory too: python -m minigpt.bench.worker SPEC.

SPEC is JSON: name, kind, folder, prompts, new and how, the arguments of that contestant alone. Each answer is a line of
JSON. The first says "ready" after loading. Then every line of standard input is answered with a measurement. When the
input ends, the last answer is the peak memory.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

OURS = ("minigpt", "undrafted", "products")


def main() -> None:
    from minigpt.errors import MiniGPTError

    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    try:
        for answer in _answers(json.loads(sys.argv[1])):
            print(json.dumps(answer), file=answers, flush=True)
    except MiniGPTError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)


def _answers(spec: dict[str, Any]) -> Any:
    import torch

    bare_mb = peak_mb()
    from minigpt.bench.contestants import CONTESTANTS, require_all
    from minigpt.process import settle_memory

    if spec["name"] in OURS:
        settle_memory()  # as the command line does
    contestant = CONTESTANTS[spec["name"]](spec["folder"], spec["prompts"], spec["kind"], **spec["how"])
    rows, new = len(spec["prompts"]), spec["new"]
    contestant.generate(2)  # warm
    yield {"ready": True, "threads": torch.get_num_threads(), "bare_mb": bare_mb, "decoding": contestant.decoding}
    for _ in sys.stdin:
        measured = {"prefill_ms": _milliseconds(contestant.prefill)}
        measured["first_token_ms"] = _milliseconds(lambda: contestant.generate(1))
        start, start_cpu = time.perf_counter(), time.process_time()
        made = contestant.generate(new)
        measured["total_ms"] = 1000 * (time.perf_counter() - start)
        measured["total_cpu_ms"] = 1000 * (time.process_time() - start_cpu)
        require_all(made, rows * new, spec["name"])
        yield measured
    drafts = {name: getattr(contestant, name, 0) for name in ("drafted", "accepted")}
    yield {"peak_mb": peak_mb(), "compilations": _compilations()} | drafts


def peak_mb() -> float:
    """Return the most memory that this process has used, with the mapped files that it read."""
    if (status := Path("/proc/self/status")).exists():  # where getrusage would count the parent's memory in
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _milliseconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def _compilations() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    main()
