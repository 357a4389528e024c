"""A reader of several texts: its cost, and that it sees changes of the model. test_company.py holds its logits."""

import pytest
import torch
from helpers import assert_within, max_abs, needs_kernel, random_ids, small_model
from torch.utils.flop_counter import FlopCounterMode

import minigpt
from minigpt.engine.reader import Reader


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


@needs_kernel
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
