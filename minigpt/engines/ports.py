"""Inputs and outputs of a model's graph, and what to put in: ids, mask, positions, a past that is empty or was given.

Graphs of ONNX and OpenVINO name them as the exporters of torch and transformers, optimum, onnxruntime's tools and
transformers.js do. An input that is none of these is an error: a guess would be another model.

B batch, T tokens.
"""

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigpt.errors import CheckpointError

INTEGERS = ("int64", "int32", "int16", "uint32", "uint64")
FLOATING = ("float16", "float32", "float64")
SEQUENCE = re.compile(r"past|seq|len|dynamic_axes", re.IGNORECASE)  # of a dimension's name: how many tokens it has
TEXTS = re.compile(r"batch", re.IGNORECASE)  # of a dimension's name: how many texts it has


class Role(enum.Enum):
    """The meaning of an input of a graph."""

    IDS = "ids"
    MASK = "1 for each token so far"
    POSITIONS = "the position of each token"
    SEGMENTS = "a zero for each token"
    PLACES = "the place of each token in the cache"
    PAST = "keys and values of earlier tokens"
    HAS_PAST = "whether there is a past"
    KEPT = "of how many last tokens logits are kept, where 0 is all"
    ROW = "which row of the cache goes on in each row"


PATTERNS: tuple[tuple[Role, str], ...] = (  # the first pattern that is found in an input's name says what it is
    (Role.HAS_PAST, r"^use_cache(_branch)?$"),
    (Role.KEPT, r"^(num_)?logits_to_keep$"),
    (Role.ROW, r"^beam_idx$"),
    (Role.PLACES, r"^cache_position$"),
    (Role.PAST, r"past|^cache_|_cache$|^kv_|key_cache|value_cache|^(input\.)?cache\."),
    (Role.MASK, r"mask"),
    (Role.POSITIONS, r"position"),
    (Role.SEGMENTS, r"^token_type_ids$"),
    (Role.IDS, r"^input_ids$|^ids$|^tokens?$|^token_ids$|^idx$|^x$|^inputs?(\.?\d+)?$|^l_\w*ids_?$"),
)


