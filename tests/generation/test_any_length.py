"""cuDNN's attention stands aside while texts grow, and is back where it was when nobody writes."""

import threading
from typing import Any

import pytest
import torch
from helpers import small_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from minigpt import GPT2
from minigpt.generation.batch import of_any_length
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.settings import parse_settings


@pytest.mark.parametrize("how", [{}, {"prompt_lookup_num_tokens": 4}], ids=["", "lookup"])
@pytest.mark.parametrize("alone", [False, True], ids=["one of several", "alone"])
def test_a_growing_text_is_not_for_cudnn(alone: bool, how: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would plan anew for every length; it stays where it was asked for by itself, and otherwise is back after."""
    model, whole = small_model(), GPT2.run
    settings = parse_settings(max_new_tokens=9, eos_token_id=None, **how)
    seen: set[bool] = set()

    def spy(*given: Any) -> torch.Tensor:
        seen.add(torch.backends.cuda.cudnn_sdp_enabled())
        with sdpa_kernel(SDPBackend.MATH):  # a CPU has no other that could be alone
            return whole(*given)

    monkeypatch.setattr(GPT2, "run", spy)
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *([] if alone else others)]):
        for row in write_rows(model, rows_of(model, [[1, 2, 3]], settings, None), settings, 1):
            assert torch.backends.cuda.cudnn_sdp_enabled(), f"after {len(row.new_ids)} tokens"
    assert seen == {alone}


def test_of_several_threads_the_last_puts_it_back() -> None:
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with of_any_length():
            entered.set()
            left.wait(10)

    assert torch.backends.cuda.cudnn_sdp_enabled()
    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with of_any_length():  # begins second, ends last
        left.set()
        thread.join()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
