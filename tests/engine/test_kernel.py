"""The compiled decoding step: its numbers against float64, a row by itself, and which models take it."""

import copy
import importlib.util
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ODD,
    WIDE,
    assert_same_bits,
    assert_within,
    max_abs,
    model_of,
    needs_kernel,
    random_ids,
    rms,
    small_model,
)  # fmt: skip
from torch import Tensor, nn

import minigpt
from minigpt.engine import kernel, plain, quantize_int8, use_kernel
from minigpt.engine.reader import Reader
from minigpt.engine.step import StepKernel, step_of
from minigpt.engine.supported import NORMS, path_of, why_not
from minigpt.model.mlp import Conv1D
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.swap import fit_norms

ROOT = Path(__file__).parents[2]
pytestmark = needs_kernel


def texts_of(count: int, longest: int, vocab: int) -> list[list[int]]:
    """Return texts of different lengths."""
    return [ids[r % 5 :].tolist() for r, ids in enumerate(random_ids(count, longest, vocab=vocab))]


def read(step: StepKernel, texts: list[list[int]], store: Tensor, target: list[int] | None = None) -> Tensor:
    """Return logits after every token, or after the wanted, of texts that are read at once from column 0."""
    tokens = [token for text in texts for token in text]
    slots = [slot for slot, text in enumerate(texts) for _ in text]
    columns = [column for text in texts for column in range(len(text))]
    return step(tokens, slots, columns, store, target)


