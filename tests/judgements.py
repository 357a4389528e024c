"""What tests of the judge start from: prompts of three lengths, and a judgement of them on the CPU."""

from pathlib import Path
from typing import Any

import minigpt

PROMPTS = [[5, 17, 42, 8, 23, 11, 9, 30, 2, 7], [3, 60, 1, 12, 50, 33, 21], [44, 2, 9, 28, 6, 31, 14, 52]]


def judge(place: Path | str, norm: Any = None, **how: Any) -> minigpt.ParityReport:
    """Parity of a checkpoint with a norm; ``how`` are options of it, in place of these prompts and 4 new tokens."""
    return minigpt.parity(place, **{"norm": norm, "device": "cpu", "prompts": PROMPTS, "max_new_tokens": 4} | how)
