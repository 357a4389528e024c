"""Drafts in int8: the same tokens as without, in fewer steps."""

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import needs_kernel, random_ids, small_model

import minigpt
from minigpt.engine import quantize_int8, use_kernel
from minigpt.engine.int8 import CACHED_BYTES, COMMON_IDS, drafter_of, int8_share, rounding_seconds
from minigpt.engine.step import StepKernel
from minigpt.generation import generate
from minigpt.generation.batch import Batch
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.drafts import MOST_DRAFTED, DraftLength, Drafts
from minigpt.generation.row import Row
from minigpt.generation.settings import parse_settings


def drafted_at(model: minigpt.GPT2, length: Callable[[], int]) -> minigpt.GPT2:
    """The model, whose drafts are so long: it keeps the object that chooses for all of its texts."""
    Drafts(model, "int8").length.next = length
    return model


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)


@pytest.fixture(scope="module")
def large() -> minigpt.GPT2:
    """A model whose weights fit into no processor's cache, so that drafts may save time."""
    model = small_model(n_positions=128, n_embd=512, n_layer=6, vocab_size=100, used_vocab_size=80)
    assert sum(weight.nbytes for weight in model.parameters()) > CACHED_BYTES
    return model


def some_settings(chance: random.Random, vocab: int) -> dict[str, Any]:
    """Settings at random, of every kind that changes which tokens are chosen or when a text ends."""
    some = [chance.randrange(vocab) for _ in range(6)]
    new = chance.randint(2, 40)
    maybe: dict[str, Any] = {
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {some[0]: 2.0},
        "no_repeat_ngram_size": 3, "bad_words_ids": [some[:1], some[1:3]], "suppress_tokens": some[3:5],
        "min_new_tokens": chance.randint(0, new), "output_scores": True, "output_logprobs": True,
    }  # fmt: skip
    draws = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "num_return_sequences": 2}
    slides = {"overflow": "slide"}
    settings = {name: value for name, value in maybe.items() if chance.random() < 0.25}
    settings |= {"max_new_tokens": new, "eos_token_id": chance.choice([None, some[5], some])}
    if chance.random() < 0.6:
        settings |= {name: value for name, value in draws.items() if chance.random() < 0.4}
        settings |= {"do_sample": True, "seed": chance.randrange(100)}
    return settings | (slides if chance.random() < 0.5 else {})


def as_tensors(out: Any) -> list[torch.Tensor]:
    """Return the parts of a result that are there, scores as one tensor."""
    if isinstance(out, torch.Tensor):
        return [out]
    return [part if isinstance(part, torch.Tensor) else torch.stack(part) for part in out if part is not None]


