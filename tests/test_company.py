"""A text in company: its logits and its tokens are those that it has alone, whatever the others do.

By the kernel bit for bit, in every dtype and with drafts: texts come at once or in pieces, leave, slide beyond the
context, are copied and scored; a server's too. By PyTorch at float64's exactness. engine/test_kernel.py reads pieces of
every size at every level of instructions, and norms/test_triton.py the rows of a norm.
"""

import itertools
import random
from typing import Any

import pytest
import torch
from checkpoints import tiny_bpe
from helpers import WIDE, assert_same_bits, assert_within, max_abs, model_of, needs_kernel, random_ids, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import minigpt
from minigpt.engine import kernel
from minigpt.engine.int8 import Int8Linear
from minigpt.engine.reader import Reader
from minigpt.engine.step import StepKernel
from minigpt.generation.batch import Batch, Piece
from minigpt.generation.drafts import MOST_DRAFTED, Drafts
from minigpt.generation.row import Row
from minigpt.generation.settings import parse_settings

KINDS = ("float32", "bfloat16", "int8")
CONTEXT, PLACES, TOKENIZER = 64, 6, minigpt.Tokenizer(tiny_bpe(300))

# Texts that are written

LENGTHS = (1, 3, 17, 34)
HOW: tuple[dict[str, Any], ...] = (
    {}, {"do_sample": True, "temperature": 1.5, "top_k": 60}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"do_sample": True, "stop": ["e", "\n"], "max_new_tokens": 30}, {"overflow": "slide", "max_new_tokens": 70},
    {"min_new_tokens": 2, "eos_token_id": [*range(40)], "logit_bias": {5: 3.0}},
)  # fmt: skip


def prompt_of(number: int, length: int) -> list[int]:
    return [(31 * number + 7 * place + length) % 300 for place in range(length)]


def rows(times: int) -> list[Row]:
    """Texts of each length with settings of each kind, so often, each with a seed of its own."""
    made = []
    for seed, (_, how, length) in enumerate(itertools.product(range(times), HOW, LENGTHS)):
        chosen = parse_settings(**{"max_new_tokens": 12, "output_logprobs": True} | how)
        ends = tuple(how.get("eos_token_id", (7, 20, 33)))
        made.append(Row(prompt_of(seed, length), chosen, ends, TOKENIZER, seed=seed))
    return made


def written(model: minigpt.GPT2, waiting: list[Row], places: int, drafts: Drafts | None = None) -> list[list[Any]]:
    """Return tokens, end and log-probabilities of each text, written in so many places at a time."""
    batch, ahead = Batch(model, places, CONTEXT, drafts), iter(waiting)
    while batch.add(list(itertools.islice(ahead, places - len(batch.rows)))) or batch.rows:
        batch.step()
    return [[row.ids, row.end, row.logprobs] for row in waiting]


@needs_kernel
@pytest.mark.parametrize(
    ("kind", "is_drafted", "places", "times"),
    [
        *((kind, False, 5, 1) for kind in (*KINDS, "float64")),
        *((kind, True, places, 1) for kind in ("float32", "bfloat16") for places in (1, 2)),
        pytest.param("float32", False, 5, 40, marks=pytest.mark.thorough),
    ],
)
def test_a_text_is_written_as_it_is_alone(kind: str, is_drafted: bool, places: int, times: int) -> None:
    """Rows end at random, and others take their places. Of PyTorch, at float64, the tokens are the same."""
    model = model_of(kind, n_positions=CONTEXT, vocab_size=300)
    alone = [written(model, [row], 1)[0] for row in rows(times)]
    drafts, chance, together = Drafts(model, "int8") if is_drafted else None, random.Random(0), rows(times)
    if drafts is not None:
        drafts.length.next = lambda: chance.randint(0, MOST_DRAFTED)
    supplied = written(model, together, places, drafts)
    for one, other in zip(supplied, alone, strict=True):
        assert one[:2] == other[:2]
        assert one[2] == (pytest.approx(other[2], abs=1e-9) if kind == "float64" else other[2])
    assert {end for _, end, _ in alone} == {"eos", "stop", "length"}
    assert (sum(row.drafted for row in together) > 0) == is_drafted


@needs_kernel
def test_no_bit_of_an_answer_depends_on_the_others() -> None:
    """Texts, scores of prompts and log-probabilities; in turn or at once, with drafts or without."""
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("httpx")
    from application import later, serving

    model = small_model(n_positions=CONTEXT, vocab_size=300, eos_token_id=[7])
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 12}, {"n": 3, "logprobs": 2}, {"echo": True, "logprobs": 4, "n": 2},
        {"echo": True, "logprobs": 1, "max_tokens": 0}, {"overflow": "slide", "max_tokens": 70, "logprobs": 0},
        {"stop": ["e"], "max_tokens": 30}, {"repetition_penalty": 1.5, "logprobs": 1},
    ]  # fmt: skip
    bodies = [
        {"model": "demo", "seed": i, "prompt": prompt_of(i, length), **kind}
        for i, kind in enumerate(kinds)
        for length in LENGTHS
    ]
    answers = []
    for draft, asked in ((None, bodies), ("int8", bodies[::3])):
        with serving({"demo": model}, max_batch=6, draft=draft) as client:
            answers.append([client.post("/v1/completions", body) for body in asked])
            answers.append(client.ask_all(*map(later, asked)))
    facts = [[(answer.json()["choices"], answer.json()["usage"]) for answer in some] for some in answers]
    assert facts[1:] == [facts[0], facts[0][::3], facts[0][::3]]


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


def test_a_row_of_a_layer_in_eight_bits_is_its_own() -> None:
    layer = Int8Linear(torch.randn(33, 48), nn.Parameter(torch.randn(33)))
    x = torch.randn(7, 5, 48)
    x[3] *= 1000
    with torch.no_grad():
        together = layer(x)
        for i in range(7):
            assert_same_bits(layer(x[i : i + 1]), together[i : i + 1], f"row {i}")


# The logits of every step

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
@settings(max_examples=20)
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
