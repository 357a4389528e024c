"""A process that writes on from prompts by ``complete``, whenever it is sent a line, and says how long that took."""

import json
import sys
import time

from minigpt.bench.contestants import writer
from minigpt.generation import complete
from minigpt.process import settle_memory
from minigpt.tokenizer import Tokenizer


def main() -> None:
    """Print [seconds, tokens] for each line of standard input."""
    spec, places = json.loads(sys.argv[1]), int(sys.argv[2])
    settle_memory()
    model = writer(spec["folder"], spec["kind"])
    tokenizer = Tokenizer.from_pretrained(spec["folder"])
    for _ in sys.stdin:
        began = time.perf_counter()
        texts = list(complete(model, tokenizer, spec["prompts"], batch_size=places, max_new_tokens=spec["new"]))
        print(json.dumps([time.perf_counter() - began, sum(len(text.ids) for text in texts)]), flush=True)


if __name__ == "__main__":
    main()
