"""A batch of rows that are decoded together: a row joins when there is a place, and leaves when it has ended.

Where the kernel serves the model, it reads everything: whole texts, pieces of them, and new tokens. Then the bits of a
row's logits depend on its text alone. Elsewhere PyTorch reads texts of similar length together, and the last bits
depend on the others.

B rows, T tokens read at once, V vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Container, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.device import of_any_length, require_threads
from minigpt.engine.kernel import StepKernel, step_of
from minigpt.engine.ragged import Ragged
from minigpt.generation.choosing import next_logits, next_tokens
from minigpt.generation.drafts import Drafts
from minigpt.generation.row import Row
from minigpt.generation.slots import WASTE, Slots
from minigpt.model import GPT2
from minigpt.model.cache import KVCache
from minigpt.model.masking import left_padded

SHORT = 31  # tokens of texts that are read together, whatever their lengths


class Step(NamedTuple):
    """What the model computed when it read the last tokens.

    Attributes:
        logits: (B, V) of each row's next token, in float32 and with the ids that are padding; with a draft,
            (1 + drafted, V) after the only row's last token and after each token of the draft.
        draft: the tokens that were read after the last token of the only row; None if no draft was tried.
        seconds: that the draft and the step took.
    """

    logits: Float[Tensor, "read vocab"]
    draft: list[int] | None = None
    seconds: tuple[float, float] = (0.0, 0.0)


class Batch:
    """The rows in progress, and the logits of each one's next token.

    ``join`` reads the texts of new rows. ``choose`` adds a token to every row and lets ended rows leave. ``read`` reads
    the new tokens, and the texts of new rows.

    Args:
        places: the most rows at a time.
        longest: the columns of the cache.
        use_cache: whether keys and values are kept.
        drafts: what guesses the next tokens while there is a single row; None for no guesses.

    Attributes:
        rows: the rows in progress.
        last_step: ``choose`` takes the tokens from it.
    """

    def __init__(
        self, model: GPT2, places: int, longest: int, *, use_cache: bool = True, drafts: Drafts | None = None
    ) -> None:
        require_threads()
        self.model, self.places, self.use_cache, self.drafts = model, places, use_cache, drafts
        self.context, self.device = model.config.n_positions, model.wte.weight.device
        self.rows: list[Row] = []
        self.kernel = step_of(model)
        self.slots: Slots | Ragged | None = None  # without a cache PyTorch reads the whole text for each token
        if self.kernel is not None:
            self.slots = Ragged(model.new_cache(places, longest), self.kernel)
        elif use_cache:
            self.slots = Slots(model.new_cache(places, longest))
        self.last_step = Step(torch.empty(0, model.config.vocab_size, device=self.device))

    @property
    def logits(self) -> Float[Tensor, "read vocab"]:
        return self.last_step.logits

    @torch.inference_mode()
    @of_any_length()
    def join(self, rows: list[Row]) -> None:
        """Read the texts of new rows. Equal texts of one prompt are read once."""
        if not rows:
            return
        self._give_up_draft()
        rows_of: defaultdict[tuple[int, ...], list[Row]] = defaultdict(list)
        for row in rows:
            rows_of[row.prompt, *self.window(row)].append(row)
        if isinstance(self.slots, Ragged):
            self._add(*self._read_texts(self.slots, rows_of))
            return
        for _, similar in groupby(sorted(rows_of, key=len), key=lambda text: max(len(text), SHORT).bit_length()):
            texts = list(similar)  # of long ones at most half is padding
            ids, mask = left_padded([text[1:] for text in texts], self.device)  # both (texts, T)
            starts = [ids.shape[1] + 1 - len(text) for text in texts]
            of_row = [place for place, text in enumerate(texts) for _ in rows_of[text]]
            cache = None if self.slots is None else self.model.new_cache(*ids.shape)
            hidden = self.model.hidden_states(ids, mask if any(starts) else None, cache=cache)[:, -1:]  # (texts, 1, C)
            if self.slots is not None and cache is not None:
                self.slots.join(cache, of_row, starts)
            self._add([row for text in texts for row in rows_of[text]], self.model.head(hidden)[:, 0].float()[of_row])

    def _read_texts(
        self, slots: Ragged, rows_of: dict[tuple[int, ...], list[Row]]
    ) -> tuple[list[Row], Float[Tensor, "rows vocab"]]:
        """Read texts into slots; return the rows in the order of their slots, and the logits of their next tokens."""
        places = {text: slots.add() for text in rows_of}
        logits = slots.read({place: text[1:] for text, place in places.items()}, last=1)
        rows, of_row = [first for first, *_ in rows_of.values()], list(range(len(rows_of)))
        for number, (text, (_, *others)) in enumerate(rows_of.items()):
            for row in others:
                slots.copy(places[text])
                rows.append(row)
                of_row.append(number)
        return rows, logits[of_row]

    @torch.inference_mode()
    def take(self, rows: list[Row], cache: KVCache, logits: Float[Tensor, "1 vocab"]) -> None:
        """Let rows join whose text has been read already: its cache, and the logits of its next token."""
        if rows:
            self._give_up_draft()
            assert self.slots is not None
            self.slots.join(cache, [0] * len(rows), [0])
            self._add(rows, logits.expand(len(rows), -1))

    def _give_up_draft(self) -> None:
        """Forget what was read of a draft, since other rows join before it is chosen from."""
        if self.rows and self.last_step.draft:
            assert self.slots is not None
            self.slots.forget(len(self.last_step.draft))
        self.last_step = Step(self.logits[: len(self.rows)])

    def _add(self, rows: list[Row], logits: Tensor) -> None:
        self.last_step = Step(torch.cat([self.logits, logits]) if self.rows else logits)
        self.rows += rows

    @torch.inference_mode()
    def choose(self) -> list[Row]:
        """Add a token to every row, or several to a row with a draft; return the rows. Ended rows leave the batch."""
        chosen = list(self.rows)
        if self.last_step.draft is not None:
            self._choose_drafted(chosen[0], self.last_step.draft)
        else:
            for row, token in zip(chosen, next_tokens(next_logits(self.model, self.logits), chosen), strict=True):
                row.push(token)
        self.drop([row for row in chosen if row.end])
        return chosen

    @torch.inference_mode()
    @of_any_length()
    def read(self, new: Sequence[Row] = ()) -> None:
        """Read the last token of each row, and the texts of new rows.

        A row whose context is full reads its window again as a new row, and so does every row without a cache.
        """
        again = self.full()
        self.drop(again)
        if self.rows:
            if isinstance(self.slots, Slots):
                self.slots.trim(WASTE if len(self.rows) > 1 else 1)
            alone = len(self.rows) == 1 and self.rows[0].may_draft and not (again or new)
            self.last_step = self._read_draft(self.rows[0]) if alone and self.drafts else Step(self._logits())
        self.join([*again, *new])

    def full(self) -> list[Row]:
        """Return the rows whose windows ``read`` reads again: those whose context is full, or all without a cache."""
        if self.slots is None or not self.use_cache:
            return list(self.rows)
        lengths = zip(self.rows, self.slots.lengths, strict=True)
        return [row for row, length in lengths if length >= self.context]

    def drop(self, rows: Container[Row]) -> None:
        """Remove rows; the last row moves to a free place. Call it between ``choose`` and ``read``."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place] in rows:
                if self.slots is not None:
                    self.slots.leave(place)
                self.rows[place] = self.rows[-1]
                del self.rows[-1]

    def _logits(self, draft: Sequence[int] = ()) -> Float[Tensor, "read vocab"]:
        """Read the last token of each row, and the tokens of a draft of the only one; return the logits after each."""
        ids = [[row.ids[-1], *draft] for row in self.rows]
        if isinstance(self.slots, Ragged):
            return self.slots.read(dict(enumerate(ids)))
        hidden = self.model.hidden_states(torch.tensor(ids, device=self.device), cache=self.slots)  # (B, T, C)
        return self.model.head(hidden).flatten(0, 1).float()

    def _read_draft(self, row: Row) -> Step:
        """Read the only row's last token, and a guess of those that follow it."""
        assert self.drafts is not None
        assert self.slots is not None
        room = min(row.left, min(self.context, self.slots.max_length) - self.slots.lengths[0])
        begun = time.perf_counter()
        draft = self.drafts.guess(row, room - 1, self.slots)
        drafted = time.perf_counter()
        logits = self._logits(draft)
        return Step(logits, draft, (drafted - begun, time.perf_counter() - drafted))

    def _choose_drafted(self, row: Row, draft: list[int]) -> None:
        """Add the tokens of the draft that are right, and the one after them."""
        assert self.drafts is not None
        assert self.slots is not None
        right = 0
        for logits in next_logits(self.model, self.logits).split(1):  # each (1, V)
            row.push(*next_tokens(logits, [row]))
            if row.end or right == len(draft) or row.ids[-1] != draft[right]:
                break
            right += 1
        self.slots.forget(len(draft) - right)
        self.drafts.learn(row, len(draft), right, *self.last_step.seconds)

    def window(self, row: Row) -> list[int]:
        """Return the tokens that the row's next token sees: all, or a window of the last ones if there are too many.

        A window drops ``slide_stride`` tokens when it is full, and then grows again.
        """
        if len(row.ids) <= self.context:
            return row.ids
        least = max(1, self.context - row.settings.slide_stride + 1)
        since = len(row.ids) - max(row.prompt_length, self.context + 1)  # tokens since the text became too long
        return row.ids[-(least + since % (self.context - least + 1)) :]


@torch.inference_mode()
def read_piece(
    model: GPT2, kernel: StepKernel | None, ids: list[int], cache: KVCache, last: int
) -> Float[Tensor, "last vocab"]:
    """Read further tokens of the only text in a cache, as a ``Batch`` reads it; return logits after the last ones."""
    if kernel is None:
        hidden = model.hidden_states(torch.tensor([ids], device=model.wte.weight.device), cache=cache)  # (1, T, C)
        return model.head(hidden[:, -last:])[0].float() if last else hidden.new_empty(0, model.config.vocab_size)
    columns = range(cache.length, cache.length + len(ids))
    logits = kernel(ids, [0] * len(ids), columns, cache.store, range(len(ids) - last, len(ids)))
    cache.advance(len(ids), None)
    return logits
