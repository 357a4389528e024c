"""Models in CTranslate2's format.

B batch, T tokens, V vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minigpt.engines.engine import Engine, StepFunction, check_exists, load_package
from minigpt.errors import CheckpointError

TOKEN_FILES = ("vocabulary.json", "vocabulary.txt")


def ctranslate2(folder: str | Path, **options: Any) -> "Ctranslate2Generator":
    """Return the causal language model of a CTranslate2 folder: a candidate, ids (B, T) -> logits (B, T, V).

    Tokens are judged one by one too: CTranslate2 decodes with its cache, and each next token is given to it.

    Args:
        folder: as CTranslate2's converters write it.
        options: of CTranslate2's ``Generator``: compute_type ("default", "auto", "float32", "int8", "int8_float32",
            "bfloat16" and so on), inter_threads, intra_threads, device, device_index, flash_attention.

    Raises:
        ConfigError: if CTranslate2 is not installed.
        CheckpointError: if CTranslate2 cannot open the folder with these options.
    """
    return Ctranslate2Generator(folder, options)


class Ctranslate2Generator(Engine):
    """A folder of CTranslate2 in its generator; ``ctranslate2`` describes the arguments."""

    def __init__(self, folder: str | Path, options: Mapping[str, Any]) -> None:
        program = load_package("ctranslate2", "ctranslate2")
        super().__init__(check_exists(folder, is_folder=True), "ctranslate2")
        with self.opening():
            self.generator = program.Generator(str(self.file), **options)
        self.view = program.StorageView
        self.tokens = read_vocabulary(self.file)
        self.vocab_size = len(self.tokens)
        self.settings = dict(options) | {
            "compute_type": self.generator.compute_type,
            "intra_threads": options.get("intra_threads") or "of its own choice",
        }

    def _whole(self, ids: list[int]) -> np.ndarray:
        logits = self.generator.forward_batch([ids])
        return _float32(logits, self.view)[0]

    def _start(self, ids: list[int]) -> StepFunction:
        rows, read = self._decoded(ids), list[int]()

        def step(piece: list[int]) -> np.ndarray:
            nonlocal rows
            read.extend(piece)
            if len(read) > len(rows):  # beyond what was known
                rows = self._decoded(read)
            return rows[len(read) - len(piece) : len(read)]

        return step

    def _decoded(self, ids: list[int]) -> np.ndarray:
        """Return the logits (T, V) of a text. Where the tokens are given, each is decoded by itself, with the cache."""
        how: dict[str, Any] = dict(end_token=[], sampling_topk=1, return_logits_vocab=True)
        words = [self.tokens[token] for token in ids]
        (result,) = self.generator.generate_batch([words], max_length=len(ids), include_prompt_in_result=True, **how)
        return np.stack([_float32(row, self.view) for row in result.logits[0]])


def read_vocabulary(folder: Path) -> list[str]:
    """Return the tokens of a folder.

    Raises:
        CheckpointError: if it has no vocabulary that can be read.
    """
    for name in TOKEN_FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
            tokens = json.loads(text) if file.suffix == ".json" else text.split("\n")[:-1]
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
        if not isinstance(tokens, list) or set(map(type, tokens)) != {str}:
            raise CheckpointError(f"{file} must be a list of tokens")
        return tokens
    raise CheckpointError(f"{folder} has no {TOKEN_FILES[0]}")


def _float32(view: Any, kind: Any) -> np.ndarray:
    """Return a tensor of CTranslate2 as an array in float32."""
    if isinstance(view, kind):
        return np.array(view, dtype=np.float32)
    return np.asarray(view, dtype=np.float32)
