"""The loop from prompt to tokens: transformers' own tokens, draws of the right distribution, an end in its place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import END_OF_TEXT, reference, saved, tiny_bpe, tokens
from helpers import small_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import GPT2, ConfigError, GenerationError, GPT2Config, Tokenizer
from minigpt.generation import generate, stream, warp
from minigpt.generation.choosing import CHUNK, drawn, likeliest
from minigpt.inputs import check_known

VOCABULARY = 300
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 40, 55)


@pytest.fixture(scope="module")
def wandering() -> GPT2LMHeadModel:
    """Weights wide enough that a continuation wanders and does not repeat one token."""
    return reference(seed=1, std=0.5, vocab_size=VOCABULARY, n_positions=128)


@pytest.fixture(scope="module")
def ours(wandering: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> GPT2:
    return minigpt.from_pretrained(saved(wandering, tmp_path_factory.mktemp("model")), device="cpu")


@pytest.fixture(scope="module")
def singly(wandering: GPT2LMHeadModel) -> list[list[int]]:
    """64 tokens that transformers adds to each prompt alone."""
    how = {"max_new_tokens": 64, "eos_token_id": None}
    rows = [by_transformers(wandering, ids, **how)[0, -64:].tolist() for ids in prompts()]
    assert min(len(set(row)) for row in rows) > 10, "too monotonous to tell two models apart"
    return rows


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_bpe(VOCABULARY))


def prompts() -> list[Tensor]:
    """Ten prompts of different lengths, each (1, T)."""
    return [tokens(1, length, seed=length, vocab_size=VOCABULARY) for length in LENGTHS]


def left_padded(rows: list[Tensor], filling: int = 0) -> tuple[Tensor, Tensor]:
    """The prompts as one batch and its mask, both (B, longest)."""
    longest = max(row.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=filling) for row in rows]
    masks = [torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows]
    return torch.cat(padded), torch.cat(masks)


def by_transformers(model: GPT2LMHeadModel, ids: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, **{"pad_token_id": 0, **how})


# --- greedy


def test_greedy_tokens_of_each_prompt_alone_are_those_of_transformers(ours: GPT2, singly: list[list[int]]) -> None:
    assert [generate(ours, ids, max_new_tokens=64, eos_token_id=None)[0, -64:].tolist() for ids in prompts()] == singly


@pytest.mark.parametrize("arithmetic", ["fast", "reference"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_tokens_of_a_padded_batch_are_those_of_each_alone(
    wandering: GPT2LMHeadModel, singly: list[list[int]], arithmetic: str, attention: str, tmp_path: Path
) -> None:
    model = minigpt.from_pretrained(
        saved(wandering, tmp_path), arithmetic=arithmetic, attention=attention, device="cpu"
    )
    batch, mask = left_padded(prompts())
    assert generate(model, batch, mask, max_new_tokens=64, eos_token_id=None)[:, -64:].tolist() == singly


def test_the_result_is_the_prompt_and_the_new_tokens(ours: GPT2) -> None:
    ids = tokens(2, 6, vocab_size=VOCABULARY)
    before = ids.clone()
    out = generate(ours, ids, max_new_tokens=3, eos_token_id=None)
    assert (out.dtype, out.shape) == (torch.long, (2, 9))
    assert torch.equal(out[:, :6], before)
    assert torch.equal(ids, before)
    assert generate(ours, ids.int(), max_new_tokens=3, eos_token_id=None).dtype == torch.int32


def test_greedy_by_whatever_name(ours: GPT2) -> None:
    ids = tokens(2, 6, vocab_size=VOCABULARY)
    greedy = generate(ours, ids, max_new_tokens=12)
    certain = ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0})
    for same in ({"temperature": 0.0}, *({"do_sample": True, **how} for how in certain)):
        assert torch.equal(generate(ours, ids, max_new_tokens=12, **same), greedy)


# --- where a row ends


def endings(wandering: GPT2LMHeadModel) -> tuple[Tensor, Tensor, list[int]]:
    """A left-padded batch, its mask, and two ids that end some of its rows early and others late or never."""
    batch, mask = left_padded(prompts())
    new = by_transformers(wandering, batch, mask, max_new_tokens=40, eos_token_id=None)[:, -40:]
    ids = [int(new[0, 2]), int(new[5, 20])]
    first = [min((row.index(end) for end in ids if end in row), default=40) for row in new.tolist()]
    assert len(set(first)) > 2, f"the rows end together, at {first}"
    return batch, mask, ids


def test_rows_end_and_are_filled_as_in_transformers(ours: GPT2, wandering: GPT2LMHeadModel) -> None:
    batch, mask, (one, other) = endings(wandering)
    for end, filling in ((one, 0), ([other, one], other)):
        how = {"max_new_tokens": 40, "eos_token_id": end, "pad_token_id": filling}
        assert generate(ours, batch, mask, **how).tolist() == by_transformers(wandering, batch, mask, **how).tolist()


def scripted_config(**fields: Any) -> GPT2Config:
    shape = {"vocab_size": VOCABULARY, "n_positions": 4096, "n_embd": 2, "n_layer": 1, "n_head": 1}
    return GPT2Config(**{**shape, "bos_token_id": 0, "eos_token_id": 0, **fields})


class Scripted(GPT2):
    """Writes the rows of a script, whatever it reads: what is chosen is settled, so that only the loop is tested.

    The keys in the cache say which row it is and how far it has come, so they must go where their row goes.
    """

    def __init__(self, *rows: list[int], **fields: Any) -> None:
        super().__init__(scripted_config(**fields))
        self.eval()
        self.rows, self.steps = rows, 0

    def embed(self, input_ids: Tensor, position_ids: Any) -> Tensor:
        check_known(input_ids, self.config.vocab_size)
        return input_ids[..., None]

    def run(self, x: Tensor, position_ids: Any, mask: Any, cache: Any) -> Tensor:
        batch, seq, _ = x.shape
        past = torch.tensor([
            cache.store[0, 0, row, 0, start - 1].tolist() if start else [row, -1]
            for row, start in zip(cache.rows, cache.starts, strict=True)
        ])  # fmt: skip
        row, step = past[:, 0].long(), past[:, 1].long() + 1  # each (B,)
        state = torch.stack([row, step], dim=-1).float()[:, None, None].expand(batch, 1, seq, 2)  # (B, H, T, D)
        cache.update(0, torch.stack([state, state]))
        self.steps += 1
        chosen = [[script[i] if i < len(script) else 1] for script, i in zip(self.scripts(row), step, strict=True)]
        logits = torch.nn.functional.one_hot(torch.tensor(chosen), VOCABULARY).float()  # (B, 1, V)
        return logits.expand(batch, seq, VOCABULARY)

    def scripts(self, rows: Tensor) -> list[list[int]]:
        return [self.rows[row] for row in rows.tolist()]

    def head(self, x: Tensor) -> Tensor:
        return x


def written(model: GPT2, **how: Any) -> list[list[int]]:
    """The new tokens of each row, after a prompt of three."""
    prompt = torch.ones(len(model.rows), 3, dtype=torch.long)
    prompt[:, 0] += torch.arange(len(prompt))  # of rows with one prompt a single one would be read
    return generate(model, prompt, **{"max_new_tokens": 8, **how})[:, 3:].tolist()


def test_the_end_is_the_config_s_unless_given() -> None:
    script = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert written(Scripted(script, eos_token_id=7)) == [[5, 6, 7]]
    assert written(Scripted(script, eos_token_id=[10, 8])) == [[5, 6, 7, 8]]
    assert written(Scripted(script, eos_token_id=None)) == [script[:8]]
    assert written(Scripted(script, eos_token_id=7), eos_token_id=5) == [[5]]
    assert written(Scripted(script, eos_token_id=7), eos_token_id=[9, 6]) == [[5, 6]]
    assert written(Scripted(script, eos_token_id=7), eos_token_id=(6,)) == [[5, 6]]
    assert written(Scripted(script, eos_token_id=7), eos_token_id=None) == [script[:8]]
    assert written(Scripted(script, eos_token_id=7), eos_token_id=[]) == [script[:8]]


def test_an_end_in_the_prompt_ends_nothing() -> None:
    assert written(Scripted([5, 6, 7]), eos_token_id=1, max_new_tokens=3) == [[5, 6, 7]]


def test_ended_rows_are_filled_by_the_pad_or_else_the_end() -> None:
    rows = [5, 7, 5, 5], [7, 5, 5, 5], [5, 5, 5, 7]
    filled = {filling: [[5, 7, filling, filling], [7, *[filling] * 3], [5, 5, 5, 7]] for filling in (0, 7, 9, 299)}
    assert written(Scripted(*rows), eos_token_id=7, max_new_tokens=6) == filled[7]
    assert written(Scripted(*rows), eos_token_id=[7, 8]) == filled[7]
    assert written(Scripted(*rows, pad_token_id=9), eos_token_id=7) == filled[9]
    assert written(Scripted(*rows, pad_token_id=9), eos_token_id=7, pad_token_id=299) == filled[299]
    assert written(Scripted(*rows, eos_token_id=7, pad_token_id=0)) == filled[0]
    for none in (-1, 300):  # no id of this vocabulary
        assert written(Scripted(*rows, eos_token_id=7, pad_token_id=none)) == filled[7]
        assert written(Scripted(*rows, eos_token_id=(none, 7), pad_token_id=none)) == filled[7]
    assert written(Scripted(*rows, pad_token_id=9), eos_token_id=[-1, 7], pad_token_id=None) == filled[7]
    with pytest.raises(GenerationError, match="pad_token_id must be an id, got -1"):
        written(Scripted(*rows), eos_token_id=7, pad_token_id=-1)


def test_no_step_is_taken_after_the_last_row_has_ended() -> None:
    for rows, steps in ((([5, 7],), 2), (([7], [5, 5, 7]), 3), (([5] * 9,), 8)):
        model = Scripted(*rows)
        written(model, eos_token_id=7)
        assert model.steps == steps


# --- sampling


def constant_model(logits: Tensor, **fields: Any) -> GPT2:
    """A model whose logits are these whatever it reads: its last norm is all shift."""
    model = GPT2(scripted_config(vocab_size=len(logits), eos_token_id=None, **fields)).eval()
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(torch.tensor([1.0, 0.0]))
        model.wte.weight.copy_(torch.stack([logits, torch.zeros_like(logits)], dim=1))
    return model


LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0])
# exceeded once in a thousand times, by degrees of freedom
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 8: 26.12}


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """Pearson's statistic of the counts, and its bound for that many degrees of freedom."""
    possible = probabilities > 0
    assert not counts[~possible].any(), "an excluded token was drawn"
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected).square() / expected).sum().item()
    return statistic, CHI_SQUARE_999[int(possible.sum()) - 1]


