"""The perplexity of a text file: every token counted once, with a long past, with both norms."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints import reference, saved, tiny_bpe
from hypothesis import given
from hypothesis import strategies as st

import minigpt
from minigpt.judge.measures import perplexity_of
from minigpt.judge.perplexity import windows_of

TEXT = "the dog ran to the house and the cat saw the dog; the dog saw nothing. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = saved(reference(std=0.3, n_layer=1, vocab_size=300, n_positions=64), tmp_path_factory.mktemp("talking"))
    tiny_bpe(300).save(str(place / "tokenizer.json"))
    (place / "text").write_text(TEXT, encoding="utf-8")
    return place


@given(st.integers(2, 300), st.integers(2, 40))
def test_windows_count_every_token_but_the_first_once(tokens: int, window: int) -> None:
    counted = []
    for start, first, end in windows_of(tokens, window):
        assert 0 <= start < first < end <= tokens
        assert end - start <= window
        assert first == 1 or first - start >= window - window // 2  # so many tokens, at least, of the past
        counted += range(first, end)
    assert counted == list(range(1, tokens))


@torch.inference_mode()
def test_it_is_that_of_strided_windows(folder: Path) -> None:
    """Recomputed token by token, each from the window that its stride gives it."""
    report = minigpt.parity(
        folder, norm="rms", text=folder / "text", prompts=["the dog"], max_new_tokens=1, device="cpu"
    )
    found = report.perplexity
    ids = minigpt.Tokenizer.from_pretrained(folder).encode(TEXT)
    assert (found.tokens, found.window, found.stride) == (len(ids), 64, 32)
    assert len(ids) > 200
    for norm, measured in (("fused", found.reference), ("rms", found.candidate)):
        model = minigpt.from_pretrained(folder, norm=norm, device="cpu")
        losses = []
        for token in range(1, len(ids)):
            end = 64 if token < 64 else min(len(ids), 64 + 32 * ((token - 64) // 32 + 1))
            logits = model(torch.tensor([ids[max(0, end - 64) : token]]))[0, -1]
            losses.append(F.cross_entropy(logits, torch.tensor(ids[token])).item())
        expected = math.exp(sum(losses) / len(losses))
        print(f"{norm}: {measured:.8g}, recomputed {expected:.8g}")
        assert measured == pytest.approx(expected, rel=1e-4)
        tokenizer = minigpt.Tokenizer.from_pretrained(folder)
        assert minigpt.perplexity(model, tokenizer, TEXT) == pytest.approx(expected, rel=1e-4)
    assert found.reference != found.candidate


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read .*story: No such file"), (b"caf\xe9", "story is not UTF-8 text: byte 0xe9 at 3"),
        (b"", "story must have at least 2 tokens, got 0"), (b"\xef\xbb\xbfx", "at least 2 tokens, got 1"),
    ],
)  # fmt: skip
def test_a_text_file_that_cannot_be_read(folder: Path, tmp_path: Path, content: bytes | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "story").write_bytes(content)
    with pytest.raises(minigpt.GenerationError, match=complaint):
        minigpt.parity(folder, prompts=["a"], device="cpu", text=tmp_path / "story")


def test_a_text_file_wants_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    place = saved(reference(n_layer=1, vocab_size=300), tmp_path)
    with pytest.raises(minigpt.GenerationError, match="text needs a tokenizer"):
        minigpt.parity(place, prompts=[[1, 2]], device="cpu", text=folder / "text")


def test_what_no_exponent_holds_is_infinite() -> None:
    assert perplexity_of(1e6, 10) == math.inf
    assert math.isnan(perplexity_of(math.nan, 10))
    assert math.isnan(perplexity_of(0.0, 0))
    assert perplexity_of(math.log(7) * 3, 3) == pytest.approx(7)
