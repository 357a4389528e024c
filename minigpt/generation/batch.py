"""A batch of rows that are decoded together: a row joins when there is a place, and leaves when it has ended.

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
from minigpt.errors import GenerationError
from minigpt.generation.any_length import of_any_length
from minigpt.generation.processors import Situation, warp_by
from minigpt.generation.reading import Reading, readings
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.generation.slots import Slots
from minigpt.model.cache import KVCache

NOT_A_NUMBER = "the model's logits are NaN; its weights, its norms or its dtype cannot compute this prompt"
INFINITE = "a logit is infinite, so no token can be drawn; use a wider dtype or a higher temperature"
NO_TOKEN_LEFT = "the settings exclude every token; allow some, or ask for fewer tokens"
OVERHEAD = {"cpu": 32, "cuda": 1024}  # a forward takes as long as reading so many more tokens
IDLE = 0.002  # seconds to wait before asking again for a row when none is in progress
BLOCK = 256  # scores whose maximum is computed at once
WASTE = 32  # unused columns from which on it pays to move all rows to the left


class Batch:
    """The rows in progress, and the logits of each one's next token.

    ``join`` reads the texts of new rows. ``choose`` adds a token to every row and lets ended rows leave. ``read`` reads
    the new tokens, and the texts of new rows.
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

    @torch.inference_mode()
    @of_any_length()
    def join(self, rows: list[Row]) -> None:
        """Read the texts of new rows, a group of similar lengths at a time."""
        windows = {row: self._window(row) for row in rows}
        overhead = OVERHEAD["cuda" if self.device.type == "cuda" else "cpu"]
        for reading in readings(windows, overhead, self.device):
            logits = self._read_texts(reading)[reading.of_row]
            self.logits = torch.cat([self.logits, logits]) if self.rows else logits
            self.rows += reading.rows

    @torch.inference_mode()
    def choose(self) -> list[Row]:
        """Add a token to every row, and return the rows. Those that have ended leave the batch."""
        chosen = list(self.rows)
        for row, token in zip(chosen, self._next_tokens(), strict=True):
            row.push(token)
        self._leave([place for place, row in enumerate(self.rows) if row.end])
        return chosen

    @torch.inference_mode()
    @of_any_length()
    def read(self, new: Sequence[Row] = ()) -> None:
        """Read the last token of each row, and the texts of new rows.

        A row whose context is full reads its window again as a new row, and so does every row without a cache.
        """
        if self.settings.use_cache:
            full = [place for place, start in enumerate(self.slots.starts) if self.slots.length - start >= self.context]
            again = self._leave(full)
        else:
            again, self.rows = self.rows, []
        if self.rows:
            self.slots.trim(WASTE)
            self._read_last()
        self.join([*again, *new])

    def drop(self, rows: Container[Row]) -> None:
        """Remove rows before they have ended. Call it between ``choose`` and ``read``."""
        self._leave([place for place, row in enumerate(self.rows) if row in rows])

    def _next_tokens(self) -> list[int]:
        return next_tokens(self.logits, self.rows)

    def _read_last(self) -> None:
        tokens, slots = [row.ids[-1] for row in self.rows], self.slots
        if self.kernel is None:
            ids = torch.tensor(tokens, device=self.device)[:, None]  # (B, 1)
            self.logits = last_logits(self.model, ids, None, slots)
            return
        count = len(tokens)
        logits = self.kernel(tokens, list(range(count)), slots.starts, [slots.length] * count, slots.store)
        slots.grow()
        self.logits = without_unused_ids(logits, self.model.config.used_vocab_size)

    def _window(self, row: Row) -> list[int]:
        """Return the tokens that the row's next token sees: all, or a window of the last ones if there are too many.

        A window drops ``slide_stride`` tokens when it is full, and then grows again.
        """
        if len(row.ids) <= self.context:
            return row.ids
        least = max(1, self.context - row.settings.slide_stride + 1)
        since = len(row.ids) - max(row.prompt_length, self.context + 1)  # tokens since the text became too long
        return row.ids[-(least + since % (self.context - least + 1)) :]

    def _read_texts(self, reading: Reading) -> Float[Tensor, "texts vocab"]:
        """Read whole texts into the cache, and return the logits after each."""
        ids, mask = reading.ids, reading.mask
        if not self.settings.use_cache:
            return last_logits(self.model, ids, mask, None)
        if self.rows:
            aside = self.model.new_cache(*ids.shape)
            logits = last_logits(self.model, ids, mask, aside)
            self.slots.trim(WASTE)
            self.slots.join(aside, reading.of_row, reading.starts)
            return logits
        self.slots.read_into(reading.starts)  # the cache is empty, so no copy is needed
        logits = last_logits(self.model, ids, mask, self.slots)
        if reading.of_row != list(range(len(ids))):
            self.slots.repeat(reading.of_row)
        return logits

    def _leave(self, places: list[int]) -> list[Row]:
        """Remove the rows at these places, and return them; the last row moves to a free place."""
        gone = [self.rows[place] for place in places]
        for place in reversed(places):
            if self.settings.use_cache:
                self.slots.leave(place)
            self.rows[place] = self.rows[-1]
            del self.rows[-1]
        return gone