ALONE = ({"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.8})
TOGETHER = ({}, {"temperature": 1.5, "top_k": 5, "top_p": 0.9})


@pytest.mark.parametrize(
    "chosen", [*TOGETHER, *(pytest.param(one, marks=pytest.mark.thorough) for one in ALONE)], ids=str
)
def test_draws_have_the_distribution_of_the_warped_logits(chosen: dict[str, Any]) -> None:
    """The first draw of each row of one batch, of successive seeds."""
    prompt = torch.zeros(3000, 1, dtype=torch.long)
    draws = generate(constant_model(LOGITS), prompt, max_new_tokens=1, do_sample=True, seed=11, **chosen)[:, 1]
    probabilities = warp(LOGITS[None], **chosen).softmax(-1)[0]
    statistic, bound = chi_square(torch.bincount(draws, minlength=len(LOGITS)), probabilities)
    assert statistic <= bound, f"chi-square {statistic:.1f}, bound {bound}"


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 50, "top_p": 0.95, "max_new_tokens": 20}
SAMPLED |= {"eos_token_id": None}


def test_a_seed_makes_the_draw_repeatable(ours: GPT2) -> None:
    ids = tokens(2, 6, vocab_size=VOCABULARY)
    first, state = generate(ours, ids, **SAMPLED, seed=4), torch.get_rng_state()
    assert torch.equal(generate(ours, ids, **SAMPLED, seed=4), first)
    assert not torch.equal(generate(ours, ids, **SAMPLED, seed=5), first)
    unseeded = [generate(ours, ids, **SAMPLED) for _ in range(2)]
    assert not torch.equal(*unseeded)
    assert torch.equal(torch.get_rng_state(), state), "somebody else's random numbers were used up"


@given(st.integers(1, 40), st.sampled_from([1.0, 30.0, 3e4]), st.sampled_from([0.0, 0.5, 1 - 2**-50]), st.integers(0))
def test_no_chance_however_near_its_bounds_draws_what_is_excluded(
    size: int, width: float, chance: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    scores = torch.randn(3, size, generator=generator) * width
    excluded = torch.rand(3, size, generator=generator) < 0.7
    excluded[:, seed % size] = False
    scores = scores.masked_fill(excluded, -torch.inf)
    taken = drawn(scores, torch.full((3,), chance, dtype=torch.float64))
    assert (scores.softmax(-1).gather(1, taken[:, None]) > 0).all()


@pytest.mark.parametrize("used", [2, 4, 6])
def test_ids_that_are_padding_of_the_vocabulary_are_never_chosen(used: int) -> None:
    model, ids = constant_model(-LOGITS, used_vocab_size=used), torch.zeros(1, 1, dtype=torch.long)
    assert generate(model, ids, max_new_tokens=1)[0, 1] == LOGITS[:used].argmin()


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_model_that_computes_nan_is_no_generator(do_sample: bool) -> None:
    model = constant_model(LOGITS * torch.nan)
    with pytest.raises(GenerationError, match="NaN"):
        generate(model, torch.zeros(1, 1, dtype=torch.long), max_new_tokens=2, do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_nothing_is_chosen_from_infinite_logits(value: float, do_sample: bool) -> None:
    logits = torch.full((7,), -torch.inf) if value < 0 else LOGITS.clone().index_fill_(0, torch.tensor([2]), value)
    model, ids = constant_model(torch.zeros(7)), torch.zeros(1, 1, dtype=torch.long)
    model.head = lambda x: logits.expand(*x.shape[:-1], 7)  # as float16 may have them, of a model that is too loud
    with pytest.raises(GenerationError, match="a logit is infinite"):
        generate(model, ids, max_new_tokens=2, do_sample=do_sample)


@pytest.mark.parametrize(
    "how", [{"bad_words_ids": [[0], [1], [2]]}, {"suppress_tokens": [0, 1, 2]}, {"no_repeat_ngram_size": 1}], ids=str
)
def test_a_row_to_which_no_token_is_left_is_an_error(how: dict[str, Any]) -> None:
    """With the last, the first row has none to choose at once, while the second has two more."""
    batch = left_padded([torch.tensor([[0, 1, 2]]), torch.tensor([[1]])])
    with pytest.raises(GenerationError, match="exclude every token"):
        generate(constant_model(LOGITS[:3]), *batch, max_new_tokens=1, **how)


# --- stop strings


def until_stopped(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> list[int]:
    """The ids up to the one with which a stop string is complete in what they say."""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode_bytes(ids[:end]).decode(errors="ignore")
        if any(stop in text for stop in stops):
            return ids[:end]
    return ids


@pytest.mark.parametrize("stops", ["dog", "e d", ["the other", "saw"], ["狗狗"], ["🐕"], ["é — s", "nothing"], "\n\n"])
def test_a_stop_string_ends_its_row(tokenizer: Tokenizer, stops: str | list[str]) -> None:
    scripts = [tokenizer.encode(text) for text in ("I saw the dog there", "naïve café — señor\n\nthe", "狗犬狗狗 🐕🐕")]
    longest = max(map(len, scripts))
    scripts = [script + [1] * (longest - len(script)) for script in scripts]
    how = {"max_new_tokens": longest, "stop": stops, "tokenizer": tokenizer, "pad_token_id": 2}
    expected = [until_stopped(tokenizer, script, [stops] if isinstance(stops, str) else stops) for script in scripts]
    assert len(set(map(len, expected))) > 1, "nothing stops early"
    assert [written(Scripted(script), **how)[0] for script in scripts] == expected

    width = max(map(len, expected))
    together = written(Scripted(*scripts), **how)
    assert together == [row + [2] * (width - len(row)) for row in expected]


def test_the_end_and_a_stop_string_together(tokenizer: Tokenizer) -> None:
    script = [*tokenizer.encode("the"), 0, *tokenizer.encode(" dog")]
    how = {"max_new_tokens": len(script), "tokenizer": tokenizer, "stop": "dog"}
    assert written(Scripted(script), **how) == [script[: script.index(0) + 1]]
    assert written(Scripted(script), **how, eos_token_id=None) == [script]


# --- stream


def ids_of(tokenizer: Tokenizer, text: str) -> Tensor:
    return torch.tensor([tokenizer.encode(text)])


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 1.3, "top_k": 200, "seed": 9}], ids=str)
@pytest.mark.parametrize("prompt", ["the dog", "", "狗", "\n<|endoftext|>x"])
def test_a_stream_says_what_generate_writes(ours: GPT2, tokenizer: Tokenizer, prompt: str, how: dict[str, Any]) -> None:
    ids = ids_of(tokenizer, prompt or END_OF_TEXT)
    new = generate(ours, ids, max_new_tokens=40, eos_token_id=None, **how)[0, ids.shape[1] :].tolist()
    pieces = list(stream(ours, tokenizer, prompt, max_new_tokens=40, eos_token_id=None, **how))
    assert "".join(pieces) == tokenizer.decode(new)
    assert len(pieces) > 5


def test_a_stream_is_written_token_by_token(tokenizer: Tokenizer) -> None:
    model = Scripted([*tokenizer.encode("the dog saw"), 0])
    steps = []
    for _ in stream(model, tokenizer, "x", max_new_tokens=50):
        steps.append(model.steps)
    assert steps == list(range(1, len(steps) + 1))


# --- every other setting


def test_several_texts_of_a_prompt_stand_side_by_side_and_read_it_once(ours: GPT2) -> None:
    rows = prompts()[1:4]
    batch, mask = left_padded(rows)
    seeds = [(ids, 40 + i * 3 + j) for i, ids in enumerate(rows) for j in range(3)]
    expected = [generate(ours, ids, **SAMPLED, seed=seed)[0, -20:].tolist() for ids, seed in seeds]
    counts: list[int] = []
    hook = ours.wte.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))  # PyTorch reads then
    out = generate(ours, batch, mask, **SAMPLED, seed=40, num_return_sequences=3)
    hook.remove()
    assert out[:, :-20].tolist() == batch.repeat_interleave(3, 0).tolist()
    assert out[:, -20:].tolist() == expected
    assert sum(counts) == batch.numel() + 6 + 9 * 19, "the last token of a copied prompt is read again"


