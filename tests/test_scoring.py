"""The perplexity of a text file: every token counted once, with a long past, with both norms."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from checkpoints import reference, saved, talking
from hypothesis import given
from hypothesis import strategies as st

import minigpt
from minigpt.scoring import (
    Perplexity,
    file_ids,
    mean_perplexities,
    measure_perplexity,
    perplexity_of,
    window_losses,
    windows_of,
)

TEXT = "the dog ran to the house and the cat saw the dog; the dog saw nothing. " * 8


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = talking(tmp_path_factory.mktemp("talking"), n_positions=64)
    (place / "text").write_text(TEXT, encoding="utf-8")
    return place


@given(st.integers(2, 300), st.integers(2, 40), st.booleans(), st.data())
def test_windows_count_every_token_once(tokens: int, context: int, has_bos: bool, data: st.DataObject) -> None:
    """The first token of a text does not count, since nothing predicts it; nor that of a window without overlap."""
    room = context - has_bos
    stride = data.draw(st.none() | st.integers(1, room))
    step, counted = stride or context // 2, []
    for start, first, end in windows_of(tokens, context, stride, has_bos=has_bos):
        assert (start, end) == (start // step * step, min(tokens, start + room))
        assert first <= 1 or first - start >= max(room - step, 1 - has_bos)  # so many tokens, at least, of the past
        counted += range(first, end)
    missed = set(range(tokens)) - set(counted)
    assert len(counted) == len(set(counted))
    assert missed == (set() if has_bos else {0} if step < context else set(range(0, tokens, context)))


def as_transformers_does(
    source: Path, text: str, dtype: torch.dtype, stride: int, bos: int | None = None, window: int = 256
) -> tuple[float, int]:
    """The loop of transformers' page on fixed-length models, with labels of -100; also with a token before windows."""
    model = transformers.GPT2LMHeadModel.from_pretrained(source, dtype=dtype).eval()  # pyright: ignore
    ids = torch.tensor([minigpt.Tokenizer.from_pretrained(source).encode(text)])
    room, before, total, scored = window - (bos is not None), 0, 0.0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + room, ids.shape[1])
        inside = ids[:, begin:end]
        labels = inside.clone()
        labels[:, : before - end] = -100
        if bos is not None:
            first = torch.tensor([[bos]])
            inside, labels = torch.cat([first, inside], 1), torch.cat([-100 * torch.ones_like(first), labels], 1)
        counts = int((labels[:, 1:] != -100).sum())
        logits = model(inside).logits[0, :-1].double()  # model(labels=...) takes the loss in float32
        total += float(F.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        scored += counts
        before = end
        if end == ids.shape[1]:
            break
    return math.exp(total / scored), scored


@pytest.mark.parametrize(
    ("dtype", "stride", "bos"),
    [
        *itertools.product([torch.float64], [None, 256, 100], [False]),
        *itertools.product([torch.float64], [None, 255, 100], [True]),
        (torch.float32, 100, True),
    ],
)
@torch.inference_mode()
def test_it_is_that_of_a_plain_loop_of_transformers(dtype: torch.dtype, stride: int | None, bos: bool) -> None:
    text = "Once upon a time there was a young gardener named Tom, who found a silver coin in the forest. " * 32
    demo = Path(minigpt.__file__).parent / "demo"
    expected, scored = as_transformers_does(demo, text, dtype, stride or 128, 0 if bos else None)
    model = minigpt.from_pretrained(demo, dtype=str(dtype).removeprefix("torch."), device="cpu")
    tokenizer = minigpt.Tokenizer.from_pretrained(demo)
    result = measure_perplexity(model, tokenizer, text, stride, bos)
    print(result.perplexity, expected, result.protocol)
    assert result.perplexity == pytest.approx(expected, rel=1e-11 if dtype == torch.float64 else 1e-5)
    assert minigpt.perplexity(model, tokenizer, text, stride=stride, bos=bos) == result.perplexity
    assert (result.scored, result.window, result.stride, result.bos) == (scored, 256, stride or 128, bos)
    assert result.tokens == len(tokenizer.encode(text)) > 600
    assert result.perplexity == math.exp(result.loss)


class NoBeginning(minigpt.Tokenizer):
    """It has no beginning-of-text token."""

    bos_token_id = None


def test_a_stride_that_skips_tokens_is_refused(short: Path) -> None:
    model, tokenizer = minigpt.from_pretrained(short, device="cpu"), minigpt.Tokenizer.from_pretrained(short)
    for stride in (0, -1, 65):
        with pytest.raises(
            minigpt.GenerationError, match=f"stride must be from 1 to 64, a window's tokens of the text, got {stride}"
        ):
            minigpt.perplexity(model, tokenizer, TEXT, stride=stride)
    tokenizer = NoBeginning.from_pretrained(short)
    model.config = dataclasses.replace(model.config, bos_token_id=None)
    with pytest.raises(minigpt.GenerationError, match="bos needs a checkpoint with a beginning-of-text token"):
        minigpt.perplexity(model, tokenizer, TEXT, bos=True)


def test_parity_measures_the_same_of_both_norms(short: Path) -> None:
    report = minigpt.parity(short, norm="rms", text=short / "text", prompts=["the dog"], max_new_tokens=1, device="cpu")
    actual, tokenizer = report.perplexity, minigpt.Tokenizer.from_pretrained(short)
    assert (actual.tokens, actual.window, actual.stride) == (len(tokenizer.encode(TEXT)), 64, 32)
    for norm, measured in (("fused", actual.reference), ("rms", actual.candidate)):
        model = minigpt.from_pretrained(short, norm=norm, device="cpu")
        assert measured == pytest.approx(minigpt.perplexity(model, tokenizer, TEXT), rel=1e-4)
    assert actual.reference != actual.candidate


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read .*story: No such file"), (b"caf\xe9", "story is not UTF-8 text: byte 0xe9 at 3"),
        (b"", "story must have at least 2 tokens, got 0"), (b"\xef\xbb\xbfx", "at least 2 tokens, got 1"),
    ],
)  # fmt: skip
def test_a_text_file_that_cannot_be_read(short: Path, tmp_path: Path, content: bytes | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "story").write_bytes(content)
    with pytest.raises(minigpt.GenerationError, match=complaint):
        minigpt.parity(short, prompts=["a"], device="cpu", text=tmp_path / "story")


