"""A text in company: its logits and its tokens are those that it has alone, whatever the others do.

By the kernel bit for bit, in every dtype: texts come at once or in pieces, leave, slide beyond the context, are copied,
scored and drafted. By PyTorch at float64's exactness. tests/serve/test_app.py asks a server for the same bits.
"""

import random
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, assert_within, max_abs, needs_kernel, random_ids, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernel import WIDE, model_of
from torch import Tensor

import minigpt
from minigpt.engine import kernel
from minigpt.engine.reader import Reader
from minigpt.engine.step import StepKernel
from minigpt.generation.batch import Batch, Piece
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.drafts import MOST_DRAFTED, Drafts
from minigpt.generation.row import Row
from minigpt.generation.settings import parse_settings

KINDS = ("float32", "bfloat16", "int8")

# The kernel's rows


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [19, 40])
def test_a_row_depends_neither_on_others_nor_on_threads(kind: str, rows: int) -> None:
    model = model_of(kind, **WIDE)
    step = StepKernel(model)
    store = torch.randn(model.new_cache(rows, 30).store.shape).to(model.wte.weight.dtype)
    slots, columns = list(range(rows)), [29 - r % 7 for r in range(rows)]
    together, threads = step(slots, slots, columns, store), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert_same_bits(step(slots, slots, columns, store), together, f"{count} threads")
    finally:
        torch.set_num_threads(threads)
    for r in (0, 3, 18, rows - 1):
        assert_same_bits(step([r], [r], [columns[r]], store), together[r : r + 1], f"row {r} alone")


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_of_a_wide_matrix_are_read_as_one(kind: str) -> None:
    """Sums of several rows stay in a cache by strips of the outputs, the more rows the narrower."""
    model = model_of(kind, n_embd=256, n_head=2, n_inner=1670, n_layer=1)
    step, store = StepKernel(model), model.new_cache(9, 4).store
    alone = torch.cat([step([row], [row], [0], store) for row in range(9)])
    for rows in range(2, 10):
        places = list(range(rows))
        assert_same_bits(step(places, places, [0] * rows, store), alone[:rows], f"{rows} rows")


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", [[], [39], [0, 3, 17, 38], list(range(5, 40))])
def test_a_row_does_not_depend_on_which_logits_are_asked_for(kind: str, asked: list[int]) -> None:
    """Two texts of 20 tokens. All keys and values go to the cache, also those of the last layer."""
    model = model_of(kind, **WIDE)
    step = StepKernel(model)
    tokens, slots, columns = list(range(40)), [0] * 20 + [1] * 20, [*range(20), *range(20)]
    store, other = model.new_cache(2, 20).store.zero_(), model.new_cache(2, 20).store.zero_()
    together = step(tokens, slots, columns, store)
    assert_same_bits(step(tokens, slots, columns, other, asked), together[asked], f"rows {asked}")
    assert_same_bits(other, store, "the cache")


# Texts that are written by the kernel


def written(model: Any, prompts: list[list[int]], places: int) -> list[list[int]]:
    """Return the tokens of every prompt, written in so many places at a time."""
    settings = parse_settings(max_new_tokens=12, eos_token_id=[3, 5, 8], do_sample=True, seed=1)
    rows = rows_of(model, prompts, settings, None)
    for _ in write_rows(model, rows, settings, places):
        pass
    return [row.ids for row in rows]


@needs_kernel
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_rows_that_join_and_leave_write_what_they_write_alone(count: int) -> None:
    """Prompts of random lengths in 5 places; rows end at random, and others take their places."""
    model, chance = small_model(), random.Random(0)
    prompts = [[chance.randrange(83) for _ in range(chance.randint(1, 20))] for _ in range(count)]
    assert written(model, prompts, 5) == written(model, prompts, 1)


CONTEXT, PLACES = 64, 6
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
        self.model = model_of(kind, n_positions=CONTEXT)
        self.kernel = StepKernel(self.model)

    def __call__(self, ids: list[int]) -> Tensor:
        """Return logits (V) of the next token."""
        store = self.model.new_cache(1, len(ids)).store
        return self.kernel(ids, [0] * len(ids), range(len(ids)), store, [len(ids) - 1])[0]


MODELS = {kind: Alone(kind) for kind in KINDS} if kernel.is_at_hand() else {}