def against_float64(model: Any, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the logits of all texts by the kernel, and by the model in float64."""
    step = step_of(model)
    assert step is not None
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        truth = torch.cat([wide(torch.tensor([text]))[0] for text in texts])
    return read(step, texts, model.new_cache(len(texts), max(map(len, texts))).store), truth


@pytest.mark.parametrize("shape", [ODD, WIDE], ids=["odd", "wide"])
@pytest.mark.parametrize("rows", [1, 7, 20])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("by_rows", [False, True])
def test_against_float64(shape: dict[str, Any], rows: int, kind: str, by_rows: bool) -> None:
    model = model_of(kind, by_rows, tie_word_embeddings=rows != 7, **shape)
    logits, truth = against_float64(model, texts_of(rows, 11, model.config.vocab_size))
    scale = rms(truth)
    assert_within(rms(logits - truth), (4e-6 if kind == "float32" else 2e-2) * scale, scale, f"{rows} texts")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_head_may_lie_in_columns(kind: str, is_tied: bool) -> None:
    model, texts = model_of(kind, tie_word_embeddings=is_tied, **WIDE), texts_of(40, 5, 83)
    plain = read(StepKernel(model), texts, model.new_cache(40, 5).store)
    head = model.wte if is_tied else model.lm_head
    head.weight.data = head.weight.data.t().contiguous().t()
    step = StepKernel(model)
    assert_same_bits(read(step, texts, model.new_cache(40, 5).store), plain, "many rows")
    assert_same_bits(read(step, texts[:1], model.new_cache(1, 5).store), plain[:5], "few rows")


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "silu", "tanh"])
@pytest.mark.parametrize("norm", ["fused", "textbook", "rms", "std_eps", "frozen"])
def test_activations_norms_and_scales(activation: str, norm: str) -> None:
    model = small_model(
        norm, activation_function=activation, scale_attn_weights=norm != "rms", scale_attn_by_inverse_layer_idx=True
    )
    if norm == "frozen":
        fit_norms(model, random_ids(4, 20, vocab=model.config.vocab_size))
    logits, truth = against_float64(model, texts_of(3, 9, model.config.vocab_size))
    assert_within(rms(logits - truth), 4e-6 * rms(truth), rms(truth), f"{activation}, {norm}")


@pytest.mark.parametrize(
    ("shape", "by_rows"),
    [(ODD, False), (ODD, True), (WIDE, False), (WIDE, True), ({"n_positions": 600, "n_embd": 64}, False)],
    ids=["odd", "odd, by rows", "wide", "wide, by rows", "long"],
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
def test_any_tokens_at_once_are_read_as_one_by_one(
    kind: str, cache: torch.dtype, shape: dict[str, Any], by_rows: bool
) -> None:
    """All texts at once, in pieces of any sizes in turn, one by one, and with the logits of some rows alone."""
    model, chance = model_of(kind, by_rows, **shape), random.Random(0)
    step, longest = StepKernel(model), model.config.n_positions
    texts = texts_of(4, longest, 83) + texts_of(3, 8, 83)
    empty = torch.randn(model.new_cache(len(texts), longest).store.shape).to(cache)
    store = empty.clone()
    one_by_one = [
        torch.cat([step([token], [slot], [column], store) for column, token in enumerate(text)])
        for slot, text in enumerate(texts)
    ]
    at_once = torch.cat(one_by_one)
    for some in (None, [], [len(at_once) - 1], sorted(chance.sample(range(len(at_once)), 30))):
        other, asked = empty.clone(), slice(None) if some is None else some
        assert_same_bits(read(step, texts, other, some), at_once[asked], f"logits of {some}")
        assert_same_bits(other, store, "keys and values")
    done = [0] * len(texts)
    while sum(done) < len(at_once):
        slots, columns, target = [], [], []
        for slot in chance.sample(range(len(texts)), 3):
            piece = range(done[slot], min(len(texts[slot]), done[slot] + chance.randint(0, 30)))
            slots += [slot] * len(piece)
            columns += piece
            target.append(one_by_one[slot][done[slot] : piece.stop])
            done[slot] = piece.stop
        tokens = [texts[slot][column] for slot, column in zip(slots, columns, strict=True)]
        assert_same_bits(step(tokens, slots, columns, store), torch.cat(target), "logits of pieces")


@pytest.mark.thorough
@pytest.mark.parametrize("level", [level for level in kernel.LEVELS if level != "bf16"])
def test_every_level_of_instructions(level: str) -> None:
    """MINIGPT_KERNEL chooses it for a process."""
    if level not in kernel.functions().levels:
        pytest.skip("this processor lacks it")
    assert f"kernel ({level})" in info_at(level)
    chosen = "(any_tokens or test_against_float64) and wide"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k", chosen, __file__]
    environment = os.environ | {"MINIGPT_KERNEL": level}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.thorough
def test_a_level_that_there_is_not_is_named() -> None:
    assert "MINIGPT_KERNEL=avx9 is none of this processor's levels: " in info_at("avx9")


def info_at(level: str) -> str:
    """Return what ``minigpt info`` prints in a process of its own with this level of instructions."""
    command = [sys.executable, "-m", "minigpt", "info", "demo"]
    environment = os.environ | {"MINIGPT_KERNEL": level, "COLUMNS": "500"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100).stdout


def test_int8_step_is_the_layers_own_numbers() -> None:
    """With keys and values in float32: where a last bit differs, bfloat16 rounds some to its next number."""
    model = quantize_int8(small_model(**WIDE))
    ids = random_ids(3, 12, vocab=model.config.vocab_size)
    caches = [model.new_cache(3, 12) for _ in range(2)]
    for cache in caches:
        cache.store = cache.store.float()
    with torch.no_grad():
        logits = read(StepKernel(model), ids.tolist(), caches[0].store)
        expected = model(ids, cache=caches[1]).flatten(0, 1)
    assert_within(rms(logits - expected), 1e-4 * rms(expected), rms(expected), "int8")


def test_generate_takes_the_kernel_by_itself() -> None:
    model = small_model()
    assert step_of(model) is not None
    ids = random_ids(2, 8, vocab=model.config.vocab_size)
    supplied = minigpt.generate(model, ids, max_new_tokens=20)
    use_kernel(False)
    try:
        assert step_of(model) is None
        assert_same_bits(supplied, minigpt.generate(model, ids, max_new_tokens=20), "tokens")
    finally:
        use_kernel(True)


class Doubled(nn.Module):
    """A module in the place of a dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def hook(model: Any) -> None:
    model.h[0].register_forward_hook(lambda *_: None)


def swap(path: str, part: Any) -> Callable[[Any], None]:
    """Return a function that replaces a module or an attribute of a model."""
    owner, _, name = path.rpartition(".")
    part = part.eval() if isinstance(part, nn.Module) else part
    return lambda model: setattr(model.get_submodule(owner), name, part)


def drop_block(model: Any) -> None:
    del model.h[1]


def transpose(model: Any) -> None:
    """A square weight has another meaning in an ``nn.Linear``."""
    square = model.h[0].attn.c_proj
    model.h[0].attn.c_proj = nn.Linear(48, 48, bias=False).eval()
    model.h[0].attn.c_proj.weight = nn.Parameter(square.weight.detach())


SWAPS: dict[str, Callable[[Any], object]] = {  # what is done to a model that computes something else then
    "a hook": hook,
    "a norm": swap("h.0.ln_1", nn.LayerNorm(48)),
    "one activation": swap("h.0.mlp.act", F.relu),
    "an activation's module": swap("h.1.mlp.act", nn.ReLU()),
    "a function": swap("h.1.mlp.act", lambda x: x),
    "attention": swap("h.1.attn.attention", "eager"),
    "the sum of values": swap("h.1.attn.sdpa", lambda q, k, v, mask: v[..., : q.shape[2], :]),
    "a forward": swap("h.1.attn.forward", lambda x, *_: x),
    "a dropout": swap("h.1.mlp.dropout", Doubled()),
    "a dropout of attention": swap("h.1.attn.resid_dropout", Doubled()),
    "the dropout of embeddings": swap("drop", Doubled()),
    "a linear layer": transpose,
    "positions": swap("wpe", nn.Embedding(64, 48)),
    "an embedding that shrinks": swap("wte.max_norm", 1.0),
}
UNREADABLE: dict[str, Callable[[Any], object]] = {  # what draws numbers then, or cannot be computed
    "training": lambda model: model.train(),
    "a dropout that draws": lambda model: model.h[0].mlp.dropout.train(),
    "a norm of another size": swap("h.0.ln_1.normalized_shape", (24,)),
    "a matrix of another size": swap("h.0.mlp.c_fc", Conv1D(48, 24)),
    "heads": swap("h.1.attn.n_head", 2),
    "the order of blocks": lambda model: model.h.append(model.h.pop(0)),
}


def assert_reads_as_the_modules(model: Any) -> None:
    """Reading has the logits of the model's own forward, which has those of reference arithmetic."""
    ids = random_ids(1, 9)
    with torch.no_grad():
        expected = plain(copy.deepcopy(model))(ids)[0]
        assert_within(max_abs(model(ids)[0] - expected), 1e-5 * max_abs(expected), max_abs(expected), "fast")
    logits = Reader(model, 1, 9).read({0: ids[0].tolist()}, last=9)
    assert_within(max_abs(logits - expected), 1e-5 * max_abs(expected), max_abs(expected), "read")


@pytest.mark.parametrize("name", SWAPS | UNREADABLE)
def test_a_part_that_it_does_not_compute_sends_a_model_to_pytorch(name: str) -> None:
    model = small_model()
    assert path_of(model).startswith("kernel")
    (SWAPS | UNREADABLE)[name](model)
    assert path_of(model).startswith("PyTorch: ")
    if name in SWAPS:
        assert_reads_as_the_modules(model)


@pytest.mark.parametrize("change", [
    *(swap("h.0.mlp.act", act) for act in (F.silu, torch.tanh)),
    *(swap("h.0.attn.scale", scale) for scale in (1.0, 0.02)),
    drop_block,
])  # fmt: skip
def test_what_it_may_compute_is_seen(change: Callable[[Any], None]) -> None:
    model = small_model(n_layer=2)
    change(model)
    if len(model.h) == 2:
        model.h[1].mlp.act = model.h[0].mlp.act  # the same in all blocks is one that the kernel may know
    assert_reads_as_the_modules(model)


def test_models_of_another_kind_say_why() -> None:
    reasons = {
        'arithmetic="fast"': small_model(arithmetic="reference"),
        "sdpa": small_model(attention="eager"),
        "float32": small_model(dtype=torch.float16),
        "ln_1": small_model("dyt"),
    }
    for word, model in reasons.items():
        assert word in (why_not(model) or ""), f"{word}: {why_not(model)}"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "name", ["h.0.ln_2", "h.0.attn.c_attn", "h.1.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "wte", "wpe"]
)
def test_where_the_model_is_nan_the_kernel_is_too(name: str, kind: str) -> None:
    """A variance that overflows makes a row of zeros of some norms, and a text of one token of that."""
    model, ids = small_model(dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32), random_ids(1, 6)
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(1e25)
    model = quantize_int8(model) if kind == "int8" else model
    assert why_not(model) is None
    logits = Reader(model, 1, 6).read({0: ids[0].tolist()})
    assert logits.isnan().all()
    with pytest.raises(minigpt.GenerationError, match="NaN"):
        minigpt.generate(model, ids, max_new_tokens=3)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "silu", "relu", "tanh"])