def test_a_text_file_wants_a_tokenizer(short: Path, tmp_path: Path) -> None:
    place = saved(reference(n_layer=1, vocab_size=300), tmp_path)
    with pytest.raises(minigpt.GenerationError, match="text needs a tokenizer"):
        minigpt.parity(place, prompts=[[1, 2]], device="cpu", text=short / "text")


def test_what_no_exponent_holds_is_infinite() -> None:
    assert perplexity_of(1e6, 10) == math.inf
    assert math.isnan(perplexity_of(math.nan, 10))
    assert math.isnan(perplexity_of(0.0, 0))
    assert perplexity_of(math.log(7) * 3, 3) == pytest.approx(7)


STORY = "Once upon a time there was a young gardener named Tom, who found a silver coin in the forest. " * 32


@pytest.fixture(scope="module")
def demo() -> tuple[minigpt.GPT2, minigpt.Tokenizer, transformers.GPT2LMHeadModel]:
    """The demo in float64 as ours, its tokenizer, and transformers' model."""
    place = Path(minigpt.__file__).parent / "demo"
    hf = transformers.GPT2LMHeadModel.from_pretrained(place, dtype=torch.float64).eval()
    model = minigpt.from_pretrained(dtype="float64", device="cpu")
    return model, minigpt.Tokenizer.from_pretrained("demo"), hf