class Company:
    """A batch, whose logits are compared in each step."""

    def __init__(self, kind: str, drafted: bool, chance: random.Random) -> None:
        self.alone, drafts = MODELS[kind], None
        if drafted and kind != "int8":
            drafts = Drafts(self.alone.model, "int8")
            drafts.length.next = lambda: chance.randint(0, MOST_DRAFTED)
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


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(actions=ACTIONS, drafted=st.booleans(), chance=st.randoms())
def test_every_logit_has_the_bits_of_its_text_alone(
    kind: str, actions: list[tuple[str, Any]], drafted: bool, chance: random.Random
) -> None:
    company = Company(kind, drafted, chance)
    company.add([5, 40])
    company.write(1)
    for name, argument in actions:
        if company.batch.rows:
            getattr(company, name)(argument)
            company.write(1)
    assert company.compared > 2


# Texts that PyTorch reads


ROWS, COLUMNS = 4, 24
DOUBLE = small_model(dtype=torch.float64, n_positions=COLUMNS)  # which the kernel does not serve
EAGER = small_model(dtype=torch.float64, n_positions=COLUMNS, attention="eager")

TOKENS = st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS)
READS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), TOKENS),
        st.tuples(st.just("clear"), st.integers(0, ROWS - 1)),
        st.tuples(st.just("forget"), st.integers(0, ROWS - 1)),
        st.tuples(st.just("copy"), st.permutations(range(ROWS))),
    ),
    max_size=12,
)


class Texts:
    """A reader, and beside it the text of each row."""

    def __init__(self, model: minigpt.GPT2) -> None:
        self.model, self.reader = model, Reader(model, ROWS, COLUMNS)
        self.texts: list[list[int]] = [[] for _ in range(ROWS)]

    def read(self, counts: list[int]) -> None:
        """Read some tokens of each row, and compare all logits with those of its text alone."""
        room = [min(count, COLUMNS - len(text)) for count, text in zip(counts, self.texts, strict=True)]
        pieces = {row: random_ids(1, count)[0].tolist() for row, count in enumerate(room) if count}
        logits = self.reader.read(pieces, last=COLUMNS)
        alone: list[Tensor] = []
        for row, ids in pieces.items():
            self.texts[row] += ids
            alone.append(self.model(torch.tensor([self.texts[row]]))[0, -len(ids) :])
        if alone:
            truth = torch.cat(alone)
            assert_within(max_abs(logits - truth), 1e-12 * max_abs(truth), max_abs(truth), f"{room}")

    def clear(self, row: int) -> None:
        self.reader.clear(row)
        self.texts[row] = []

    def forget(self, row: int) -> None:
        self.reader.lengths[row] //= 2
        del self.texts[row][self.reader.lengths[row] :]

    def copy(self, order: list[int]) -> None:
        row, to, *_ = order
        self.reader.copy(row, to)
        self.texts[to] = list(self.texts[row])


@pytest.mark.parametrize("model", [DOUBLE, EAGER], ids=["sdpa", "eager"])
@settings(max_examples=40)
@given(actions=READS)
@torch.no_grad()
def test_each_text_has_the_logits_that_it_has_alone(model: minigpt.GPT2, actions: list[tuple[str, object]]) -> None:
    texts = Texts(model)
    for name, argument in actions:
        getattr(texts, name)(argument)
    texts.read([1] * ROWS)


def test_nan_of_one_text_stays_in_its_row() -> None:
    """PyTorch multiplies what a query does not see by 0."""
    model = small_model(dtype=torch.float64, tie_word_embeddings=False)
    with torch.no_grad():
        model.wte.weight[7] = torch.nan
    reader = Reader(model, 2, 20)
    logits = reader.read({0: [7] * 12, 1: [1, 2, 3]})
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()
    reader.clear(0)
    reader.read({0: [1]})
    assert reader.read({0: [2], 1: [4]}).isfinite().all()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_of_nan_leaves_nothing_to_the_row_that_takes_its_place(place: int) -> None:
    """PyTorch multiplies what is masked by 0, and NaN times 0 is NaN."""
    model = small_model()
    model.ln_f.register_forward_hook(lambda *_: None)  # the kernel does not serve it
    rows = [Row(ids, parse_settings(max_new_tokens=6), prompt=0) for ids in ([*range(30)], [7, 8, 9, 10], [5, 6, 7])]
    batch = Batch(model, 3, 40)
    batch.add(rows)
    batch.step()
    assert batch.reader.kernel is None
    batch.reader.store[:, :, place] = torch.nan
    batch.drop([rows[place]])
    assert not batch.reader.store.isnan().any()
