"""Rows that write together: each joins when there is a place, stops on its own, and leaves its place to the next.

B rows, T tokens read at once, V vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.engine.kernel import step_of
from minigpt.engine.together import Text, read_each, reads_together
from minigpt.errors import GenerationError
from minigpt.generation.any_length import of_any_length
from minigpt.generation.processors import Situation, warp_by
from minigpt.generation.reading import Reading, readings
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.generation.slots import Slots
from minigpt.model.cache import KVCache

NOT_A_NUMBER = "the model's logits are NaN; its weights, its norms or its dtype cannot compute this prompt"
INFINITE = "a logit is infinite, so that no token can be drawn; a wider dtype or a higher temperature can hold it"
NO_TOKEN_LEFT = "the settings exclude every token there is; permit some, or ask for fewer tokens"
OVERHEAD = {"cpu": 32, "cuda": 1024}  # tokens that could be read in the time that a forward takes anyway
OVERHEAD_BESIDE = {"cpu": 2, "cuda": 1024}  # the same of one text more in a forward that others need anyway
SHORT = {"cpu": 64, "cuda": 2048}  # tokens of a text that is read sooner with others
IDLE = 0.002  # seconds to wait before asking again for a row when none is in progress
BLOCK = 256  # scores, of which the largest is found at once
WASTE = 32  # columns that no row needs any more, from which on it pays to move everybody to the left


class Batch:
    """The rows that are being written, and the logits of each one's next token.

    ``join`` reads what new rows say, ``choose`` adds a token to every row and lets those that are over go, ``read``
    reads the tokens added, and what new rows say along with them. Between any two of them a row may be anything from
    its first token to its last.
    """

    def __init__(self, model: GPT2, settings: GenerationSettings, places: int, longest: int) -> None:
        self.model, self.settings, self.places = model, settings, places
        self.context = model.config.n_positions
        self.rows: list[Row] = []
        if settings.use_cache:
            self.slots = Slots(model.new_cache(places, longest))
        self.kernel = step_of(model) if settings.use_cache else None
        self.logits = torch.empty(0, model.config.vocab_size)  # (B, V) of each row's next token

    @property
    def device(self) -> torch.device:
        return self.model.wte.weight.device

    @property
    def _device_kind(self) -> str:
        return "cuda" if self.device.type == "cuda" else "cpu"

    @torch.inference_mode()
    @of_any_length()
    def join(self, rows: list[Row]) -> None:
        """Read the texts of new rows: what rows of one prompt share once, and texts of about one length together."""
        for reading in self._readings(rows, OVERHEAD):
            logits = self._read_alone(reading)[reading.of_row]
            self.logits = torch.cat([self.logits, logits]) if self.rows else logits
            self.rows += reading.rows

    @torch.inference_mode()
    def choose(self) -> list[Row]:
        """Add a token to every row. Those that are over leave; all that have a new token are returned."""
        chosen = list(self.rows)
        for row, token in zip(chosen, self._next_tokens(), strict=True):
            row.push(token)
        self._leave([place for place, row in enumerate(self.rows) if row.end])
        return chosen

    @torch.inference_mode()
    @of_any_length()
    def read(self, new: Sequence[Row] = ()) -> None:
        """Read the token that each row has last added, and the texts of new rows; a window that is full, anew."""
        if not self.settings.use_cache:
            rows, self.rows = self.rows, []
            return self.join([*rows, *new])
        full = [place for place, start in enumerate(self.slots.starts) if self.slots.length - start >= self.context]
        joining = [*self._leave(full), *new]
        if self.rows:
            self.slots.trim(WASTE)
            short = [row for row in joining if len(self._window(row)) <= SHORT[self._device_kind]]
            if short and self.kernel is None and self.reads_ragged:
                self._read_ragged(short)
                joining = [row for row in joining if row not in short]
            else:
                self._read_last()
        return self.join(joining)

    def drop(self, rows: Container[Row]) -> None:
        """Let rows go before they are over. Call it between ``choose`` and ``read``."""
        self._leave([place for place, row in enumerate(self.rows) if row in rows])

    @property
    def reads_ragged(self) -> bool:
        """Whether new texts may be read in one forward with the tokens of the others."""
        return reads_together(self.model)

    def _next_tokens(self) -> list[int]:
        return next_tokens(self.logits, self.rows)

    def _read_last(self) -> None:
        if self.kernel is None:
            self.logits = last_logits(self.model, self._last(), None, self.slots)
            return
        tokens, slots = [row.ids[-1] for row in self.rows], self.slots
        logits = self.kernel(tokens, slots.starts, slots.length, slots.store)
        slots.grow()
        self.logits = without_unused_ids(logits, self.model.config.used_vocab_size)

    def _last(self) -> Int[Tensor, "batch 1"]:
        return torch.tensor([row.ids[-1:] for row in self.rows], device=self.device)

    def _read_ragged(self, joining: list[Row]) -> None:
        """The tokens last added and the texts of rows that join, in one forward."""
        found = self._readings(joining, OVERHEAD_BESIDE)
        texts = [Text(new.ids, new.mask, self.model.new_cache(*new.ids.shape)) for new in found]
        hidden = read_each(self.model, [Text(self._last(), None, self.slots), *texts])
        ends = torch.cat([x[:, -1:] for x in hidden])  # (B, 1, C)
        mine, *theirs = next_logits(self.model, self.model.head(ends)[:, 0]).split([len(x) for x in hidden])
        self.logits = torch.cat([mine, *(logits[new.of_row] for logits, new in zip(theirs, found, strict=True))])
        for reading, text in zip(found, texts, strict=True):
            self._seat(reading, text.cache)
            self.rows += reading.rows

    def _seat(self, reading: Reading, aside: KVCache) -> None:
        self.slots.trim(WASTE)
        self.slots.join(aside, reading.of_row, reading.starts)

    def _window(self, row: Row) -> list[int]:
        """What the row's next token may see: all, or the least that is kept and what was added since that was cut."""
        if len(row.ids) <= self.context:
            return row.ids
        least = max(1, self.context - row.settings.slide_stride + 1)
        since = len(row.ids) - max(row.prompt_length, self.context + 1)  # tokens, since it first did not hold them all
        return row.ids[-(least + since % (self.context - least + 1)) :]

    def _readings(self, rows: list[Row], overhead: dict[str, int]) -> list[Reading]:
        windows = {row: self._window(row) for row in rows}
        return readings(windows, overhead[self._device_kind], self.device)

    def _read_alone(self, reading: Reading) -> Float[Tensor, "batch vocab"]:
        """Logits after each text."""
        ids, mask = reading.ids, reading.mask
        if not self.settings.use_cache:
            return last_logits(self.model, ids, mask, None)
        if self.rows:
            aside = self.model.new_cache(*ids.shape)
            logits = last_logits(self.model, ids, mask, aside)
            self._seat(reading, aside)
            return logits
        self.slots.read_into(reading.starts)  # nobody is to be moved, so nothing need be copied
        logits = last_logits(self.model, ids, mask, self.slots)
        if reading.of_row != list(range(len(ids))):
            self.slots.repeat(reading.of_row)
        return logits

    def _leave(self, places: list[int]) -> list[Row]:
        """Let the rows at these places go, and return them; the last row moves to a place that is free."""
        gone = [self.rows[place] for place in places]
        for place in reversed(places):
            if self.settings.use_cache:
                self.slots.leave(place)
            self.rows[place] = self.rows[-1]
            del self.rows[-1]
        return gone