@needs_kernel
@pytest.mark.parametrize("count", [25, pytest.param(2000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
def test_at_any_settings_an_int8_draft_changes_no_bit(count: int, dtype: torch.dtype, chance: random.Random) -> None:
    model = drafted_at(small_model(n_positions=64, dtype=dtype), lambda: chance.randint(0, MOST_DRAFTED))
    drafted = accepted = 0
    for _ in range(count):
        ids = random_ids(chance.choice([1, 1, 2]), chance.randint(1, 20))
        mask = torch.ones_like(ids)
        mask[0, : ids.shape[1] // 3] = 0
        settings = some_settings(chance, 83)
        try:
            plain = as_tensors(generate(model, ids, mask, **settings))
        except minigpt.GenerationError as error:
            with pytest.raises(minigpt.GenerationError, match=re.escape(str(error))):
                generate(model, ids, mask, **settings, draft="int8")
            continue
        supplied = as_tensors(generate(model, ids, mask, **settings, draft="int8"))
        for one, other in zip(supplied, plain, strict=True):
            assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1)), settings
        rows = rows_of(model, [ids[-1].tolist()], parse_settings(**settings, draft="int8"), None)
        for _ in write_rows(model, rows, rows[0].settings, len(rows)):
            pass
        drafted, accepted = drafted + rows[0].drafted, accepted + rows[0].accepted
    print(f"{accepted} of {drafted} tokens accepted")
    assert 0.5 * drafted < accepted < drafted


@needs_kernel
def test_a_drafter_has_the_norms_of_the_model_and_follows_its_weights() -> None:
    model, ids = small_model(), random_ids(1, 6)
    minigpt.swap_norms(model, "rms", "h.0.ln_1")
    other = small_model()
    minigpt.swap_norms(other, "rms", "h.0.ln_1")
    target = quantize_int8(other)

    def logits(step: Any, store: torch.Tensor) -> torch.Tensor:
        return step([5], [0], [6], store)

    with torch.inference_mode():
        model(ids, cache=(cache := model.new_cache(1, 8)))
    first = logits(drafter_of(model), cache.store.clone())
    assert torch.equal(first, logits(StepKernel(target), cache.store.clone()))
    weight = model.h[0].mlp.c_fc.weight
    with torch.no_grad():
        weight.mul_(2)
    second = logits(drafter_of(model), cache.store.clone())
    assert not torch.equal(second, first)
    weight.data = 2 * weight.data
    assert not torch.equal(logits(drafter_of(model), cache.store.clone()), second)


@needs_kernel
@pytest.mark.parametrize("how", [{}, {"do_sample": True, "seed": 3, "top_k": 30}], ids=["greedy", "sampled"])
def test_a_greedy_draft_consists_of_the_common_ids(how: dict[str, Any]) -> None:
    vocab = 2 * COMMON_IDS + 3
    model, ids = small_model(n_positions=64, vocab_size=vocab), random_ids(1, 6)

    def logits(is_greedy: bool) -> torch.Tensor:
        return drafter_of(model, is_greedy)([5], [0], [0], model.new_cache(1, 8).store)

    first = logits(True)
    frequency = model.wte.weight @ model.ln_f.bias
    common = frequency.topk(COMMON_IDS).indices.sort().values
    rare = torch.ones(vocab, dtype=torch.bool).index_fill(0, common, False)
    assert torch.equal(first[:, common], logits(False)[:, common])
    assert first[:, rare].eq(-torch.inf).all()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    share = 1 - (vocab - COMMON_IDS) * model.config.n_embd / parameters
    assert int8_share(model, is_greedy=True) == pytest.approx(share * int8_share(model))
    plain = generate(model, ids, max_new_tokens=50, eos_token_id=None, draft=None, **how)
    assert torch.equal(generate(model, ids, max_new_tokens=50, eos_token_id=None, draft="int8", **how), plain)
    assert rounding_seconds(model, is_greedy=True) == 0
    with torch.no_grad():
        model.ln_f.bias.neg_()
    assert rounding_seconds(model, is_greedy=True) > 0
    assert rounding_seconds(model) == 0, "the whole head does not read the shift"
    assert not torch.equal(logits(True).isinf(), first.isinf()), "other ids are common"
    with torch.no_grad():
        model.ln_f.bias.zero_()
    assert logits(True).isfinite().all(), "a shift of 0 says nothing"


@needs_kernel
def test_where_the_kernel_does_not_serve_an_int8_draft_is_refused() -> None:
    ids = random_ids(1, 3)
    with pytest.raises(minigpt.ConfigError, match="ln_1"):
        generate(small_model("dyt"), ids, max_new_tokens=2, draft="int8")
    use_kernel(False)
    try:
        with pytest.raises(minigpt.ConfigError, match="turned off"):
            generate(small_model(), ids, max_new_tokens=2, draft="int8")
    finally:
        use_kernel(True)


@needs_kernel
@pytest.mark.parametrize("joins", [0, 1, 2])
def test_a_text_that_others_join_and_leave_is_drafted_again(joins: int) -> None:
    """Another text joins after each of the first steps, before a token is chosen from it."""
    model = small_model(n_positions=64)
    settings = parse_settings(max_new_tokens=60, eos_token_id=None)
    batch = Batch(model, 2, 64, Drafts(model, "int8"))
    row = Row([1, 2, 3], settings)
    batch.add([row])
    while batch.rows:
        batch.step()
        if joins and len(batch.rows) == 1:
            joins -= 1
            batch.add([Row([4, 5], parse_settings(max_new_tokens=1, eos_token_id=None))])
    assert row.drafted > 0
    assert row.ids == generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=60, eos_token_id=None)[0].tolist()


@needs_kernel
def test_auto_writes_without_drafts_where_a_weight_is_not_finite(large: minigpt.GPT2) -> None:
    model = copy.deepcopy(large)
    with torch.no_grad():
        model.wte.weight[-1] = torch.nan  # padding of the vocabulary
    ids, how = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 100, "eos_token_id": None}
    assert torch.equal(generate(model, ids, **how, draft="auto"), generate(model, ids, **how, draft=None))


