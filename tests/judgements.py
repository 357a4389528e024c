"""What tests of the judge start from: prompts of two lengths, and a judgement of them on the CPU."""

from pathlib import Path
from typing import Any

import minigpt

PROMPTS = [[5, 17, 42, 8, 23, 11], [3, 60, 1]]


def judge(place: Path | str, norm: Any = None, **how: Any) -> minigpt.ParityReport:
    """Parity of a checkpoint with a norm; ``how`` are options of it, in place of these prompts and 4 new tokens."""
    return minigpt.parity(place, **{"norm": norm, "device": "cpu", "prompts": PROMPTS, "max_new_tokens": 4} | how)
