"""Static decoding: the tokens of plain decoding, on the CPU step by step, on a GPU from a graph."""

import contextlib
import copy
import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import tiny_bpe
from helpers import assert_within, left_padding, max_abs, random_ids, small_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minigpt import GPT2, GenerationError, Tokenizer, swap_norms
from minigpt.device import HALVES
from minigpt.engine import compile_steps
from minigpt.generation import Prompt, complete, static
from minigpt.generation.batch import Batch
from minigpt.generation.decode import generate, rows_of
from minigpt.generation.settings import parse_settings
from minigpt.generation.static import StaticBatch, is_static
from minigpt.model.cache import KVCache

decode: Any = sys.modules["minigpt.generation.decode"]
SAMPLED = {"do_sample": True, "temperature": 1.5, "seed": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "seed": 3},
    "warped": SAMPLED | {"top_k": 40, "top_p": 0.9},
    "min_p": SAMPLED | {"min_p": 0.05},
    "ends": SAMPLED | {"eos_token_id": list(range(20)), "pad_token_id": 82},
    "several": SAMPLED | {"num_return_sequences": 3, "eos_token_id": list(range(10))},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
}


@pytest.fixture
def by_static(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever can be is decoded static on every device; what was written so, by the kind of its batch."""
    kinds: list[str] = []
    plain = decode.write
    monkeypatch.setattr(decode, "WORTH_A_GRAPH", 0)
    monkeypatch.setattr(decode, "is_static", lambda model, settings: not settings.changes_logits)
    monkeypatch.setattr(decode, "graph_holds", lambda *given: True)
    monkeypatch.setattr(decode, "write", lambda batch, rows: kinds.append(type(batch).__name__) or plain(batch, rows))
    return kinds


def by_plain(monkeypatch: pytest.MonkeyPatch, *given: Any, **how: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(decode, "is_static", lambda model, settings: False)
        return generate(*given, **how)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_tokens_of_plain_decoding(
    settings: str, padded: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch, by_static: list[str]
) -> None:
    """float64 leaves no room for rounding."""
    model, ids = small_model(dtype=torch.float64, device=device), random_ids(3, 9, device=device)
    mask = left_padding((4, 9, 1), 9, device) if padded else None
    how = {"max_new_tokens": 14, "eos_token_id": None} | SETTINGS[settings]
    given = generate(model, ids, mask, **how)
    wanted = by_plain(monkeypatch, model, ids, mask, **how)
    assert by_static == ["StaticBatch", "Batch"]
    assert torch.equal(given, wanted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("norm", ["fused", "textbook", "rms", "dyt"])
def test_any_attention_and_norm(
    norm: str, attention: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, by_static: list[str]
) -> None:
    model = small_model(norm, attention=attention, dtype=torch.float64, device=device)
    how: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
    ids = random_ids(2, 7, device=device)
    assert torch.equal(generate(model, ids, **how), by_plain(monkeypatch, model, ids, **how))
    assert by_static[0] == "StaticBatch"


TOKENIZER = Tokenizer(tiny_bpe(300))
TEXTS = ["the dog", "naïve café", "I saw the other dog there", "", "狗", "x" * 20]
WAYS = (
    {}, SAMPLED, SAMPLED | {"stop": ["e", "\n"]}, SAMPLED | {"num_return_sequences": 3},
    SAMPLED | {"overflow": "slide", "max_new_tokens": 40}, SAMPLED | {"overflow": "slide", "slide_stride": 7},
)  # fmt: skip


@pytest.mark.parametrize("places", [2, 16])
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_rows_that_come_and_go(
    how: dict[str, Any], places: int, monkeypatch: pytest.MonkeyPatch, by_static: list[str]
) -> None:
    ends = [7, 20, 33, 150, 151, 152]
    model = small_model(dtype=torch.float64, n_positions=48, vocab_size=300, eos_token_id=ends)
    prompts = [Prompt(text, None if i % 3 else (i * 11) % 17 + 3) for i, text in enumerate(TEXTS)]
    how = {"max_new_tokens": 16, "batch_size": places, **how}

    def results() -> dict[tuple[int, int], tuple[list[int], str, str]]:
        return {(r.prompt, r.number): (r.ids, r.text, r.end) for r in complete(model, TOKENIZER, prompts, **how)}

    given = results()
    monkeypatch.setattr(decode, "is_static", lambda model, settings: False)
    assert given == results()
    assert by_static == ["StaticBatch", "Batch"]
    assert len({len(ids) for ids, _, _ in given.values()}) > 2, "they all end together"


@pytest.mark.parametrize("lengths", [(9,), (3, 9)], ids=str)
def test_a_window_that_is_full_is_read_anew_in_time(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, by_static: list[str]
) -> None:
    """The context is no round number, so that the room has a column for a token too many."""
    model, ids = small_model(dtype=torch.float64, n_positions=21), random_ids(len(lengths), 9)
    how: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "overflow": "slide", "slide_stride": 8}
    mask = left_padding(lengths, 9)
    given = generate(model, ids, mask, **how)
    assert torch.equal(given, by_plain(monkeypatch, model, ids, mask, **how))
    assert by_static == ["StaticBatch", "Batch"]


def test_a_step_is_under_way_while_the_last_is_read(by_static: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is launched that nobody needs: of one row, as many as there are tokens to read."""
    order: list[str] = []
    launched, landed = StaticBatch._launched, StaticBatch._landed
    monkeypatch.setattr(StaticBatch, "_launched", lambda batch: order.append("launch") or launched(batch))
    monkeypatch.setattr(StaticBatch, "_landed", lambda batch, *how: order.append("read") or landed(batch, *how))
    generate(small_model(), random_ids(1, 3), max_new_tokens=5, eos_token_id=None)
    assert order == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_of_the_published_width_of_heads(
    dtype: torch.dtype, device: torch.device, by_static: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which a GPU has other kernels than for narrower ones: each token is the likeliest, but for rounding."""
    model = small_model(dtype=dtype, device=device, n_embd=128, n_head=2, n_positions=256)
    truth = small_model(dtype=torch.float64, device=device, n_embd=128, n_head=2, n_positions=256)
    truth.load_state_dict(model.state_dict())
    ids, lengths, new = random_ids(3, 200, device=device), (200, 61, 3), 21
    texts = generate(model, ids, left_padding(lengths, 200, device), max_new_tokens=new, eos_token_id=None)
    for text, length in zip(texts, lengths, strict=True):
        logits = truth(text[None, 200 - length : -1])[0, -new:]  # (new, V)
        taken = logits.gather(-1, text[-new:, None])[:, 0]
        assert_within(max_abs(logits.amax(-1) - taken), 8 * torch.finfo(dtype).eps, max_abs(logits), f"{length} tokens")
    assert by_static == ["StaticBatch"]


def test_nan_that_comes_of_a_new_token_is_an_error(by_static: list[str], device: torch.device) -> None:
    model, ids = small_model(tie_word_embeddings=False, device=device), random_ids(1, 3, device=device)
    new = int(generate(model, ids, max_new_tokens=1)[0, -1])
    assert new not in ids
    model.wte.weight.data[new] = torch.nan
    with pytest.raises(GenerationError, match="logits are NaN"):
        generate(model, ids, max_new_tokens=9, eos_token_id=None)
    assert set(by_static) == {"StaticBatch"}


@torch.inference_mode()
def test_a_step_leaves_its_memory_where_it_is_and_idle_places_sane(device: torch.device) -> None:
    model, settings = small_model(device=device), parse_settings(max_new_tokens=30, **SAMPLED)
    batch = StaticBatch(model, settings, 4, 40)
    rows = rows_of(model, [[1, 2, 3], [4]], settings, None)
    batch.join(rows)
    batch.choose()
    fixed = batch.tokens, batch.starts, batch.column, batch.turn, batch.mask, batch.chances, batch.report
    places = [tensor.data_ptr() for tensor in fixed]
    batch.seat(rows)
    for _ in range(20):
        batch.step()
    now = batch.tokens, batch.starts, batch.column, batch.turn, batch.mask, batch.chances, batch.report
    assert [tensor.data_ptr() for tensor in now] == places
    assert batch.column.item() == 3 + 20
    assert batch.report[0, 2] == batch.report[0, 3], "idle places read the same text, always"
    assert batch.slots.room.isfinite().all()


@pytest.mark.parametrize("free", [2**40, 0])
def test_what_is_recorded_runs_when_it_is_replayed(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA: the first step as it comes, the second into the graph, and from then on the graph."""
    model, settings = small_model(), parse_settings(max_new_tokens=9, eos_token_id=None, **SAMPLED)
    rows = rows_of(model, [[1, 2, 3], [4, 5, 6]], settings, None)
    batch, order = StaticBatch(model, settings, 2, 12), []
    step = batch.step

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            assert static._recording.locked()
            assert not gc.isenabled()
            assert not torch.is_inference_mode_enabled(), "what it makes for the generator is for other graphs too"
            order.append(f"begin {capture_error_mode}")
            batch.step = lambda: order.append("recorded")  # type: ignore[assignment]

        def capture_end(self) -> None:
            order.append("end")
            batch.step = step

        def replay(self) -> None:
            order.append("replay")
            step()

    class Stream:
        def __init__(self, name: object = "here") -> None: ...

        def wait_stream(self, other: object) -> None:
            order.append("wait")

    for name, stand_in in {
        "CUDAGraph": Graph, "current_stream": Stream, "mem_get_info": lambda device: (free, 2**40),
        "stream": lambda stream: contextlib.nullcontext(), "empty_cache": lambda: order.append("empty"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(static, "_aside", Stream)
    batch.records = True
    for _ in decode.write(batch, rows):
        pass
    assert gc.isenabled()
    emptied = [] if free else ["empty"]
    assert order == ["wait", *emptied, "begin thread_local", "recorded", "end", "wait", *["replay"] * 7]
    plain = rows_of(model, [[1, 2, 3], [4, 5, 6]], settings, None)
    for _ in decode.write(Batch(model, settings, 2, 12), plain):
        pass
    assert [row.ids for row in rows] == [row.ids for row in plain]


def test_no_two_batches_record_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(static, "_free", defaultdict(list))
    settings = parse_settings(max_new_tokens=9)
    first, second = (StaticBatch(small_model(), settings, 1, 12) for _ in range(2))
    streams = [static._aside(batch) for batch in (first, second)]
    assert streams[0] is not streams[1]
    del first
    assert static._aside(StaticBatch(small_model(), settings, 1, 12)) is streams[0], "it is free again"


def test_a_batch_is_gone_with_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache may fill a GPU, of whose memory the collector of garbage knows nothing."""
    gone: list[str] = []
    made = StaticBatch.__init__

    def make(batch: StaticBatch, *given: Any) -> None:
        made(batch, *given)
        batch.records = True  # before it has come to that, all rows are over
        weakref.finalize(batch, gone.append, "gone")

    monkeypatch.setattr(StaticBatch, "__init__", make)
    monkeypatch.setattr(decode, "is_static", lambda model, settings: True)
    monkeypatch.setattr(decode, "graph_holds", lambda *given: True)
    gc.disable()
    try:
        generate(small_model(), random_ids(1, 3), max_new_tokens=9, eos_token_id=list(range(83)))
    finally:
        gc.enable()
    assert gone == ["gone"]


def test_memory_that_nobody_wrote_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings, new_cache = small_model(), parse_settings(max_new_tokens=9, eos_token_id=None), GPT2.new_cache

    def full_of_nan(model: GPT2, *shape: int) -> KVCache:
        cache = new_cache(model, *shape)
        cache.store.fill_(torch.nan)
        return cache

    monkeypatch.setattr(GPT2, "new_cache", full_of_nan)
    rows = rows_of(model, [[1, 2, 3]], settings, None)
    assert len(list(decode.write(StaticBatch(model, settings, 1, 12), rows))) == 9
    assert rows[0].ids == generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=9, eos_token_id=None)[0].tolist()


class AsksNoHost(TorchDispatchMode):
    """Refuses what a GPU must be waited for: numbers read back, shapes that are data, tensors made of lists."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        assert name not in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "lift_fresh",
            "lift_fresh_copy",
            "unique",
        ), f"a step does {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["fused", "textbook", "rms"])
@pytest.mark.parametrize("settings", ["greedy", "warped", "min_p"])
@torch.no_grad()
def test_a_step_asks_the_host_nothing(settings: str, norm: str) -> None:
    model = small_model(norm, used_vocab_size=80)
    chosen = parse_settings(**{"max_new_tokens": 9} | SETTINGS[settings])
    batch = StaticBatch(model, chosen, 2, 20)
    batch.join(rows_of(model, [[1, 2], [3, 4, 5]], chosen, None))
    batch.choose()
    batch.seat(batch.rows)
    with AsksNoHost():
        batch.step()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("norm", ["fused", "textbook", "rms", "dyt"])
@pytest.mark.parametrize("settings", ["greedy", "warped", "min_p"])
@torch.inference_mode()
def test_a_step_is_all_on_the_models_device(settings: str, norm: str, attention: str) -> None:
    """Here the device without memory: it refuses a tensor of the CPU's as a GPU would."""
    model = small_model(norm, attention=attention, device="meta")
    chosen = parse_settings(**{"max_new_tokens": 9} | SETTINGS[settings])
    batch = StaticBatch(model, chosen, 3, 24)
    batch.slots.starts, batch.slots.length = [0, 2], 5
    batch.seat(rows_of(model, [[1, 2], [3, 4, 5]], chosen, None))
    batch.step()
    assert batch.report.is_meta
    with pytest.raises(RuntimeError, match="device"):
        _ = batch.tokens + torch.ones(3)


# On a GPU


class Strangers(nn.LayerNorm):
    """A norm of somebody else's, which may do what a graph cannot."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.h[0].ln_1.register_forward_hook(lambda *given: None),
        lambda model: swap_norms(model, Strangers, "ln_f"),
        lambda model: model.train(),
    ],
    ids=["hooks", "a norm of another's", "dropout"],
)
def test_on_cuda_a_step_is_recorded_unless_it_cannot_be(change: Callable[[GPT2], Any]) -> None:
    model, settings = small_model(device="cuda"), parse_settings(max_new_tokens=20)
    assert is_static(model, settings)
    assert is_static(compile_steps(copy.deepcopy(model), mode="reduce-overhead"), settings)
    for how in ({"output_logprobs": True}, {"use_cache": False}, {"suppress_tokens": [1]}):
        assert not is_static(model, parse_settings(max_new_tokens=20, **how))
    with torch.autocast("cuda"):
        assert not is_static(model, settings)
    change(model)
    assert not is_static(model, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_batch_and_dtype_writes_from_a_graph(
    dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graph twice gives the same tokens, and every row those that it gives with others beside it."""
    model, ids = small_model(dtype=dtype, device="cuda"), random_ids(batch, 6, device="cuda")
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(1) or replay(graph))
    how: dict[str, Any] = SAMPLED | {"max_new_tokens": 20, "eos_token_id": None}
    first, again = generate(model, ids, **how), generate(model, ids, **how)
    assert torch.equal(first, again)
    assert len(replays) == 2 * (20 - 2), "the first token is the prompt's, the second is taken while recording"


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["fused", "triton"])
@pytest.mark.parametrize("settings", ["greedy", "warped", "min_p"])
def test_no_wait_in_a_step_but_the_reading(settings: str, norm: str) -> None:
    model, ids = small_model(norm, device="cuda"), random_ids(4, 6, device="cuda")
    chosen = parse_settings(max_new_tokens=30, **SETTINGS[settings] | {"eos_token_id": None})
    rows = rows_of(model, ids.tolist(), chosen, None)
    growing = decode.write_rows(model, rows, chosen, len(rows))
    for _ in range(3 * len(rows)):
        next(growing)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(growing)) == 27 * len(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")  # torch.compile would trace the shape checks as well
def test_a_compiled_step_is_recorded_too() -> None:
    model, ids = small_model(dtype=torch.float64, device="cuda"), random_ids(2, 6, device="cuda")
    how: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None}
    wanted = generate(model, ids, **how)
    assert is_static(compile_steps(model), parse_settings(**how))
    assert torch.equal(generate(model, ids, **how), wanted)


@pytest.mark.gpu
def test_a_seed_draws_alike_on_every_device() -> None:
    ids, how = random_ids(3, 6), SAMPLED | {"max_new_tokens": 30, "eos_token_id": None}
    on_cuda = generate(small_model(dtype=torch.float64, device="cuda"), ids.cuda(), **how)
    assert torch.equal(on_cuda.cpu(), generate(small_model(dtype=torch.float64), ids, **how))
