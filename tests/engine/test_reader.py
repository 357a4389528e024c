"""Texts that are read together, in pieces, by PyTorch: each has the logits that it has alone, at float64's exactness.

tests/generation/test_company.py holds the kernel to the same bits.
"""

import pytest
import torch
from helpers import assert_within, max_abs, random_ids, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import minigpt
from minigpt.engine import kernel
from minigpt.engine.reader import Reader

CONTEXT, ROWS = 24, 4
MODEL = small_model(dtype=torch.float64, n_positions=CONTEXT)  # which the kernel does not serve
EAGER = small_model(dtype=torch.float64, n_positions=CONTEXT, attention="eager")

COUNTS = st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), COUNTS),
        st.tuples(st.just("clear"), st.integers(0, ROWS - 1)),
        st.tuples(st.just("forget"), st.integers(0, ROWS - 1)),
        st.tuples(st.just("copy"), st.permutations(range(ROWS))),
    ),
    max_size=12,
)


class Texts:
    """A reader, and beside it the text of each row."""

    def __init__(self, model: minigpt.GPT2) -> None:
        self.model, self.reader = model, Reader(model, ROWS, CONTEXT)
        self.texts: list[list[int]] = [[] for _ in range(ROWS)]

    def read(self, counts: list[int]) -> None:
        """Read some tokens of each row, and compare all logits with those of its text alone."""
        room = [min(count, CONTEXT - len(text)) for count, text in zip(counts, self.texts, strict=True)]
        pieces = {row: random_ids(1, count)[0].tolist() for row, count in enumerate(room) if count}
        logits = self.reader.read(pieces, last=CONTEXT)
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


@pytest.mark.parametrize("model", [MODEL, EAGER], ids=["sdpa", "eager"])
@settings(max_examples=40)
@given(actions=ACTIONS)
@torch.no_grad()
def test_each_text_has_the_logits_that_it_has_alone(model: minigpt.GPT2, actions: list[tuple[str, object]]) -> None:
    texts = Texts(model)
    for name, argument in actions:
        getattr(texts, name)(argument)
    texts.read([1] * ROWS)


@pytest.mark.parametrize("lengths", [[100, 3, 2, 3, 2], [9], [80, 80, 2, 40, 50]], ids=str)
def test_texts_of_different_lengths_cost_little_more_than_alone(lengths: list[int]) -> None:
    """A batch computes with padding, as long as its longest text."""
    model = small_model(dtype=torch.float64)

    def operations(pieces: dict[int, list[int]]) -> int:
        with FlopCounterMode(display=False) as counter:
            Reader(model, len(lengths), 100).read(pieces)
        return counter.get_total_flops()

    texts = [[5] * length for length in lengths]
    alone = sum(operations({0: text}) for text in texts)
    together = operations(dict(enumerate(texts)))
    print(f"{together:,} operations together, {alone:,} alone")
    assert 0 < together <= 1.25 * alone


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


@pytest.mark.skipif(not kernel.is_at_hand(), reason="the kernel was not built, or is turned off")
@pytest.mark.parametrize("norm", ["rms", "dyt"])  # the kernel serves the first
def test_a_norm_that_is_swapped_while_a_text_is_read_is_seen(norm: str) -> None:
    model, ids = small_model(), random_ids(1, 9)[0].tolist()
    reader = Reader(model, 2, 20)
    assert reader.kernel is not None
    reader.read({0: ids})
    store = reader.store.clone()
    minigpt.swap_norms(model, norm)
    logits = reader.read({0: [5]})
    cache = model.new_cache(1, 20)
    cache.store[:] = store[:, :, :1]
    cache.length = 9
    with torch.no_grad():
        expected = model(torch.tensor([[5]]), cache=cache)[0]
    assert (reader.kernel is None) == (norm == "dyt")
    assert_within(max_abs(logits - expected), 2e-5 * max_abs(expected), max_abs(expected), norm)


def test_weights_that_move_are_seen() -> None:
    model = small_model()
    reader = Reader(model, 1, 20)
    first = reader.read({0: [5, 6]})
    model.h[0].mlp.c_fc.weight.data = 2 * model.h[0].mlp.c_fc.weight.data
    reader.clear(0)
    assert not torch.equal(reader.read({0: [5, 6]}), first)