@pytest.mark.parametrize("how", [{}, {"temperature": 1.3, "top_k": 9, "repetition_penalty": 1.2}], ids=str)
def test_scores_and_logprobs(ours: GPT2, wandering: GPT2LMHeadModel, how: dict[str, Any]) -> None:
    """The scores are transformers' own for the same text, and a logprob is the token's in their distribution."""
    ids = prompts()[4]
    chosen = {"max_new_tokens": 8, "eos_token_id": None, **({"do_sample": True, "seed": 2, **how} if how else {})}
    out = generate(ours, ids, **chosen, output_scores=True, output_logprobs=True)
    assert torch.equal(out.sequences, generate(ours, ids, **chosen))
    for step, scores in enumerate(out.scores):
        text = out.sequences[:, : ids.shape[1] + step]
        with torch.no_grad():
            expected = warp(wandering(text).logits[:, -1], text, **how)
        difference = (scores - expected).nan_to_num(0).abs().max().item()  # where both are -inf
        print(f"step {step}: scores differ by {difference:.3g} at a scale of {expected[expected.isfinite()].std():.3g}")
        assert difference < 1e-3
        assert torch.equal(scores.isfinite(), expected.isfinite())
        token = int(out.sequences[0, ids.shape[1] + step])
        assert out.logprobs[0, step].item() == pytest.approx(scores.log_softmax(-1)[0, token].item())


