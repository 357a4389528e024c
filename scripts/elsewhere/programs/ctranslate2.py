"""CTranslate2: float32, and weights of eight bits."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.others import write_ctranslate2
from elsewhere.gpt2 import Row

from minigpt import engines

PACKAGES = ["ctranslate2==4.8.5"]
ROUNDED = "weights and inputs of products rounded to eight bits"


def rows(folder: Path) -> Iterator[Row]:
    for kind, cause in {"float32": "", "int8": ROUNDED}.items():
        place = write_ctranslate2(str(folder / "demo"), kind)
        yield Row("CTranslate2", kind, partial(engines.ctranslate2, place, compute_type=kind), "ctranslate2", cause)