def write(batch: Batch, waiting: Iterable[Row | None]) -> Iterator[Row]:
    """Yield every row each time that it has new tokens, until all have ended; ``row.end`` is set in ended rows.

    The next waiting row takes a free place at once. ``waiting`` is read lazily. It may yield None for "no row at the
    moment": the rows in progress go on, and it is asked again after their next token.
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
    """Return logits (B, V) of the last token only, since the head is the widest product of all."""
    hidden = model.hidden_states(input_ids, attention_mask, cache=cache)  # (B, T, C)
    return next_logits(model, model.head(hidden[:, -1:])[:, 0])


def next_logits(model: GPT2, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return logits in float32, with -inf for ids that are padding of the vocabulary."""
    return without_unused_ids(logits.float(), model.config.used_vocab_size)


def without_unused_ids(logits: Float[Tensor, "rows vocab"], used_vocab_size: int | None) -> Float[Tensor, "rows vocab"]:
    """Return the logits with -inf for every id from ``used_vocab_size`` on; None changes nothing."""
    if used_vocab_size is None:
        return logits
    unused = torch.arange(logits.shape[-1], device=logits.device) >= used_vocab_size  # (V,)
    return logits.masked_fill(unused, -torch.inf)


def next_tokens(logits: Float[Tensor, "batch vocab"], rows: list[Row]) -> list[int]:
    """Return the next token of each row: the likeliest, or one drawn with the row's own random number.

    Rows whose settings choose in the same way are processed together.

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
    """Return ``scores.argmax(-1)``: the token with the largest score of each row, the first of several.

    On the CPU ``argmax`` is slower than ``amax``. So ``amax`` finds the block with the largest score, and ``argmax``
    searches that block.
    """
    vocab = scores.shape[-1]
    if not scores.is_cpu or vocab < BLOCK:
        return scores.argmax(-1)
    blocks, last = scores.unfold(-1, BLOCK, BLOCK), scores[:, -BLOCK:]  # (B, V // BLOCK, BLOCK) and (B, BLOCK)
    largest = torch.cat((blocks.amax(-1), last.amax(-1, keepdim=True)), dim=-1)  # (B, V // BLOCK + 1)
    first = (largest.argmax(-1) * BLOCK).clamp_(max=vocab - BLOCK)  # (B,)
    return first + scores.gather(-1, first[:, None] + torch.arange(BLOCK, device=scores.device)).argmax(-1)


def drawn(scores: Float[Tensor, "batch vocab"], chances: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Return a token for each row, drawn by inverting the cumulative distribution at the row's random number."""
    ends = scores.softmax(-1).cumsum(-1, dtype=torch.float64)  # (B, V)
    found = torch.searchsorted(ends, chances[:, None] * ends[:, -1:], right=True)[:, 0]  # (B,)
    return found.clamp_(max=scores.shape[-1] - 1)  # NaN gives an id in range too


def _scores(logits: Tensor, rows: list[Row], settings: GenerationSettings) -> Tensor:
    if not settings.depends_on_row:
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
