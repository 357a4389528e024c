"""Compiled steps write the same tokens, and a run compiles at most twice.

The compiler's front half alone, which is what captures and counts: the code that it would generate takes it a minute.
"""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_within, left_padding, random_ids, randomize, rms, small_model
from torch._dynamo.utils import counters

import minigpt
from minigpt import ConfigError
from minigpt.engine import compile_steps, compiled, plain
from minigpt.engine.int8 import quantize_int8

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("unchecked"),
]  # the checks of shapes are not for the compiler to see


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that only the compiler's front half has made."""
    program = torch.compile(compiled.read, backend="aot_eager")
    monkeypatch.setattr(compiled, "program", lambda: program)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compilations() -> int:
    """How many programs the compiler has made."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("norm", ["fused", "textbook"])
def test_a_run_compiles_once_and_writes_the_same_tokens(norm: str) -> None:
    model, ids, mask = small_model(norm), random_ids(3, 9), left_padding((9, 4, 1), 9)
    wanted = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    compile_steps(model)
    given = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    assert torch.equal(given, wanted)
    assert compilations() == 1


def test_runs_of_other_batches_and_lengths_compile_once_more_and_never_again() -> None:
    model = small_model()
    runs = [(2, 5, 9), (3, 8, 20), (4, 2, 40), (2, 30, 3), (7, 11, 13)]
    texts = [random_ids(batch, seq) for batch, seq, _ in runs]
    news = [new for _, _, new in runs]
    how: dict[str, Any] = {"eos_token_id": None}
    wanted = [minigpt.generate(model, ids, max_new_tokens=new, **how) for ids, new in zip(texts, news, strict=True)]
    compile_steps(model)
    for ids, new, tokens in zip(texts, news, wanted, strict=True):
        assert torch.equal(minigpt.generate(model, ids, max_new_tokens=new, **how), tokens)
    assert compilations() == 2


def test_int8_weights_are_compiled_too() -> None:
    model, ids, mask = quantize_int8(small_model()), random_ids(3, 9), left_padding((9, 4, 1), 9)
    wanted = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    compile_steps(model)
    given = minigpt.generate(model, ids, mask, max_new_tokens=30, eos_token_id=None)
    assert torch.equal(given, wanted)
    assert compilations() == 1


def pickled(model: minigpt.GPT2) -> minigpt.GPT2:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(copied: Any) -> None:
    model, ids = compile_steps(small_model()), random_ids(1, 9)
    wanted = minigpt.generate(model, ids, max_new_tokens=10, eos_token_id=None)
    other = copied(model)
    assert torch.equal(minigpt.generate(other, ids, max_new_tokens=10, eos_token_id=None), wanted)
    randomize(other, seed=1)
    changed = minigpt.generate(other, ids, max_new_tokens=10, eos_token_id=None)
    assert torch.equal(changed, minigpt.generate(plain(other), ids, max_new_tokens=10, eos_token_id=None))
    assert not torch.equal(changed, wanted)
    assert torch.equal(minigpt.generate(model, ids, max_new_tokens=10, eos_token_id=None), wanted)


def test_steps_through_a_padded_cache_are_those_of_the_uncompiled_model() -> None:
    model, ids, mask = small_model(dtype=torch.float64), random_ids(2, 20), left_padding((13, 20), 20)
    cache = model.new_cache(2, 26)
    with torch.inference_mode():
        wanted = [model(ids[:, :14], mask[:, :14], cache=cache)] + [
            model(ids[:, t : t + 1], cache=cache) for t in range(14, 20)
        ]
        compile_steps(model)
        cache = model.new_cache(2, 26)
        given = [model(ids[:, :14], mask[:, :14], cache=cache)] + [
            model(ids[:, t : t + 1], cache=cache) for t in range(14, 20)
        ]
    for t, (one, other) in enumerate(zip(given, wanted, strict=True)):
        assert_within(rms(one - other), 1e-13 * rms(other), rms(other), f"piece {t}")
    assert cache.length == 20


def test_what_the_cache_happened_to_hold_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compile_steps(small_model())
    ids = random_ids(1, 4)
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, torch.nan, **how))
    cache = model.new_cache(1, 12)
    monkeypatch.undo()
    with torch.inference_mode():
        model(ids[:, :3], cache=cache)
        assert model(ids[:, 3:], cache=cache).isfinite().all()


def test_hooks_see_every_step() -> None:
    model, ids, seen = small_model(), random_ids(1, 5), []
    expected = minigpt.generate(model, ids, max_new_tokens=3, eos_token_id=None)
    compile_steps(model)
    model.h[0].mlp.register_forward_hook(lambda module, inputs, y: seen.append(y.shape[1]))
    assert torch.equal(minigpt.generate(model, ids, max_new_tokens=3, eos_token_id=None), expected)
    assert (seen, compilations()) == ([5, 1, 1], 0)


def test_plain_gives_the_model_back() -> None:
    model, ids = compile_steps(small_model()), random_ids(1, 5)
    minigpt.generate(model, ids, max_new_tokens=3, eos_token_id=None)
    assert type(plain(model)) is minigpt.GPT2


def test_what_cannot_be_compiled_is_refused() -> None:
    class Other(minigpt.GPT2):
        """A subclass may compute anything."""

    other = small_model()
    other.__class__ = Other
    for model in (small_model(attention="eager"), small_model(arithmetic="reference"), other, torch.compile(other)):
        with pytest.raises(ConfigError):
            compile_steps(model)