class Port(NamedTuple):
    """An input or an output of a graph.

    Attributes:
        dtype: its name in NumPy, or the program's own if NumPy has none.
        shape: a number where a dimension is fixed, else its name, or None if it has none.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    def described(self) -> str:
        """Return what a message says of it."""
        sizes: list[str] = []
        for size in self.shape:
            sizes.append("?" if size is None else str(size))
        return f"{self.name!r} of dtype {self.dtype} and shape ({', '.join(sizes)})"


class Graph:
    """The inputs and outputs of a causal language model.

    Args:
        file: what a message calls it.
        inputs, outputs: of the graph, in its own order.

    Attributes:
        logits: the name of the output that has them.
        pasts: each input of the past, with the output that continues it; None where no output does.
        fixed: how many tokens the graph reads, if that is fixed.
        by_one: whether it gives the logits of one token at a time: a text is read with its cache.
        rows: how many texts the graph reads at once.

    Raises:
        CheckpointError: if there is an input that is not known, or no ids, or no logits.
    """

    def __init__(self, file: str, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
        self.file = file
        self.inputs: dict[Port, Role] = {}
        for port in inputs:
            self.inputs[port] = self._role(port, inputs)
        ids = self._of_role(Role.IDS)
        if len(ids) != 1 or len(ids[0].shape) != 2:
            described = _described(inputs)
            raise CheckpointError(f"{file} must take ids of shape (B, T) by one input, and its inputs are {described}")
        logits = self._logits(outputs)
        self.logits = logits.name
        self.pasts = self._continued(outputs)
        rows, tokens = ids[0].shape
        self.rows = _fixed_size(rows) or 1
        self.by_one = 1 in (tokens, *logits.shape[1:-1])
        self.fixed = None if tokens == 1 else _fixed_size(tokens)

    @property
    def has_cache(self) -> bool:
        """True if the graph goes on from what it has returned."""
        is_fed = bool(self.pasts) and None not in self.pasts.values()
        return is_fed and self.fixed is None

    def _of_role(self, role: Role) -> list[Port]:
        return [port for port, its in self.inputs.items() if its is role]

    def _role(self, port: Port, inputs: Sequence[Port]) -> Role:
        name = port.name.lower()
        for role, pattern in PATTERNS:
            if re.search(pattern, name):
                return role
        if len(inputs) == 1 and port.dtype in INTEGERS:
            return Role.IDS
        raise CheckpointError(f"{self.file} has the input {port.described()}, which is none that a judge can fill")

    def _logits(self, outputs: Sequence[Port]) -> Port:
        """Return the output that has logits: by its name, else the first with three dimensions that is no cache."""
        for port in outputs:
            if port.name == "logits":
                return port
        for port in outputs:
            is_cache = re.search(r"present|past|cache", port.name.lower())
            if len(port.shape) in (2, 3) and port.dtype in FLOATING and not is_cache:
                return port
        described = _described(outputs)
        raise CheckpointError(f"{self.file} must give logits of shape (B, T, V), and its outputs are {described}")

    def _continued(self, outputs: Sequence[Port]) -> dict[Port, str | None]:
        """Return the inputs of the past, each with the output that has its name but for a word, else its place."""
        pasts = self._of_role(Role.PAST)
        others = [port.name for port in outputs if port.name != self.logits]
        by_stem: dict[str, str] = {}
        for name in others:
            by_stem[_stem(name)] = name
        continued: dict[Port, str | None] = {}
        for port in pasts:
            continued[port] = by_stem.get(_stem(port.name))
        if None not in continued.values():
            return continued
        if len(others) == len(pasts):
            return dict(zip(pasts, others, strict=True))
        return dict.fromkeys(pasts)

    def feeds(self, ids: Sequence[int], read: int, past: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to put in for the next ids of a text.

        Args:
            ids: the next tokens.
            read: how many tokens were read before.
            past: the inputs of the past by name; empty for a text that begins.

        Raises:
            CheckpointError: if the text is longer than what the graph reads.
        """
        size = self.fixed or len(ids)
        padding = size - len(ids)
        if padding < 0:
            raise CheckpointError(f"{self.file} reads {size} tokens at most, and a text has {len(ids)}")
        places = np.arange(read, read + size)
        seen = read + len(ids)
        empty = [0] * padding
        rows = {
            Role.IDS: np.array([*ids, *empty]),
            Role.MASK: np.array([1] * seen + empty),
            Role.POSITIONS: places,
            Role.SEGMENTS: np.zeros(size),
        }
        values: dict[str, Any] = {}
        for port, role in self.inputs.items():
            rank = len(port.shape)
            if role in rows:
                value = np.tile(rows[role], (self._require_rows(port), 1))
            elif role is Role.PLACES:
                value = places
            elif role is Role.ROW:
                value = np.arange(self.rows)
            elif role is Role.KEPT:
                value = np.zeros([1] * rank)
            elif role is Role.HAS_PAST:
                value = np.full([1] * rank, bool(past))
            else:
                value = past[port.name] if past else self._empty(port)
            values[port.name] = value.astype(port.dtype, copy=False)
        return values

    def _require_rows(self, port: Port) -> int:
        """Return how many rows an input of shape (B, T) has.

        Raises:
            CheckpointError: if it has another shape.
        """
        if len(port.shape) != 2 or port.dtype not in (*INTEGERS, *FLOATING, "bool"):
            raise CheckpointError(
                f"{self.file} has the input {port.described()}; a judge can fill it only in the shape (B, T)"
            )
        return self.rows

    def _empty(self, port: Port) -> np.ndarray:
        """Return a past without tokens: zeros, with a size of 0 where tokens are counted.

        Raises:
            CheckpointError: if it is not known which dimension that is.
        """
        sizes = list[int]()
        for axis, size in enumerate(port.shape):
            name = str(size)
            if isinstance(size, int) and size >= 0:
                sizes.append(size)
            elif TEXTS.search(name) or (axis == 0 and not SEQUENCE.search(name)):
                sizes.append(self.rows)
            else:
                sizes.append(0)
        if port.dtype not in FLOATING or sizes.count(0) > 1:
            raise CheckpointError(f"{self.file} has the past {port.described()}, which a judge cannot leave empty")
        return np.zeros(sizes, port.dtype)


def _fixed_size(size: int | str | None) -> int | None:
    """Return the size of a dimension if it is fixed."""
    if isinstance(size, int) and size > 0:
        return size
    return None


def _described(ports: Sequence[Port]) -> str:
    return ", ".join(port.described() for port in ports) or "none"


def _stem(name: str) -> str:
    """Return the name of a past or of what continues it, without the word in which they differ."""
    return re.sub(
        r"past_key_values|past_key_value|present_key_values|present|past|^input|^output", "", name.lower()
    ).strip("._")
