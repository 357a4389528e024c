"""A batch of rows that are decoded together: a row joins when there is a place, and leaves when it has ended.

B rows, T tokens read at once, V vocabulary.
"""

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence

import torch

from minigpt.engine import GPT2
from minigpt.engine.kernel import step_of
from minigpt.errors import GenerationError
from minigpt.generation.any_length import of_any_length
from minigpt.generation.choosing import next_logits, next_tokens
from minigpt.generation.drafts import Drafts
from minigpt.generation.reading import groups, left_padded
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.generation.slots import Slots

OVERHEAD = {"cpu": 32, "cuda": 1024}  # a forward takes as long as reading so many more tokens
WASTE = 32  # unused columns from which on it pays to move all rows to the left

_threads_of: int | None = None  # the process whose threads of OpenMP have decoded


def require_threads() -> None:
    """Check that this process has the threads that decoding waits for.

    Raises:
        GenerationError: if it was forked from one that had decoded. A fork copies the list of OpenMP's threads and not
            the threads, so the first product would never end.
    """
    global _threads_of
    if torch.get_num_threads() == 1:
        return
    if _threads_of not in (None, os.getpid()):
        raise GenerationError(
            "this process was forked from one that had generated, and OpenMP's threads are not in it; start it with "
            "multiprocessing.get_context('spawn'), or call torch.set_num_threads(1) in it first"
        )
    _threads_of = os.getpid()


