"""Compiled steps write the same tokens, and a run compiles at most twice.

The compiler's front half alone, which is what captures and counts: the code that it would generate takes it a minute.
"""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_within, left_padding, needs_onednn, random_ids, randomize, rms, small_model
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import minigpt
from minigpt import ConfigError, trials
from minigpt.device import HALVES
from minigpt.engine import compile_steps
from minigpt.engine.int8 import quantize_int8
from minigpt.engine.product import product

pytestmark = pytest.mark.usefixtures("unchecked")  # the checks of shapes are not for the compiler to see


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trials, "_failures", {})
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compilations() -> int:
    """The programs, without that of the trial."""
    return counters["stats"]["unique_graphs"] - len(trials.results())


@pytest.mark.parametrize("norm", ["fused", "textbook"])
def test_a_run_compiles_once_and_writes_the_same_tokens(norm: str) -> None:
    model, ids, mask = small_model(norm), random_ids(3, 9), left_padding((9, 4, 1), 9)
    wanted = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    compile_steps(model, backend="eager")
    given = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    assert torch.equal(given, wanted)
    assert compilations() == 1


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({"mode": "reduce-overhead"}, {"mode": "default"}),
        ({"mode": "max-autotune"}, {"mode": "max-autotune-no-cudagraphs"}),
        ({"mode": "default", "dynamic": False}, {"mode": "default", "dynamic": False}),
        ({"backend": "eager"}, {"backend": "eager"}),
    ],
    ids=str,
)
def test_graphs_are_left_to_generate(
    asked: dict[str, Any], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: options.append(how) or function)
    model = compile_steps(small_model(), **asked)
    assert options == [given]
    assert copy.deepcopy(model).step.options == asked


def test_runs_of_other_batches_and_lengths_compile_once_more_and_never_again() -> None:
    model = small_model()
    runs = [(2, 5, 9), (3, 8, 20), (4, 2, 40), (2, 30, 3), (7, 11, 13)]
    texts = [random_ids(batch, seq) for batch, seq, _ in runs]
    news = [new for _, _, new in runs]
    how: dict[str, Any] = {"eos_token_id": None}
    wanted = [minigpt.generate(model, ids, max_new_tokens=new, **how) for ids, new in zip(texts, news, strict=True)]
    compile_steps(model, backend="eager")
    for ids, new, tokens in zip(texts, news, wanted, strict=True):
        assert torch.equal(minigpt.generate(model, ids, max_new_tokens=new, **how), tokens)
    assert compilations() == 2


def test_int8_weights_are_compiled_too() -> None:
    model, ids, mask = quantize_int8(small_model()), random_ids(3, 9), left_padding((9, 4, 1), 9)
    wanted = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    compile_steps(model, backend="aot_eager")
    given = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    assert torch.equal(given, wanted)
    assert compilations() == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_halves_in_float32_are_one_graph_for_every_shape(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.engine.product.SLOW_HALVES", HALVES)
    model = small_model(dtype=dtype)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for shape in ((2, 5), (3, 7), (1, 1), (2, 1), (4, 9)):
        ids = random_ids(*shape)
        wanted = model(ids)
        assert_within(rms(compiled(ids) - wanted), torch.finfo(dtype).eps * rms(wanted), rms(wanted), str(shape))


def pickled(model: minigpt.GPT2) -> minigpt.GPT2:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(copied: Any) -> None:
    model, ids = compile_steps(small_model(), backend="eager"), random_ids(1, 9)
    wanted = minigpt.generate(model, ids, max_new_tokens=10, eos_token_id=None)
    other = copied(model)
    assert other.step.model is other
    assert torch.equal(minigpt.generate(other, ids, max_new_tokens=10, eos_token_id=None), wanted)
    randomize(other, seed=1)
    changed = minigpt.generate(other, ids, max_new_tokens=10, eos_token_id=None)
    other.step = None
    assert torch.equal(changed, minigpt.generate(other, ids, max_new_tokens=10, eos_token_id=None))
    assert not torch.equal(changed, wanted)
    assert torch.equal(minigpt.generate(model, ids, max_new_tokens=10, eos_token_id=None), wanted)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 3])
def test_products_by_onednn_are_compiled_too(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.engine.product.PREFERS_ONEDNN", True)
    model, ids = small_model(), random_ids(rows, 9)
    wanted = minigpt.generate(model, ids, max_new_tokens=30, eos_token_id=None)
    compile_steps(model, backend="aot_eager")
    assert torch.equal(minigpt.generate(model, ids, max_new_tokens=30, eos_token_id=None), wanted)
    assert compilations() == 1


def test_steps_through_a_padded_cache_are_those_of_the_uncompiled_model() -> None:
    model, ids, mask = small_model(dtype=torch.float64), random_ids(2, 20), left_padding((13, 20), 20)
    cache = model.new_cache(2, 26)
    with torch.inference_mode():
        wanted = [model(ids[:, :14], mask[:, :14], cache=cache)] + [
            model(ids[:, t : t + 1], cache=cache) for t in range(14, 20)
        ]
        compile_steps(model, backend="eager")
        cache = model.new_cache(2, 26)
        given = [model(ids[:, :14], mask[:, :14], cache=cache)] + [
            model(ids[:, t : t + 1], cache=cache) for t in range(14, 20)
        ]
    for t, (one, other) in enumerate(zip(given, wanted, strict=True)):
        assert_within(rms(one - other), 1e-13 * rms(other), rms(other), f"piece {t}")
    assert cache.length == 20


def test_what_the_cache_happened_to_hold_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compile_steps(small_model(), backend="eager")
    ids = random_ids(1, 4)
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))
    cache = model.new_cache(1, 12)
    monkeypatch.undo()
    with torch.inference_mode():
        model(ids[:, :3], cache=cache)
        assert model(ids[:, 3:], cache=cache).isfinite().all()


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ConfigError, match='attention must be "sdpa" for compiled steps'):
        compile_steps(small_model(attention="eager"))


def product_compiled(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """Their product as a compiler would have it, and what that is given to compile."""
    called: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        return torch.compile(product, backend=backend, fullgraph=True)(x, weight), called


@pytest.mark.parametrize(("rows", "is_written_out"), [(1, True), (2, False)])
def test_a_compiler_for_a_gpu_makes_its_own_loops_of_one_row(rows: int, is_written_out: bool) -> None:
    with FakeTensorMode():
        x, weight = torch.empty(1, rows, 24, device="cuda"), torch.empty(24, 37, device="cuda")
        given, called = product_compiled(x, weight)
    assert given.shape == (1, rows, 37)
    assert ("sum" if is_written_out else torch.mm) in called, called
