"""Rows that come and go: each keeps computing what it would compute alone, at float64's own exactness."""

import torch
from helpers import assert_within, max_abs, random_ids, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigpt import GPT2
from minigpt.generation.slots import Slots
from minigpt.model.masking import left_padded

CONTEXT = 24
MODEL = small_model(dtype=torch.float64, n_positions=CONTEXT)

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(st.integers(1, 10), min_size=1, max_size=2)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("read"), st.integers(1, 4)),
        st.tuples(st.just("trim"), st.integers(1, 4)),
    ),
    max_size=14,
)


class Rows:
    """Slots, and beside them the text that each row ought to have."""

    def __init__(self, model: GPT2, places: int, columns: int) -> None:
        room = model.new_cache(places, columns)
        room.store.fill_(torch.nan)  # what was never written must never be seen
        self.model, self.places, self.slots = model, places, Slots(room)
        self.texts: list[Tensor] = []  # each (T,)

    def join(self, lengths: list[int]) -> None:
        """Texts of these lengths join, the last of them twice."""
        texts = [random_ids(1, length)[0] for length in lengths]
        ids, mask = left_padded([text.tolist() for text in texts])
        aside = self.model.new_cache(*ids.shape)
        self.model(ids, mask, cache=aside)
        of_row = [*range(len(texts)), len(texts) - 1][: self.places - len(self.texts)]
        self.slots.trim(1)
        self.slots.join(aside, of_row, (mask == 0).sum(-1).tolist())
        self.texts += [texts[row] for row in of_row]

    def leave(self, row: int) -> None:
        if row < len(self.texts):
            self.slots.leave(row)
            self.texts[row] = self.texts[-1]
            del self.texts[-1]

    def read(self, times: int) -> None:
        """Read a token in every row, and compare the logits with those of its text alone."""
        for _ in range(times):
            if not self.texts or max(map(len, self.texts)) >= CONTEXT:
                return
            self.slots.trim(3)
            new = random_ids(len(self.texts), 1)
            together = self.model(new, cache=self.slots)[:, 0]  # (B, V)
            self.texts = [torch.cat([text, token]) for text, token in zip(self.texts, new, strict=True)]
            alone = torch.stack([self.model(text[None])[0, -1] for text in self.texts])
            assert_within(max_abs(together - alone), 1e-12 * max_abs(alone), max_abs(alone), f"{len(self.texts)} rows")

    def trim(self, waste: int) -> None:
        self.slots.trim(waste)


@settings(max_examples=60)
@given(actions=ACTIONS)
@torch.no_grad()
def test_whatever_comes_and_goes_each_row_computes_what_it_does_alone(actions: list[tuple[str, object]]) -> None:
    rows = Rows(MODEL, places=4, columns=CONTEXT + 1)
    for name, how in actions:
        getattr(rows, name)(how)
    if rows.texts:
        rows.read(1)
        assert rows.slots.store[..., : rows.slots.length, :].isfinite().all()


@torch.no_grad()
def test_a_row_may_fill_every_column_while_others_come_and_go() -> None:
    rows = Rows(MODEL, places=3, columns=CONTEXT)
    rows.join([2])
    rows.leave(1)
    for step in range(CONTEXT - 3):
        rows.read(1)
        rows.join([step % 5 + 1])
        if step % 3 == 0:
            rows.leave(len(rows.texts) - 1)
    assert max(map(len, rows.texts)) == rows.slots.length == CONTEXT - 1


@torch.no_grad()
def test_rows_of_one_length_need_no_mask() -> None:
    rows = Rows(MODEL, places=2, columns=8)
    rows.join([3])
    assert rows.slots.padding_mask is None
    rows.leave(0)
    rows.join([5])
    assert rows.slots.padding_mask is not None