def write(batch: Batch, waiting: Iterable[Row | None]) -> Iterator[Row]:
    """Yield every row each time that it has new tokens, until all have been written; ``row.end`` says which are over.

    A place that becomes free is taken by the next of those waiting at once. ``waiting`` is read lazily. It may yield
    None for "nobody at the moment": the rows in progress go on, and it is asked again after their next token.
    """
    queue = iter(waiting)
    over = object()

    def next_few() -> list[Row]:
        few: list[Row] = []
        while len(batch.rows) + len(few) < batch.places:
            row = next(queue, over)
            if isinstance(row, Row):
                few.append(row)
            elif row is over or few or batch.rows:
                break
            else:
                time.sleep(IDLE)
        return few

    batch.join(next_few())
    while batch.rows:
        yield from batch.choose()
        batch.read(next_few())


def last_logits(
    model: GPT2, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None
) -> Float[Tensor, "batch vocab"]:
    """Logits (B, V) after the last token alone: the head, the widest product of all, is spared the others."""
    hidden = model.hidden_states(input_ids, attention_mask, cache=cache)  # (B, T, C)
    return next_logits(model, model.head(hidden[:, -1:])[:, 0])


def next_logits(model: GPT2, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Logits as tokens are chosen from them: in float32, and none for ids that only fill up the vocabulary."""
    return without_unused_ids(logits.float(), model.config.used_vocab_size)


def without_unused_ids(logits: Float[Tensor, "rows vocab"], used_vocab_size: int | None) -> Float[Tensor, "rows vocab"]:
    """The logits with -inf for every id from ``used_vocab_size`` on; None leaves them as they are."""
    if used_vocab_size is None:
        return logits
    unused = torch.arange(logits.shape[-1], device=logits.device) >= used_vocab_size  # (V,)
    return logits.masked_fill(unused, -torch.inf)


def next_tokens(logits: Float[Tensor, "batch vocab"], rows: list[Row]) -> list[int]:
    """Return the next token of each row: the likeliest, or one drawn by the row's own chance.

    Rows whose settings choose alike are served together.

    Raises:
        GenerationError: if a logit is NaN, or infinite where a token is drawn, or if no token is left to choose.
    """
    if len({row.choice for row in rows}) == 1:
        return _next_tokens_alike(logits, rows, rows[0].settings)
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        alike[row.choice].append(place)
    found = {}
    for places in alike.values():
        some = [rows[place] for place in places]
        found |= zip(places, _next_tokens_alike(logits[places], some, some[0].settings), strict=True)
    return [found[place] for place in range(len(rows))]


def _next_tokens_alike(
    logits: Float[Tensor, "batch vocab"], rows: list[Row], settings: GenerationSettings
) -> list[int]:
    largest = logits.amax(-1)  # (B,)
    if largest.isnan().any():  # NaN is larger than any number
        raise GenerationError(NOT_A_NUMBER)
    scores = _scores(logits, rows, settings)  # (B, V)
    excludes = settings.depends_on_row or settings.suppress_tokens
    if scores is not logits and (excludes or settings.samples):
        largest = scores.amax(-1)
    if excludes and (largest == -torch.inf).any():
        raise GenerationError(NO_TOKEN_LEFT)
    if settings.samples:
        if largest.isinf().any():
            raise GenerationError(INFINITE)
        chances = torch.cat([row.chances(1) for row in rows])  # (B,)
        tokens = drawn(scores, chances.to(scores.device)).tolist()
    else:
        tokens = likeliest(scores).tolist()
    if settings.output_scores or settings.output_logprobs:
        _keep(scores, tokens, rows, settings)
    return tokens


def likeliest(scores: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """Of each row the token of the largest score, the first of several: ``scores.argmax(-1)``.

    On the CPU the library's own reads number by number, while its maximum reads many at once: so that of each block
    comes first, and then only one block is searched.
    """
    vocab = scores.shape[-1]
    if not scores.is_cpu or vocab < BLOCK:
        return scores.argmax(-1)
    blocks, last = scores.unfold(-1, BLOCK, BLOCK), scores[:, -BLOCK:]  # (B, V // BLOCK, BLOCK) and (B, BLOCK)
    largest = torch.cat((blocks.amax(-1), last.amax(-1, keepdim=True)), dim=-1)  # (B, V // BLOCK + 1)
    first = (largest.argmax(-1) * BLOCK).clamp_(max=vocab - BLOCK)  # (B,)
    return first + scores.gather(-1, first[:, None] + torch.arange(BLOCK, device=scores.device)).argmax(-1)


def drawn(scores: Float[Tensor, "batch vocab"], chances: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Of each row the token whose part of [0, 1) its chance falls into, the parts being the tokens' probabilities."""
    ends = scores.softmax(-1).cumsum(-1, dtype=torch.float64)  # (B, V)
    found = torch.searchsorted(ends, chances[:, None] * ends[:, -1:], right=True)[:, 0]  # (B,)
    return found.clamp_(max=scores.shape[-1] - 1)  # of NaN, a token all the same


def _scores(logits: Tensor, rows: list[Row], settings: GenerationSettings) -> Tensor:
    if not settings.depends_on_row:  # what the rows say does not matter
        return warp_by(logits, Situation(settings, torch.empty(0, 0), 0, rows[0].end_ids))
    return torch.cat([_scores_of(logits[i : i + 1], row, settings) for i, row in enumerate(rows)])


def _scores_of(logits: Tensor, row: Row, settings: GenerationSettings) -> Tensor:
    ids = torch.tensor([row.ids], device=logits.device)  # (1, T)
    return warp_by(logits, Situation(settings, ids, row.prompt_length, row.end_ids))


def _keep(scores: Tensor, tokens: list[int], rows: list[Row], settings: GenerationSettings) -> None:
    logprobs = scores.log_softmax(-1)  # (B, V)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        row.logprobs.append(float(logprobs[i, token]))
        if settings.output_scores:
            row.scores.append(scores[i])
