"""Batched decoding on a GPU by a CUDA graph: the host launches a whole step, sampling included, at once.

B places, S columns of the cache, C embedding, V vocabulary.
"""

import contextlib
import functools
import gc
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt import trials
from minigpt.engine import GPT2
from minigpt.engine.compiled import NEW, PROMPT, ROOM, FixedCache, compared, hiding, read_fixed, specimen
from minigpt.errors import GenerationError
from minigpt.generation.batch import Batch
from minigpt.generation.choosing import INFINITE, NOT_A_NUMBER, drawn, next_logits, next_tokens
from minigpt.generation.processors import Situation, warp_by
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.norms.add import is_watched
from minigpt.norms.foreign.adapt import is_ours

WORTH_A_GRAPH = 8  # new tokens; recording a graph costs about as much as a few steps
ALIGNED = 8  # the cache has a multiple of so many columns, so that attention kernels need no copy of the mask
SPARE = 2**30  # bytes to have free before recording, since the allocator cannot release its cache meanwhile

_recording = threading.Lock()  # one recording at a time
_free: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)  # streams whose batch is gone


Flight = tuple[Tensor, torch.cuda.Event | None]  # the report of a launched step, and the event of its arrival here


class StaticBatch(Batch):
    """A batch that launches each step, from reading a token to choosing the next, as one CUDA graph.

    A step is a fixed sequence of kernels on fixed memory. Rows are data, so they may join and leave between steps. An
    empty place computes a text too, which starts when the rows are seated, so it stays in range.

    While no row joins or leaves, a step is launched before the host reads the tokens of the step before, so that the
    device does not wait for the host. Its token for a row that has ended is discarded.

    Attributes:
        seated: the rows at the first places.
        report: (2, B) the chosen tokens, and the largest logit of each row, which is NaN if any logit is.
        given: (B, V) the logits of the last step.
    """

    def __init__(self, model: GPT2, settings: GenerationSettings, places: int, longest: int) -> None:
        super().__init__(model, settings, places, -(-longest // ALIGNED) * ALIGNED)
        self.slots.room.zero_()  # unwritten memory may hold NaN, which a mask does not remove
        device, dtype, room = self.device, model.wte.weight.dtype, self.slots.max_length
        self.compiled = model.step if model.step is not None and model.step.holds(places, room) else None
        self.records = device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None  # the recorded step
        self.flight: Flight | None = None
        self.seated: list[Row] = []
        self.given = torch.empty(0, model.config.vocab_size)
        self.tokens, self.starts = torch.zeros(2, places, dtype=torch.long, device=device)  # each (B,)
        self.column, self.turn = torch.zeros(2, 1, dtype=torch.long, device=device)  # each (1,)
        self.mask = torch.zeros(places, room, dtype=dtype, device=device)  # (B, S)
        self.chances = torch.zeros(places, room, dtype=torch.float64, device=device)
        self.report = torch.zeros(2, places, dtype=torch.float64, device=device)

    @torch.inference_mode()
    def read(self, new: Sequence[Row] = ()) -> None:
        """As ``Batch.read``; a step that is already launched reads the new tokens itself."""
        if self.flight is None:
            super().read(new)
        else:
            self.join(list(new))  # no window is full, or the step would not have been launched

    def step(self) -> None:
        """Read the last token at every place and choose the next, in place, without waiting for the host."""
        self.mask.index_fill_(1, self.column, 0)
        x = self.model.wte(self.tokens[:, None]) + self.model.wpe((self.column - self.starts)[:, None])  # (B, 1, C)
        self.given = next_logits(self.model, self.model.head(self._hidden_states(x))[:, 0])
        scores = warp_by(self.given, Situation(self.settings, torch.empty(0, 0), 0, ()))
        best, tokens = scores.max(-1)  # (B,)
        if self.settings.samples:
            tokens = drawn(scores, self.chances.index_select(1, self.turn)[:, 0])
            self.turn.add_(1)
        self.tokens.copy_(tokens)
        self.report[0].copy_(tokens)
        self.report[1].copy_(best if scores is self.given else self.given.amax(-1))
        self.column.add_(1)

    def seat(self, rows: list[Row]) -> None:
        """Set the rows of the next steps, each at the place of its slot."""
        self.seated, idle = list(rows), self.places - len(rows)
        room, length = self.slots.max_length, self.slots.length
        starts, columns = torch.tensor(self.slots.starts + [length] * idle), torch.arange(room)
        self.tokens.copy_(torch.tensor([row.ids[-1] for row in rows] + [0] * idle))
        self.starts.copy_(starts)
        self.mask.copy_(hiding((columns >= starts[:, None]) & (columns < length), self.mask.dtype))
        self.column.fill_(length)
        self.turn.zero_()
        if self.settings.samples:
            chances = torch.zeros(self.chances.shape, dtype=torch.float64)
            for place, row in enumerate(rows):
                chances[place] = row.chances(room)
            self.chances.copy_(chances)

    def _hidden_states(self, x: Float[Tensor, "batch 1 embd"]) -> Float[Tensor, "batch 1 embd"]:
        layers = self.slots.room.unbind()  # each (2, B, H, S, D)
        if self.compiled is not None:
            return self.compiled.read(x, self.mask, layers, self.column)
        return read_fixed(self.model, x, self.mask, FixedCache(layers, self.column))

    def _next_tokens(self) -> list[int]:
        flight, self.flight = self.flight, self._launched() if self._is_foreseeable() else None
        found = {} if flight is None else self._landed(*flight)
        joined = [row for row in self.rows if row not in found]  # only their prompts have been read
        if joined:
            found |= zip(joined, next_tokens(self.logits, joined), strict=True)
        self.logits = self.logits[:0]
        return [found[row] for row in self.rows]

    def _landed(self, report: Tensor, landed: torch.cuda.Event | None) -> dict[Row, int]:
        """Return the new token of each row of a step. This is a step's only wait for the device.

        Raises:
            GenerationError: if a logit is NaN, or infinite and tokens are drawn.
        """
        if landed is not None:
            landed.synchronize()
        tokens, largest = report[:, : len(self.seated)].tolist()
        if any(map(math.isnan, largest)):
            raise GenerationError(NOT_A_NUMBER)
        if self.settings.samples and any(map(math.isinf, largest)):
            raise GenerationError(INFINITE)
        return dict(zip(self.seated, map(int, tokens), strict=True))

    def _read_last(self) -> None:
        self.seat(self.rows)
        self.flight = self._launched()

    def _is_foreseeable(self) -> bool:
        """True if the next step can be launched before the tokens of the current one are known."""
        length, starts = self.slots.length, self.slots.starts
        return (
            self.flight is not None
            and self.rows == self.seated
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
            return _sent(self.report)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """Run the first step, which prepares the kernels; then record a step without running it."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        with _recording, _no_collection(), torch.cuda.stream(aside := _aside(self)):
            aside.wait_stream(here)
            self.step()
            if torch.cuda.mem_get_info(self.device)[0] < SPARE:
                torch.cuda.empty_cache()
            # Not ``torch.cuda.graph``, which waits for the device and empties all caches first. Recording creates state
            # of the device's generator, which all code shares; it must not be inference tensors.
            with torch.inference_mode(False):
                graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.step()
            finally:
                graph.capture_end()
            here.wait_stream(aside)
        return graph


def is_static(model: GPT2, settings: GenerationSettings) -> bool:
    """True if every step is the same: CUDA, norms of this package, no hooks, settings that only shape a draw."""
    kept = settings.output_scores or settings.output_logprobs
    known = all(is_ours(type(norm)) for norm in model.norm_modules().values())
    casting = torch.is_autocast_enabled(model.wte.weight.device.type)  # autocast caches copies of the weights
    return (
        model.wte.weight.is_cuda
        and settings.use_cache
        and known
        and not (model.training or is_watched(model) or casting or kept or settings.changes_logits)
    )


def graph_holds(model: GPT2, places: int, longest: int) -> bool:
    """Return True if graphs of a step of two layers, in these shapes, give the plain path's logits on this device."""
    weight, step = model.wte.weight, model.step
    step = step if step is not None and step.holds(places, longest) else None
    name = "graph of the step" if step is None else "graph of the compiled step"
    attempt = functools.partial(_tried, specimen(model, step), places, max(longest, ROOM))
    return trials.passes(name, weight.device, weight.dtype, weight.shape[1], attempt)


def _tried(small: GPT2, places: int, longest: int) -> Iterator[trials.Compared]:
    """Decode texts of different lengths beside one another, and compare each with itself alone."""
    settings = GenerationSettings(max_new_tokens=ROOM, eos_token_id=None)
    rows = [Row(list(range(PROMPT - i)), settings, prompt=i) for i in range(min(places, PROMPT))]
    batch, logits = StaticBatch(small, settings, places, longest), []
    batch.join(rows)
    for _ in range(1 + NEW):
        batch.choose()
        batch.read()
        logits.append(batch.given[: len(rows)].clone())  # (B, V); at the first, the graph has only been recorded
    for row, given in zip(rows, torch.stack(logits[1:], 1), strict=True):
        yield compared(small, row.ids, given)


def _sent(report: Tensor) -> Flight:
    if not report.is_cuda:
        return report.clone(), None
    host = torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=True)
    host.copy_(report, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    return host, landed


def _aside(batch: StaticBatch) -> torch.cuda.Stream:
    """Return a stream to record on, which belongs to this batch as long as the batch lives.

    Libraries keep memory for every stream they have seen, and graphs of one stream share it. So there are no more
    streams than batches at a time, and no two batches share one.
    """
    free = _free[batch.device]
    stream = free.pop() if free else torch.cuda.Stream(batch.device)
    weakref.finalize(batch, free.append, stream)
    return stream


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: deleting a graph would end the recording of another."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
