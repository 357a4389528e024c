"""A row in company: the bits of all its logits are those of its text alone, whatever the others do.

Texts come at once or in pieces, leave, slide beyond the context, are copied, scored and drafted, in every dtype of the
kernel.
"""

import random
from typing import Any

import pytest
import torch
from helpers import random_ids, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigpt.engine import kernel, quantize_int8
from minigpt.engine.step import StepKernel
from minigpt.generation.batch import Batch, Piece
from minigpt.generation.drafts import MOST_DRAFTED, DraftLength, Drafts
from minigpt.generation.row import Row
from minigpt.generation.settings import parse_settings

pytestmark = pytest.mark.skipif(not kernel.is_at_hand(), reason="the kernel was not built, or is turned off")
CONTEXT, PLACES = 64, 6
KINDS = ("float32", "bfloat16", "int8")

LENGTH = st.integers(1, CONTEXT + 9)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(LENGTH, min_size=1, max_size=3)),
        st.tuples(st.just("add_scored"), LENGTH),
        st.tuples(st.just("drop"), st.integers(0, PLACES - 1)),
        st.tuples(st.just("drop_others"), st.integers(0, PLACES - 1)),
        st.tuples(st.just("write"), st.integers(1, 9)),
        st.tuples(st.just("write_in_pieces"), st.lists(st.integers(0, 30), min_size=1, max_size=5)),
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
        """Return logits (V) of the next token."""
        store = self.model.new_cache(1, len(ids)).store
        return self.kernel(ids, [0] * len(ids), range(len(ids)), store, [len(ids) - 1])[0]


MODELS = {kind: Alone(kind) for kind in KINDS} if kernel.is_at_hand() else {}


class Company:
    """A batch, whose logits are compared in each step."""

    def __init__(self, kind: str, drafted: bool) -> None:
        self.alone = MODELS[kind]
        drafts = Drafts(self.alone.model, "int8") if drafted and kind != "int8" else None
        self.batch = Batch(self.alone.model, PLACES, CONTEXT, drafts)
        self.settings = parse_settings(max_new_tokens=1000, eos_token_id=None, overflow="slide", do_sample=True, seed=1)
        self.compared = 0

    def add(self, lengths: list[int]) -> None:
        """Texts come, the first of them twice."""
        texts = [random_ids(1, length)[0].tolist() for length in [lengths[0], *lengths]]
        texts[0] = list(texts[1])
        free = PLACES - len(self.batch.rows)
        self.batch.add([Row(text, self.settings, seed=seed) for seed, text in enumerate(texts[:free])])

    def add_scored(self, length: int) -> None:
        """A text comes whose logits are all needed."""
        self.add([length])
        self.batch.rows[-1].scores_prompt = True

    def drop(self, place: int) -> None:
        self.batch.drop(self.batch.rows[place : place + 1])

    def drop_others(self, place: int) -> None:
        """All leave but one, which may then be drafted."""
        rows = self.batch.rows
        self.batch.drop([row for row in rows if row is not rows[place % len(rows)]])
        self.write(3)

    def write(self, steps: int) -> None:
        self.write_in_pieces([None] * steps)

    def write_in_pieces(self, budgets: list[Any]) -> None:
        for budget in budgets:
            step = self.batch.read(budget)
            for piece in step:
                self.compare(piece)
            self.batch.choose(step)

    def compare(self, piece: Piece) -> None:
        """Compare all logits with those of the text alone."""
        text, begin = piece.row.ids + (piece.draft or []), max(0, len(piece.row.ids) - CONTEXT)
        end = piece.first + len(piece.ids) + len(piece.draft or [])
        for count, logits in enumerate(reversed(piece.logits)):
            seen = text[begin : end - count]
            assert torch.equal(logits, self.alone(seen)), f"{len(seen)} tokens among {len(self.batch.rows)} rows"
            self.compared += 1


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(actions=ACTIONS, drafted=st.booleans(), chance=st.randoms())
def test_every_logit_has_the_bits_of_its_text_alone(
    kind: str, actions: list[tuple[str, Any]], drafted: bool, chance: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLength, "next", lambda _: chance.randint(0, MOST_DRAFTED))
        company = Company(kind, drafted)
        company.add([5, 40])
        company.write(1)
        for name, argument in actions:
            if company.batch.rows:
                getattr(company, name)(argument)
                company.write(1)
        assert company.compared > 2
