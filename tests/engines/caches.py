"""A check of an engine's cache: what it computes token by token."""

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from minigpt import engines


def check_cache(candidate: engines.Engine, hf_model: GPT2LMHeadModel, tolerance: float) -> None:
    """Tokens one by one are those of the model, twice: a text leaves nothing behind. So are the likeliest tokens."""
    ids = [5, 17, 42, 8, 23, 11, 9]
    with torch.no_grad():
        expected = hf_model(torch.tensor([ids])).logits[0, 1:-1]
        written = hf_model.generate(torch.tensor([ids[:2]]), max_new_tokens=6, do_sample=False)[0, 2:]
    for _ in range(2):
        step = candidate.start(ids)
        assert step is not None
        decoded = [step(ids[:2]), *(step([token]) for token in ids[2:-1])]
        torch.testing.assert_close(torch.from_numpy(np.concatenate(decoded)), expected, atol=tolerance, rtol=0)
        step, piece, new = candidate.start(ids[:2]), ids[:2], list[int]()
        assert step is not None
        for _ in range(6):
            piece = [int(step(piece).argmax())]
            new += piece
        assert new == written.tolist()
