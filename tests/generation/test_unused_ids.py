"""Ids that stand for no text have no chance."""

import pytest
import torch

from minigpt.generation.choosing import without_unused_ids


def test_nothing_changes_where_every_id_is_used() -> None:
    logits = torch.randn(2, 7)
    assert without_unused_ids(logits, None) is logits
    assert torch.equal(without_unused_ids(logits, 7), logits)


@pytest.mark.parametrize("used", [1, 4, 6])
def test_ids_from_there_on_are_excluded_and_the_others_are_as_they_were(used: int) -> None:
    logits = torch.randn(3, 7)
    left = without_unused_ids(logits, used)
    assert torch.equal(left[:, :used], logits[:, :used])
    assert left[:, used:].eq(-torch.inf).all()
    assert logits.isfinite().all(), "the model's own logits are left alone"
