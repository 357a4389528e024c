"""CTranslate2 as on a processor without VNNI: oneDNN is held to AVX2."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.others import write_ctranslate2
from elsewhere.gpt2 import Row
from elsewhere.programs.ctranslate2 import PACKAGES as PACKAGES

from minigpt import engines

VARIABLES = {"ONEDNN_MAX_CPU_ISA": "AVX2", "CT2_USE_MKL": "0"}
CLIPPED = "without VNNI two products are added in 16 bits and clipped"


def rows(folder: Path) -> Iterator[Row]:
    place = write_ctranslate2(str(folder / "demo"), "int8")
    candidate = partial(engines.ctranslate2, place, compute_type="int8")
    yield Row("CTranslate2", "int8, oneDNN held to AVX2", candidate, "ctranslate2", CLIPPED)