def test_activations_of_huge_numbers(activation: str) -> None:
    """e^x overflows to infinity, so that -1e38 becomes -0 and no number."""
    model, ids = small_model(activation_function=activation, n_layer=1), random_ids(1, 3)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight.zero_()
        model.h[0].mlp.c_fc.bias.copy_(torch.linspace(-3e38, 0, len(model.h[0].mlp.c_fc.bias)))
        expected = model(ids)[0, -1:]
    logits = Reader(model, 1, 3).read({0: ids[0].tolist()})
    assert_within(max_abs(logits - expected), 1e-5 * max_abs(expected), max_abs(expected), activation)


def test_a_library_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setenv("MINIGPT_KERNEL_LIBRARY", str(tmp_path / "broken.so"))
    kernel.load.cache_clear()
    try:
        assert re.search("cannot be loaded: .*broken.so", why_not(small_model()) or "")
    finally:
        monkeypatch.undo()
        kernel.load.cache_clear()


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_a_norm_that_somebody_edited_is_not_replaced(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel computes by the class, so a class that computes something else is none of its own."""
    model = small_model()
    minigpt.swap_norms(model, norm)
    if norm is FrozenLayerNorm:
        fit_norms(model, random_ids(4, 20))
    assert why_not(model) is None
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: 1.001 * forward(self, x))
    assert path_of(model).startswith("PyTorch: ")
    monkeypatch.undo()
    assert path_of(model).startswith("kernel")
    model.h[0].ln_1.standardize = model.h[0].ln_1.forward
    assert path_of(model).startswith("PyTorch: ")


def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources, if they are there, are in its folder."""
    for name in ("libminigpt.so", *kernel.SOURCES):
        shutil.copy(ROOT / "minigpt/engine" / name, tmp_path)
    monkeypatch.setenv("MINIGPT_KERNEL_LIBRARY", str(tmp_path / "libminigpt.so"))
    kernel.load.cache_clear()
    try:
        assert kernel.is_at_hand()
        with (tmp_path / kernel.SOURCES[0]).open("a") as source:
            source.write("\n// edited\n")
        kernel.load.cache_clear()
        with pytest.warns(UserWarning, match="built from other sources"):
            assert not kernel.is_at_hand()
    finally:
        monkeypatch.undo()
        kernel.load.cache_clear()
    assert kernel.is_at_hand()


def build_module() -> Any:
    """Return hatch_build.py of the repository as a module."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", kernel.SOURCES)
def test_each_source_can_be_read_alone(name: str) -> None:
    """A file includes those that it uses. The library is checked against the sources by the same list."""
    assert build_module().SOURCES == kernel.SOURCES
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler")
    source = ROOT / "minigpt/engine" / name
    subprocess.run([compiler, "-std=gnu11", "-fsyntax-only", "-x", "c", str(source)], check=True, timeout=100)


def test_installing_without_a_compiler_builds_a_pure_python_wheel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    monkeypatch.setenv("CC", "/nowhere/cc")
    hook = object.__new__(build_module().KernelBuildHook)
    wheel: dict[str, Any] = {"artifacts": []}
    hook.initialize("standard", wheel)
    assert wheel == {"artifacts": []}
    assert "the kernel was not compiled" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_bits_do_not_depend_on_how_a_compiler_rounds_chains(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC rounds products and sums one by one in some loops for this processor, from version 14 on for all."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("is about x86")
    module, library = build_module(), tmp_path / "chains.so"
    levels = {"portable": [], "avx2": ["-march=x86-64-v3", "-mtune=znver3"]}
    monkeypatch.setattr(module, "LEVELS", {platform.machine().lower(): levels})
    module.build(library)
    monkeypatch.setenv("MINIGPT_KERNEL_LIBRARY", str(library))
    kernel.load.cache_clear()
    try:
        if kernel.functions().level != "avx2":
            pytest.skip("this processor lacks AVX2")
        for shape in (ODD, WIDE):
            for by_rows in (False, True):
                test_any_tokens_at_once_are_read_as_one_by_one(kind, torch.bfloat16, shape, by_rows)
    finally:
        monkeypatch.undo()
        kernel.load.cache_clear()


@pytest.mark.thorough
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    library, checks = tmp_path / "checked.so", "-fsanitize=address,undefined"
    build_module().build(library, (checks, "-fno-sanitize-recover=undefined", "-g", "-O1"))
    # libstdc++ must be loaded before the sanitizer looks for it, or it cannot follow the exceptions of PyTorch.
    requested = [["gcc", f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    preload = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in requested]
    environment = os.environ | {
        "MINIGPT_KERNEL_LIBRARY": str(library), "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-n", "0", "-s", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout, "the kernel was not loaded"
