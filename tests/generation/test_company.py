"""A row in company: the bits of all its logits are those of its text alone, whatever the others do.

Texts join together or in pieces, leave, slide beyond the context and are drafted, in every dtype of the kernel.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import random_ids, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigpt.engine import kernel, quantize_int8
from minigpt.engine.kernel import StepKernel
from minigpt.generation.batch import Batch, read_piece
from minigpt.generation.drafts import MOST, Drafts, Pace
from minigpt.generation.row import Row
from minigpt.generation.settings import parse_settings

pytestmark = pytest.mark.skipif(not kernel.is_at_hand(), reason="the kernel was not built, or is turned off")
CONTEXT, PLACES = 64, 6
KINDS = ("float32", "bfloat16", "int8")

LENGTHS = st.integers(1, CONTEXT + 9)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(LENGTHS, min_size=1, max_size=3)),
        st.tuples(st.just("join_in_pieces"), st.lists(st.integers(1, 30), min_size=1, max_size=4)),
        st.tuples(st.just("leave"), st.integers(0, PLACES - 1)),
        st.tuples(st.just("leave_but"), st.integers(0, PLACES - 1)),
        st.tuples(st.just("write"), st.integers(1, 9)),
        st.tuples(st.just("read_with"), st.lists(LENGTHS, min_size=1, max_size=2)),
    ),
    min_size=1,
    max_size=9,
)


class Alone:
    """A model, and the logits of texts that it reads alone, each from its first token on."""

    def __init__(self, kind: str) -> None:
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        self.model = small_model(dtype=dtype, n_positions=CONTEXT)
        if kind == "int8":
            quantize_int8(self.model)
        self.kernel = StepKernel(self.model)

    def __call__(self, ids: list[int]) -> Tensor:
        """Return logits (1, V) of the next token."""
        store = self.model.new_cache(1, len(ids)).store
        return self.kernel(ids, [0] * len(ids), range(len(ids)), store, [len(ids) - 1])


MODELS = {kind: Alone(kind) for kind in KINDS} if kernel.is_at_hand() else {}


class Company:
    """A batch, whose logits are compared after each action."""

    def __init__(self, kind: str, stride: int, drafted: bool) -> None:
        self.alone, self.number = MODELS[kind], 0
        draft = None if kind == "int8" else "int8"
        drafts = Drafts(self.alone.model, most_copied=3, draft=draft) if drafted else None
        self.batch = Batch(self.alone.model, PLACES, CONTEXT, drafts=drafts)
        self.settings = parse_settings(
            max_new_tokens=1000, eos_token_id=None, overflow="slide", slide_stride=stride, do_sample=True, seed=1
        )

    def rows(self, lengths: list[int]) -> list[Row]:
        lengths = lengths[: PLACES - len(self.batch.rows)]
        self.number += len(lengths)
        return [Row(random_ids(1, length)[0].tolist(), self.settings, prompt=self.number, seed=5) for length in lengths]

    def join(self, lengths: list[int]) -> None:
        """Texts join at once, the first of them twice."""
        rows = self.rows(lengths)
        if rows and len(rows) + len(self.batch.rows) < PLACES:
            rows.append(Row(list(rows[0].ids), self.settings, prompt=rows[0].prompt, seed=6))
        self.batch.join(rows)

    def join_in_pieces(self, lengths: list[int]) -> None:
        """A text that is read in pieces joins."""
        rows = self.rows([sum(lengths)])
        if rows:
            ids, model = self.batch.window(rows[0]), self.alone.model
            cache, logits = model.new_cache(1, len(ids)), torch.empty(0)
            while cache.length < len(ids):
                piece = ids[cache.length : cache.length + random.choice(lengths)]
                logits = read_piece(model, self.batch.kernel, piece, cache, 1)
            self.batch.take(rows, cache, logits)

    def leave(self, row: int) -> None:
        self.step(leaving=self.batch.rows[row : row + 1])

    def leave_but(self, row: int) -> None:
        """All leave but one, which may then be drafted."""
        rows = self.batch.rows
        self.step(leaving=[other for other in rows if other is not rows[row % len(rows)]])
        self.write(3)

    def write(self, tokens: int) -> None:
        for _ in range(tokens):
            self.step()

    def read_with(self, lengths: list[int]) -> None:
        """Read new texts with the new tokens."""
        self.step(joining=self.rows(lengths))

    def step(self, leaving: Sequence[Row] = (), joining: Sequence[Row] = ()) -> None:
        if self.batch.rows:
            self.batch.choose()
        self.batch.drop(leaving)
        self.batch.read(joining)
        self.compare()

    def compare(self) -> None:
        """Compare all logits with those of each text alone."""
        batch, draft = self.batch, self.batch.last_step.draft or []
        if not batch.rows:
            return
        texts = [batch.window(row) + draft[:count] for row in batch.rows for count in range(len(draft) + 1)]
        for text, logits in zip(texts, batch.logits.split(1), strict=True):
            assert torch.equal(logits, self.alone(text)), f"{len(text)} tokens among {len(batch.rows)} rows"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(actions=ACTIONS, stride=st.sampled_from([1, 7]), drafted=st.booleans(), chance=st.randoms())
def test_every_logit_has_the_bits_of_its_text_alone(
    kind: str, actions: list[tuple[str, Any]], stride: int, drafted: bool, chance: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "length", lambda _: chance.randint(0, MOST))
        company = Company(kind, stride, drafted)
        company.join([5, 40])
        company.compare()
        for name, how in actions:
            if company.batch.rows or not name.startswith("leave"):
                getattr(company, name)(how)
                company.compare()