@needs_kernel
@pytest.mark.parametrize(("seconds", "drafts"), [(0.0, True), (60.0, False)])
def test_auto_drafts_where_the_rounding_is_repaid(
    seconds: float, drafts: bool, large: minigpt.GPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        "minigpt.generation.drafts.rounding_seconds", lambda model, is_greedy: asked.append(model) or seconds
    )
    settings = parse_settings(max_new_tokens=100, eos_token_id=None, draft="auto")
    rows = rows_of(large, [[1, 2, 3]], settings, None)
    for _ in write_rows(large, rows, settings, 1):
        pass
    assert (rows[0].drafted > 0, len(asked)) == (drafts, 1)


@needs_kernel
def test_rounding_takes_no_time_where_it_is_kept() -> None:
    model = small_model()
    assert rounding_seconds(model) > 0
    assert rounding_seconds(model) > 0, "nothing is kept yet"
    drafter_of(model)
    assert rounding_seconds(model) == 0
    for weight in (model.wte.weight, model.h[1].mlp.c_fc.weight):
        with torch.no_grad():
            weight.mul_(2)
        assert rounding_seconds(model) > 0
        drafter_of(model)
        assert rounding_seconds(model) == 0


def test_what_repays() -> None:
    """A step of 10 ms: drafts of float32 take a token to 6 ms, and those of bfloat16 to 8 ms."""
    length = DraftLength()
    for share, gain in ((0.27, 0.0039), (0.53, 0.0017)):
        length.plain.clear()
        assert not length.repays(10_000, share, lambda: 0.0), "nothing is measured"
        length.plain.extend([0.01, 0.01, 0.5])
        _, token = length.best(0.01, (share + 0.1) * 0.01)
        assert token == pytest.approx(0.01 - gain, abs=2e-4)
        repaid = 100 * (0.01 - token)  # seconds that 100 tokens save
        assert length.repays(100, share, lambda seconds=0.99 * repaid: seconds)
        assert not length.repays(100, share, lambda seconds=1.01 * repaid: seconds)
    assert not length.repays(10_000, 0.9, lambda: 0.0), "drafts cost as much as steps"
    length.expect(samples=True)
    _, sampled = length.best(0.01, 0.0063)
    length.expect(samples=False)
    _, greedy = length.best(0.01, 0.0063)
    print(f"a token of bfloat16 is expected in {1000 * sampled:.1f} ms sampled, in {1000 * greedy:.1f} greedy")
    assert greedy < 0.0078 < 0.0083 < sampled


@needs_kernel
def test_the_tokens_of_a_draft_before_an_error_are_shown() -> None:
    """As without drafts, where each token is shown before the next one is chosen."""
    model = drafted_at(small_model(n_positions=64), lambda: 4)
    settings: Any = {"max_new_tokens": 40, "no_repeat_ngram_size": 1, "suppress_tokens": list(range(8, 83))}
    written = {}
    for draft in (None, "int8"):
        row, pieces = Row([1, 2, 3], parse_settings(**settings, eos_token_id=None)), []
        steps = write_rows(model, [row], parse_settings(**settings, draft=draft), 1)
        with pytest.raises(minigpt.GenerationError, match="exclude every token"):
            pieces.extend(len(row.new_ids) for _ in steps)
        written[draft] = row.ids
        assert pieces[-1] == len(row.new_ids) == 5
    assert written[None] == written["int8"]


def speedup(acceptance: float, steps: int, each: float = 0.38) -> float:
    """Return how many times as fast drafts are where a step takes 1, and a drafted token ``each``."""
    chance, length, tokens, spent = random.Random(0), DraftLength(), 0, 0.0
    for _ in range(steps):
        drafted = length.next()
        right = next((i for i in range(drafted) if chance.random() >= acceptance), drafted)
        seconds = (1 + each * drafted) * chance.choice([0.95, 1, 1, 1, 1.1])
        length.learn(drafted, right, seconds)
        tokens, spent = tokens + 1 + right, spent + seconds
    return tokens / spent


def test_a_draft_is_as_long_as_pays() -> None:
    assert speedup(1.0, 200) > 0.9 * (1 + MOST_DRAFTED) / (1 + 0.38 * MOST_DRAFTED)
    assert speedup(0.8, 1000) > 1.2
    assert speedup(0.9, 1000, each=0.95) > 0.93, "a gain below a tenth: they rest"
    for steps in (64, 1000):
        print(f"none accepted in {steps} steps: {speedup(0.0, steps):.2f} times as fast")
        assert speedup(0.0, steps) > 0.9