def test_a_row_that_has_ended_has_no_scores_and_certain_filling() -> None:
    model = Scripted([5, 7], [5, 5, 5, 7])
    prompt = torch.tensor([[1, 1, 1], [2, 1, 1]])
    out = generate(model, prompt, max_new_tokens=9, eos_token_id=7, output_scores=True, output_logprobs=True)
    assert [score.isnan().all(-1).tolist() for score in out.scores] == [[False, False]] * 2 + [[True, False]] * 2
    assert out.logprobs[0, 2:].tolist() == [0, 0]
    assert (out.logprobs[1] < 0).all()
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = generate(model, prompt, max_new_tokens=9, eos_token_id=7, output_logprobs=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (again.logprobs.dtype, again.logprobs.tolist()) == (torch.float32, out.logprobs.tolist())


# --- beyond the context


def by_a_window(model: GPT2, ids: Tensor, new: int) -> list[int]:
    """Greedy tokens after the last ones that fit, read from position 0."""
    row = ids[0].tolist()
    for _ in range(new):
        with torch.no_grad():
            row.append(int(model(torch.tensor([row[-model.config.n_positions :]]))[0, -1].argmax()))
    return row[ids.shape[1] :]


@pytest.fixture(scope="module")
def short() -> GPT2:
    """A model of a short context, in float64."""
    return small_model(dtype=torch.float64, n_positions=12, eos_token_id=None)


@pytest.mark.parametrize("length", [1, 12, 30])
def test_a_sliding_window_is_the_last_tokens_read_anew(short: GPT2, length: int) -> None:
    ids = tokens(1, length, seed=length)
    expected = by_a_window(short, ids, 28)
    assert len(set(expected)) > 4
    out = generate(short, ids, max_new_tokens=28, overflow="slide")
    assert out[0, length:].tolist() == expected


def test_a_window_that_will_slide_is_announced(short: GPT2, caplog: pytest.LogCaptureFixture) -> None:
    generate(short, tokens(1, 4), max_new_tokens=8, overflow="slide")
    assert not caplog.messages
    generate(short, tokens(1, 4), max_new_tokens=9, overflow="slide")
    (message,) = caplog.messages
    assert "context of 12" in message


# --- what is refused, before any work


class Untouched(GPT2):
    """A model that must not be run."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(scripted_config(**fields))
        for module in self.modules():
            module.register_forward_pre_hook(self.complain)

    @staticmethod
    def complain(module: Any, inputs: Any) -> None:
        raise AssertionError("the model was run")


def test_a_prompt_and_new_tokens_beyond_the_context(tokenizer: Tokenizer) -> None:
    model = Untouched(n_positions=16)
    for call in (
        lambda: generate(model, tokens(2, 10), max_new_tokens=7),
        lambda: generate(model, *left_padded([tokens(1, 3), tokens(1, 10)]), max_new_tokens=7),
        lambda: stream(model, tokenizer, "<|endoftext|>" * 10, max_new_tokens=7),
    ):
        with pytest.raises(GenerationError, match=r"6.*10.*16.*7") as refused:
            call()
        assert refused.value.argument == "max_new_tokens"
    with pytest.raises(GenerationError, match="17"):
        generate(model, tokens(2, 17), max_new_tokens=1)


def test_padding_takes_no_room_in_the_context(ours: GPT2) -> None:
    """A row of 100 real tokens among 128 positions, in a batch that is 140 wide."""
    row = tokens(1, 100, seed=2, vocab_size=VOCABULARY)
    batch, mask = (torch.nn.functional.pad(part, (40, 0)) for part in (row, torch.ones_like(row)))
    expected = generate(ours, row, max_new_tokens=28, eos_token_id=None)[0, 100:].tolist()
    assert generate(ours, batch, mask, max_new_tokens=28, eos_token_id=None)[0, 140:].tolist() == expected
    with pytest.raises(GenerationError, match=r"28.*100.*29"):
        generate(ours, batch, mask, max_new_tokens=29)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 50256])
def test_ids_out_of_range(wrong: int) -> None:
    ids = tokens(2, 5)
    ids[1, 3] = wrong
    with pytest.raises(GenerationError, match=f"token id {wrong} is outside the vocabulary of {VOCABULARY}"):
        generate(Untouched(), ids, max_new_tokens=2)


def test_a_model_without_values_writes_nothing() -> None:
    with pytest.raises(ConfigError, match="meta"):
        generate(Untouched().to("meta"), tokens(1, 3), max_new_tokens=2)


@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1, 0]], [[0, 0, 0], [1, 1, 1]], [[1, 0, 0], [0, 1, 1]]])
def test_padding_on_the_right(mask: list[list[int]]) -> None:
    with pytest.raises(GenerationError, match=r"^attention_mask"):
        generate(Untouched(), tokens(2, 3), torch.tensor(mask), max_new_tokens=2)


@pytest.mark.parametrize("vocab", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 81])
@pytest.mark.parametrize("among", [2, 7, 10**6])
def test_the_likeliest_token_is_the_first_of_the_largest(vocab: int, among: int, device: torch.device) -> None:
    scores = torch.randint(among, (40, vocab + 3)).float().to(device)[:, :vocab]
    scores[0] = -torch.inf
    scores[1, -1] = torch.inf
    largest, first = likeliest(scores)
    for row, score, token in zip(scores.tolist(), largest.tolist(), first.tolist(), strict=True):
        assert (score, token) == (max(row), row.index(max(row)))
