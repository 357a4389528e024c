"""Rows that write together on a GPU: a token costs one launch from the host, of a CUDA graph of the whole step."""

import contextlib
import gc
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.engine.hooks import is_watched
from minigpt.errors import GenerationError
from minigpt.generation.batch import INFINITE, NOT_A_NUMBER, Batch, next_tokens
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.generation.step import Step
from minigpt.norms.foreign.adapt import is_ours

WORTH_A_GRAPH = 8  # new tokens; to record one costs about as much as a few steps
ALIGNED = 8  # columns of which the room is a multiple, so that kernels of attention can read a mask as it lies
ROOM = 2**30  # bytes that should be free before a step is recorded, since nothing cached is given back meanwhile

_recording = threading.Lock()  # of one step at a time
_free: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)  # that have recorded for a batch now gone


class Flight(NamedTuple):
    """A step that has been launched, and its report on the way to the host."""

    rows: list[Row]
    samples: bool
    report: Tensor  # (2, B)
    landed: torch.cuda.Event | None

    def tokens(self, rows: list[Row]) -> dict[Row, int]:
        """The tokens taken for those of these rows that took part. This is the one wait for the device in a step.

        Raises:
            GenerationError: a logit was NaN, or infinite where a token was drawn.
        """
        if self.landed is not None:
            self.landed.synchronize()
        wanted, (tokens, largest) = set(rows), self.report.tolist()
        found = {}
        for row, token, logit in zip(self.rows, tokens, largest, strict=False):
            if row in wanted:
                if math.isnan(logit):
                    raise GenerationError(NOT_A_NUMBER)
                if self.samples and math.isinf(logit):
                    raise GenerationError(INFINITE)
                found[row] = int(token)
        return found


class StaticBatch(Batch):
    """A batch whose steps, from the reading of a token to the taking of the next, are launched as one.

    While nobody comes or goes, a step is launched before its predecessor's tokens are read, so that the device does not
    wait for the host. What it takes for a row that turns out to be over is thrown away.
    """

    def __init__(self, model: GPT2, settings: GenerationSettings, places: int, longest: int) -> None:
        super().__init__(model, settings, places, -(-longest // ALIGNED) * ALIGNED)
        self.slots.room.zero_()  # unwritten memory may hold NaN, which no mask can hide
        self.step = Step(model, self.slots, settings, places)
        self.records = self.device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None  # the recording of a step, once there is one
        self.flight: Flight | None = None

    @torch.inference_mode()
    def read(self, new: Sequence[Row] = ()) -> None:
        """As ``Batch.read``; where a step is under way already, the tokens that were added are read by that."""
        if self.flight is None:
            super().read(new)
        else:
            self.join(list(new))  # no window can be full: else the step would not have been foreseen

    @property
    def reads_ragged(self) -> bool:
        return False  # a step is what it is

    def _next_tokens(self) -> list[int]:
        flight, self.flight = self.flight, self._launched() if self._is_foreseeable() else None
        found = {} if flight is None else flight.tokens(self.rows)
        joined = [row for row in self.rows if row not in found]  # their prompts have been read, and no more
        if joined:
            found |= zip(joined, next_tokens(self.logits, joined), strict=True)
        self.logits = self.logits[:0]
        return [found[row] for row in self.rows]

    def _read_last(self) -> None:
        self.step.seat(self.rows)
        self.flight = self._launched()

    def _is_foreseeable(self) -> bool:
        """Whether the step after the one under way is known before its tokens are."""
        length, starts = self.slots.length, self.slots.starts
        return (
            self.flight is not None
            and self.rows == self.step.rows
            and length < self.slots.max_length
            and length - min(starts) < self.context
            and any(row.left > 1 for row in self.rows)
        )

    def _launched(self) -> Flight:
        with torch.cuda.device_of(self.slots.room):
            if self.graph is not None:
                self.graph.replay()
            elif self.records:
                self.graph = self._recorded()
            else:
                self.step()
            self.slots.length += 1
            return Flight(self.step.rows, self.settings.samples, *_sent(self.step.report))

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """The first step as it comes, which prepares what kernels need; then a recording of it, which runs nothing."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        with _recording, _no_collection(), torch.cuda.stream(aside := _aside(self)):
            aside.wait_stream(here)
            self.step()
            if torch.cuda.mem_get_info(self.device)[0] < ROOM:
                torch.cuda.empty_cache()
            # Not within ``torch.cuda.graph``, which waits for the device and empties all caches first. What this makes
            # for the device's generator is everybody's, and must not be for inference alone.
            with torch.inference_mode(False):
                graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step()
            finally:
                graph.capture_end()
            here.wait_stream(aside)
        return graph


def is_static(model: GPT2, settings: GenerationSettings) -> bool:
    """Whether every step is the same: on CUDA, by norms that we know, nobody watching, and no text to look back at."""
    kept = settings.output_scores or settings.output_logprobs
    biased = settings.active("logit_bias") is not None  # copied to the device at every step
    known = all(is_ours(type(norm)) for norm in model.norm_modules().values())
    casting = torch.is_autocast_enabled(model.wte.weight.device.type)  # which keeps copies of weights of its own
    return (
        model.wte.weight.is_cuda
        and settings.use_cache
        and known
        and not (model.training or is_watched(model) or casting or kept or biased or settings.depends_on_tokens)
    )


def _sent(report: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if not report.is_cuda:
        return report.clone(), None
    host = torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=True)
    host.copy_(report, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    return host, landed


def _aside(batch: StaticBatch) -> torch.cuda.Stream:
    """A stream to record on, this batch's as long as that lives.

    Libraries keep some memory for every stream that they have seen, and graphs of one stream share it: so there are no
    more streams than batches at a time, and no stream has two of them.
    """
    free = _free[batch.device]
    stream = free.pop() if free else torch.cuda.Stream(batch.device)
    weakref.finalize(batch, free.append, stream)
    return stream


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: a graph among it would end the recording of another."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