def second_halves(model: minigpt.GPT2, ids: list[int], window: int) -> float:
    """llama.cpp's number: windows that do not overlap, and the tokens behind the middle of each; docs/study.md."""
    windows = [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]
    loss = scored = 0.0
    for whole in windows:
        (all_of_it,), (half,) = window_losses(model, whole), window_losses(model, whole[: window // 2 + 1])
        loss += all_of_it.loss - half.loss
        scored += all_of_it.tokens - half.tokens
    return math.exp(loss / scored)


@pytest.mark.parametrize("window", [64, 256])
@torch.inference_mode()
def test_the_second_halves_of_windows_are_llama_cpps_number(window: int, demo: tuple) -> None:
    """llama.cpp's loop in examples/perplexity: logits of positions first to n_ctx - 2, first being n_ctx / 2."""
    model, tokenizer, hf = demo
    ids = tokenizer.encode(STORY)
    total = count = 0
    for chunk in range(len(ids) // window):
        tokens = torch.tensor([ids[chunk * window : (chunk + 1) * window]])
        logits, first = hf(tokens).logits[0], window // 2
        total += F.cross_entropy(logits[first:-1], tokens[0, first + 1 :], reduction="sum").item()
        count += window - first - 1
    assert second_halves(model, ids, window) == pytest.approx(math.exp(total / count), rel=1e-6)


def page_of_transformers(result: Perplexity) -> float:
    """The number that transformers' page prints: each window's mean, weighted by one token less; docs/study.md."""
    weights = [row.tokens - (number > 0) for number, row in enumerate(result.rows)]
    losses = [row.loss / row.tokens for row in result.rows]
    return math.exp(sum(map(math.prod, zip(losses, weights, strict=True))) / sum(weights))


@pytest.mark.parametrize("stride", [pytest.param(32, marks=pytest.mark.thorough), 128])
@torch.inference_mode()
def test_transformers_page_follows_from_the_rows(stride: int, demo: tuple) -> None:
    """The loop of the page on fixed-length models, as it stands there."""
    model, tokenizer, hf = demo
    encodings, max_length = torch.tensor([tokenizer.encode(STORY)]), 256
    seq_len, nll_sum, n_tokens, prev_end_loc = encodings.size(1), 0.0, 0, 0
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + max_length, seq_len)
        trg_len = end_loc - prev_end_loc
        input_ids = encodings[:, begin_loc:end_loc]
        target_ids = input_ids.clone()
        target_ids[:, :-trg_len] = -100
        neg_log_likelihood = hf(input_ids, labels=target_ids).loss
        num_loss_tokens = (target_ids != -100).sum().item() - target_ids.size(0)
        nll_sum += neg_log_likelihood * num_loss_tokens
        n_tokens += num_loss_tokens
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    page = torch.exp(torch.as_tensor(nll_sum / n_tokens)).item()
    assert page_of_transformers(measure_perplexity(model, tokenizer, STORY, stride)) == pytest.approx(page, rel=1e-6)


@torch.inference_mode()
def test_a_shorter_window_is_a_shorter_past(demo: tuple) -> None:
    model, tokenizer, _ = demo
    place = Path(minigpt.__file__).parent / "demo"
    expected, _ = as_transformers_does(place, STORY, torch.float64, 20, window=50)
    assert measure_perplexity(model, tokenizer, STORY, 20, window=50).perplexity == pytest.approx(expected, rel=1e-9)
    for window in (1, 257):
        with pytest.raises(minigpt.GenerationError, match="window must be from 2 to 256, the model's context, got"):
            measure_perplexity(model, tokenizer, STORY, window=window)


def test_several_texts_have_a_mean_by_token_and_one_by_text(demo: tuple, tmp_path: Path) -> None:
    model, tokenizer, _ = demo
    texts = ["Once upon a time there was a girl.", STORY]
    first, second = results = [measure_perplexity(model, tokenizer, text) for text in texts]
    means = mean_perplexities(results)
    total = first.loss * first.scored + second.loss * second.scored
    assert means["perplexity"] == pytest.approx(math.exp(total / (first.scored + second.scored)))
    assert means["perplexity_by_text"] == pytest.approx(math.exp((first.loss + second.loss) / 2))
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ids = [*tokenizer.encode(texts[0]), *model.config.eos_token_ids[:1], *tokenizer.encode(texts[1])]
    assert file_ids(tmp_path / "two.jsonl", tokenizer, model.config) == ids  # a text of several texts
