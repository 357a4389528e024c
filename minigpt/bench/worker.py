"""One contestant in a process of its own, so that its memory is its own: python -m minigpt.bench.worker SPEC.

SPEC is JSON: name, kind, folder, prompts, new and, for ours, how it is to be. It answers "ready" once it has loaded,
then to every line of its standard input with what it measured, and at the end of that with its peak memory: each answer
is a line of JSON.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

OURS = ("minigpt", "products")


def main() -> None:
    from minigpt.errors import MiniGPTError

    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
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
        settle_memory()  # as our command line does, when all is imported
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
    yield {"peak_mb": peak_mb(), "compilations": _compilations()}


def peak_mb() -> float:
    """Most memory that this process has held, mapped files that it read included."""
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
