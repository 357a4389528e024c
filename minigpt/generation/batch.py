"""Texts that are written together. A step reads tokens of each, chooses the next token of those that are read to their
end, and adds it.

V vocabulary.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.reader import Reader
from minigpt.errors import GenerationError
from minigpt.generation.choosing import next_tokens
from minigpt.generation.drafts import Drafts
from minigpt.generation.row import Row
from minigpt.model import GPT2

NOTHING = torch.empty(0, device="cpu")


@dataclass(eq=False)
class Piece:
    """Tokens of a row that a step reads.

    Attributes:
        row: the row.
        first: the place of the first token in the row's text.
        ids: the tokens, without a draft.
        is_whole: the row's text is read to its end, so that its next token can be chosen.
        draft: tokens that are read behind them, to be verified; None if no draft was tried.
    """

    row: Row
    first: int
    ids: list[int]
    is_whole: bool
    draft: list[int] | None = None

    def __post_init__(self) -> None:
        self.read: Float[Tensor, "all vocab"] = NOTHING  # the logits of all pieces that were read with this one
        self.among = slice(0)  # its place among them

    @property
    def outputs(self) -> int:
        """The number of logits that are needed: after each id if the row scores its prompt, else if ``is_whole`` after
        the last one and each of the draft."""
        if self.row.scores_prompt:
            return len(self.ids)
        return int(self.is_whole) + len(self.draft or ())

    @property
    def tokens(self) -> list[int]:
        """The ids, and the draft behind them."""
        return self.ids + (self.draft or [])

    @property
    def logits(self) -> Float[Tensor, "outputs vocab"]:
        """After the last tokens of the ids and the draft. Where the kernel reads, in float32."""
        return self.read[self.among]


class Batch:
    """The rows in progress. Row i of the list lies in row i of the reader.

    A row whose text is longer than the context reads a window of the last tokens, and the whole window again for each
    new token. Of rows with one and the same text, one reads it, and the others copy its keys and values.

    Args:
        places: the most rows.
        columns: the most tokens of a row that are read.
        drafts: guesses the next tokens while there is a single row; None for no guesses.
    """

    def __init__(self, model: GPT2, places: int, columns: int, drafts: Drafts | None = None) -> None:
        self.model, self.places, self.drafts = model, places, drafts
        self.context = model.config.n_positions
        self.reader = Reader(model, places, min(columns, self.context))
        self.rows: list[Row] = []
        self._begins: list[int] = []  # of each row, the place of the first token of its window

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows, of which nothing is read yet."""
        self.rows += rows
        self._begins += [0] * len(rows)

    def drop(self, rows: Container[Row]) -> None:
        """Remove rows. The last row takes the place of a removed one."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place] in rows:
                self._drop(place)

    def _drop(self, place: int) -> None:
        """Remove the row at a place, which the last row takes."""
        last = len(self.rows) - 1
        self.reader.clear(place)
        if place != last:
            self.reader.copy(last, place)
            self.rows[place] = self.rows[last]
            self._begins[place] = self._begins[last]
            self.reader.clear(last)
        del self.rows[last]
        del self._begins[last]

    def step(self, budget: int | None = None) -> list[Row]:
        """Call ``read`` and then ``choose``."""
        return self.choose(self.read(budget))

    def read(self, budget: int | None = None, only: Container[Row] | None = None) -> list[Piece]:
        """Read the next tokens of the rows; return what was read. After an error of the model nothing counts as read.

        Args:
            budget: how many tokens to read of texts that have more than one unread token, in all; None for no limit.
                Each of these texts gets an equal share; what a short text leaves goes to the longer ones.
            only: the rows to read; None for all.
        """
        places = []
        for place, row in enumerate(self.rows):
            if only is None or row in only:
                places.append(place)
        self._settle(places)
        pieces = self._pieces(places, budget)
        if len(self.rows) == 1 and self.drafts is not None:
            for piece in pieces.values():
                if piece.is_whole and len(piece.ids) == 1 and piece.row.may_draft:
                    piece.draft = self.drafts.guess(piece.row, self.reader)
        tokens = {place: piece.tokens for place, piece in pieces.items()}
        outputs = {place: piece.outputs for place, piece in pieces.items()}
        logits = self.reader.read(tokens, outputs)
        begin = 0
        for piece in pieces.values():
            end = begin + piece.outputs
            piece.read = logits
            piece.among = slice(begin, end)
            begin = end
        return list(pieces.values())

    def _settle(self, places: Iterable[int]) -> None:
        """Make the cache fit the texts: windows move on, and rows of one text get the keys that one of them has."""
        for place in places:
            self._slide(place)
            self._share_prefix(place)

    def _slide(self, place: int) -> None:
        """Let the window of a row end where its text ends. One that moves is read again."""
        begin = max(0, len(self.rows[place].ids) - self.context)
        if begin != self._begins[place]:
            self._begins[place] = begin
            self.reader.lengths[place] = 0

    def _share_prefix(self, place: int) -> None:
        """Give a row the keys and values of all but its last token, if another row of the same text has read them."""
        other = self._twin(place)
        if other is None:
            return
        count = len(self._window(place)) - 1
        if self.reader.lengths[other] >= count:
            self.reader.copy(other, place, count)

    def _twin(self, place: int) -> int | None:
        """Return the row that reads the same text for a row of which nothing is read; None if it reads for itself.

        Of several rows, the first reads, or one that scores its prompt.
        """
        row, lengths = self.rows[place], self.reader.lengths
        if lengths[place] or row.scores_prompt:
            return None
        window = self._window(place)
        if len(window) == 1:
            return None
        begin = self._begins[place]
        end = begin + len(window)
        for other, twin in enumerate(self.rows):
            if other == place or self._begins[other] != begin or twin.ids[begin:end] != window:
                continue
            has_read = lengths[other] >= len(window) - 1
            if has_read or other < place or twin.scores_prompt:
                return other
        return None

    def _window(self, place: int) -> list[int]:
        """Return the tokens of a row's window."""
        return self.rows[place].ids[self._begins[place] :]

    def _unread(self, place: int) -> list[int]:
        """Return the tokens of a row's window that are to be read; none while another row reads the same text."""
        if self._twin(place) is not None:
            return []
        return self.rows[place].ids[self._begins[place] + self.reader.lengths[place] :]

    def _pieces(self, places: Iterable[int], budget: int | None) -> dict[int, Piece]:
        """Return what to read of each row, by its place."""
        unread: dict[int, list[int]] = {}
        for place in places:
            ids = self._unread(place)
            if ids:
                unread[place] = ids
        counts = {place: len(ids) for place, ids in unread.items()}
        shares = counts
        if budget is not None:
            shares = _shares(counts, budget)
        pieces = {}
        for place, share in shares.items():
            if share:
                row, count = self.rows[place], counts[place]
                first = len(row.ids) - count
                pieces[place] = Piece(row, first, unread[place][:share], is_whole=share == count)
        return pieces

    @torch.inference_mode()
    def choose(self, pieces: Sequence[Piece]) -> list[Row]:
        """Add a token to every row that is read to its end; return these rows. Ended rows leave the batch.

        A row that has a draft gets every token of it that is the row's own choice, and the one after them. A row that
        may have no new token ends.

        Raises:
            GenerationError: if a row has no token to choose, and its ``fail`` raises that.
        """
        whole = [piece for piece in pieces if piece.is_whole]
        for piece in whole:
            if not piece.row.left:
                piece.row.finish("length")
        going = [piece for piece in whole if not piece.row.end]
        if len(going) == 1 and going[0].draft is not None:
            self._choose_drafted(going[0], going[0].draft)
        elif going:
            self._push(_last_logits(going), [piece.row for piece in going])
        rows = [piece.row for piece in whole]
        ended = [row for row in rows if row.end]
        if ended:
            self._settle(range(len(self.rows)))  # a text that waits for the same text takes its keys now
            self.drop(ended)
        return rows

    def _push(self, logits: Float[Tensor, "rows vocab"], rows: list[Row]) -> None:
        """Choose and add a token to each row. An error of one row is not an error of the others."""
        try:
            tokens = next_tokens(self.model, logits, rows)
        except GenerationError as error:
            if len(rows) == 1:
                rows[0].fail(error)
                return
            for alone, row in zip(logits.split(1), rows, strict=True):
                self._push(alone, [row])
            return
        for row, token in zip(rows, tokens, strict=True):
            try:
                row.push(token)
            except GenerationError as error:  # the tokenizer has no text for it
                row.fail(error)

    def _choose_drafted(self, piece: Piece, draft: list[int]) -> None:
        """Add the tokens of a draft that are right, and the one after them."""
        assert self.drafts is not None
        row = piece.row
        right = 0
        for logits in piece.logits.split(1):  # each (1, V)
            try:
                row.push(*next_tokens(self.model, logits, [row]))
            except GenerationError as error:
                if not right:
                    row.fail(error)
                break  # the tokens before the error are shown first; the next step fails again
            if row.end or right == len(draft) or row.ids[-1] != draft[right]:
                break
            right += 1
        self.reader.lengths[0] = len(row.ids) - 1 - self._begins[0]  # all but the last token
        self.drafts.learn(row, len(draft), right)


def _shares(counts: dict[int, int], budget: int) -> dict[int, int]:
    """Return how many tokens to read of each row, of ``counts`` unread ones. A single unread token is free."""
    shares = dict.fromkeys(counts, 1)
    long = sorted((count, place) for place, count in counts.items() if count > 1)
    waiting = len(long)
    for count, place in long:  # the shortest first, since what it leaves goes to the others
        shares[place] = min(count, budget // waiting)
        budget -= shares[place]
        waiting -= 1
    return shares


def _last_logits(pieces: list[Piece]) -> Float[Tensor, "rows vocab"]:
    """Return the logits after the last token of each piece; without a copy if these are all that was read."""
    read = pieces[0].read
    are_all = len(read) == len(pieces) and all(piece.read is read for piece in pieces)
    if are_all:
        return read
    return torch.cat([piece.logits[-1:] for piece in pieces])