class Batch:
    """The rows in progress, and the logits of each one's next token.

    ``join`` reads the texts of new rows. ``choose`` adds a token to every row and lets ended rows leave. ``read`` reads
    the new tokens, and the texts of new rows.
    """

    def __init__(self, model: GPT2, settings: GenerationSettings, places: int, longest: int) -> None:
        require_threads()
        self.model, self.settings, self.places = model, settings, places
        self.context = model.config.n_positions
        self.rows: list[Row] = []
        if settings.use_cache:
            self.slots = Slots(model.new_cache(places, longest))
        self.kernel = step_of(model) if settings.use_cache else None
        self.drafts = Drafts(model, settings) if settings.drafts else None
        self.drafted: list[int] | None = None  # what the last step read after the last token of the only row
        self.seconds = 0.0, 0.0  # that the draft and its step took
        self.logits = torch.empty(0, model.config.vocab_size)  # (B, V) of each row's next token

    @property
    def device(self) -> torch.device:
        return self.model.wte.weight.device

    @torch.inference_mode()
    @of_any_length()
    def join(self, rows: list[Row]) -> None:
        """Read the texts of new rows, a group of similar lengths at a time."""
        texts: defaultdict[tuple[int, ...], list[Row]] = defaultdict(list)
        for row in rows:
            texts[row.prompt, *self._window(row)].append(row)  # rows of one prompt that say the same share its reading
        said = sorted(texts, key=len, reverse=True)
        for group in groups([len(text) - 1 for text in said], OVERHEAD.get(self.device.type, OVERHEAD["cpu"])):
            few = said[group]
            ids, mask = left_padded([text[1:] for text in few], self.device)  # both (texts, T)
            starts = [len(few[0]) - len(text) for text in few]
            of_row = [place for place, text in enumerate(few) for _ in texts[text]]
            cache = self.model.new_cache(*ids.shape) if self.settings.use_cache else None
            hidden = self.model.hidden_states(ids, mask if any(starts) else None, cache=cache)[:, -1:]  # (texts, 1, C)
            logits = next_logits(self.model, self.model.head(hidden)[:, 0])[of_row]
            if cache is not None:
                self.slots.trim(WASTE)
                self.slots.join(cache, of_row, starts)
            self.logits = torch.cat([self.logits, logits]) if self.rows else logits
            self.rows += [row for text in few for row in texts[text]]

    @torch.inference_mode()
    def choose(self) -> list[Row]:
        """Add a token to every row, or several to a row with a draft; return the rows. Ended rows leave the batch."""
        chosen = list(self.rows)
        if self.drafted is not None:
            self._choose_drafted(*chosen)
        else:
            for row, token in zip(chosen, self._next_tokens(), strict=True):
                row.push(token)
        self.drop([row for row in chosen if row.end])
        return chosen

    @torch.inference_mode()
    @of_any_length()
    def read(self, new: Sequence[Row] = ()) -> None:
        """Read the last token of each row, and the texts of new rows.

        A row whose context is full reads its window again as a new row, and so does every row without a cache.
        """
        again = list(self.rows)
        if self.settings.use_cache:
            seen = [self.slots.length - start for start in self.slots.starts]
            again = [row for row, tokens in zip(self.rows, seen, strict=True) if tokens >= self.context]
        self.drop(again)
        if self.rows:
            self.slots.trim(WASTE)
            if self.drafts and len(self.rows) == 1 and self.rows[0].may_draft and not (again or new):
                self._read_draft(*self.rows)
            else:
                self._read_last()
        self.join([*again, *new])

    def drop(self, rows: Container[Row]) -> None:
        """Remove rows; the last row moves to a free place. Call it between ``choose`` and ``read``."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place] in rows:
                if self.settings.use_cache:
                    self.slots.leave(place)
                self.rows[place] = self.rows[-1]
                del self.rows[-1]

    def _next_tokens(self) -> list[int]:
        return next_tokens(self.logits, self.rows)

    def _read_last(self) -> None:
        ids = [[row.ids[-1], *(self.drafted or ())] for row in self.rows]  # there is a draft for a single row only
        slots, count, new = self.slots, len(ids), len(ids[0])
        if self.kernel is None:
            hidden = self.model.hidden_states(torch.tensor(ids, device=self.device), cache=slots)  # (B, T, C)
            logits = self.model.head(hidden).flatten(0, 1)
        else:
            tokens = [token for few in ids for token in few]
            places = [place for place in range(count) for _ in range(new)]
            starts = [slots.starts[place] for place in places]
            columns = [*range(slots.length, slots.length + new)] * count
            logits = self.kernel(tokens, places, starts, columns, slots.store)
            slots.resize(slots.length + new)
        self.logits = next_logits(self.model, logits)

    def _read_draft(self, row: Row) -> None:
        """Read the row's last token, and a guess of those that follow it."""
        assert self.drafts is not None
        seen = self.slots.length - self.slots.starts[0]
        room = min(row.left, self.context - seen, self.slots.max_length - self.slots.length)
        begun = time.perf_counter()
        self.drafted = self.drafts.guess(row, room - 1, self.slots)
        drafted = time.perf_counter()
        self._read_last()
        self.seconds = drafted - begun, time.perf_counter() - drafted

    def _choose_drafted(self, row: Row) -> None:
        """Add the tokens of the draft that are right, and the one after them."""
        assert self.drafts is not None
        drafted, self.drafted, right = self.drafted or [], None, 0
        for logits in self.logits.split(1):  # each (1, V)
            row.push(*next_tokens(logits, [row]))
            if row.end or right == len(drafted) or row.ids[-1] != drafted[right]:
                break
            right += 1
        self.slots.resize(self.slots.length - len(drafted) + right)
        self.drafts.learn(row, len(drafted), right, *self.seconds)

    def _window(self, row: Row) -> list[int]:
        """Return the tokens that the row's next token sees: all, or a window of the last ones if there are too many.

        A window drops ``slide_stride`` tokens when it is full, and then grows again.
        """
        if len(row.ids) <= self.context:
            return row.ids
        least = max(1, self.context - row.settings.slide_stride + 1)
        since = len(row.ids) - max(row.prompt_length, self.context + 1)  # tokens since the text became too long
        return row.ids[-(least + since % (self.context - least + 1)) :]


def write(batch: Batch, rows: list[Row]) -> Iterator[Row]:
    """Yield every row each time that it has new tokens, until all have ended; ``row.end`` is set in ended rows.

    The next waiting row takes a free place at once.
    """
    waiting = iter(rows)
    batch.join(list(itertools.islice(waiting, batch.places)))
    while batch.rows:
        yield from batch.choose()
        batch.read(list(itertools.islice(waiting, batch.places - len(batch.rows))))
