"""Attention of new tokens in one launch: the library's, over what is written, and nothing else of the cache changes."""

import importlib.util
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_code import told
from helpers import assert_same_bits, assert_within, max_abs, random_ids, small_model
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from minigpt.engine import compile_steps, one_launch
from minigpt.engine.compiled import read_fixed
from minigpt.engine.one_launch import FixedCache
from minigpt.generation import generate
from minigpt.generation.batch import Batch
from minigpt.generation.decode import rows_of, write
from minigpt.generation.settings import parse_settings
from minigpt.generation.static import StaticBatch
from minigpt.processor import HALVES

DTYPES = (torch.float64, torch.float32, *HALVES)
SHAPES = {  # rows, heads, width of a head, room, column
    "the first column": (1, 3, 64, 24, 0), "the last column": (2, 2, 64, 40, 39), "odd": (3, 2, 5, 17, 9),
    "a width of one": (2, 3, 1, 9, 8), "wide": (2, 1, 200, 90, 70), "several turns": (1, 2, 64, 300, 290),
}  # fmt: skip


class Inputs:
    """A layer's part of a cache that has more of everything, new tokens, and which columns their rows see."""

    def __init__(self, shape: str, dtype: torch.dtype, device: torch.device) -> None:
        rows, heads, width, room, last = SHAPES[shape]
        store = torch.randn(3, 2, rows + 1, heads, room, width).to(device, dtype)
        self.room = store[1, :, :rows]  # (2, B, H, S, D)
        self.room[:, :, :, last:] = torch.nan  # not written yet
        self.qkv = torch.randn(rows, 1, 3 * heads * width).to(device, dtype)
        visible = torch.arange(room, device=device) >= torch.arange(rows, device=device)[:, None] * last // rows
        self.mask = torch.zeros(visible.shape, device=device, dtype=dtype).masked_fill(~visible, -torch.inf)
        self.mask = self.mask[:, None, None]  # (B, 1, 1, S)
        self.column, self.scale = torch.tensor([last], device=device), 0.3

    def attend(self) -> Tensor:
        return one_launch.attend(self.qkv, self.room, self.mask, self.column, self.scale)

    def by_library(self, dtype: torch.dtype) -> Tensor:
        """After ``attend``: over the columns up to the new one."""
        _, rows, heads, _, width = self.room.shape
        seen = int(self.column) + 1
        q = self.qkv.view(rows, 1, 3, heads, width)[:, :, 0].transpose(1, 2).to(dtype)  # (B, H, 1, D)
        k, v = self.room[:, :, :, :seen].to(dtype)
        y = F.scaled_dot_product_attention(q, k, v, self.mask[..., :seen].to(dtype), scale=self.scale)
        return y.transpose(1, 2).reshape(rows, 1, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_librarys_attention_in_one_launch(shape: str, dtype: torch.dtype, triton_device: torch.device) -> None:
    inputs = Inputs(shape, dtype, triton_device)
    given = inputs.attend()
    truth, library = inputs.by_library(torch.float64), inputs.by_library(dtype)
    assert given.dtype == dtype
    of_sums = 32 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * max_abs(truth)
    assert_within(max_abs(given - truth), max_abs(library - truth) + of_sums, max_abs(truth), shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_new_column_is_written_in_one_launch_and_no_other(shape: str, triton_device: torch.device) -> None:
    inputs = Inputs(shape, torch.float32, triton_device)
    wanted = inputs.room.clone()
    _, rows, heads, _, width = wanted.shape
    new = inputs.qkv.view(rows, 1, 3, heads, width).permute(2, 0, 3, 1, 4)[1:]  # (2, B, H, 1, D)
    FixedCache((wanted,), inputs.column).update(0, new)
    inputs.attend()
    assert_same_bits(inputs.room.nan_to_num(7), wanted.nan_to_num(7), shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["odd", "several turns"])
def test_a_row_is_the_same_in_any_company(shape: str, dtype: torch.dtype, triton_device: torch.device) -> None:
    inputs = Inputs(shape, dtype, triton_device)
    inputs.room, inputs.qkv, inputs.mask = (
        torch.cat([tensor, torch.randn_like(tensor)], dim)
        for tensor, dim in ((inputs.room, 1), (inputs.qkv, 0), (inputs.mask, 0))
    )
    whole = inputs.attend()
    for row in range(len(whole)):
        part = Inputs(shape, dtype, triton_device)
        part.room, part.qkv, part.mask = inputs.room[:, [row]], inputs.qkv[[row]], inputs.mask[[row]]
        assert_same_bits(part.attend(), whole[[row]], f"row {row} of {len(whole)}")


def test_one_mask_serves_all_rows(triton_device: torch.device) -> None:
    inputs = Inputs("odd", torch.float32, triton_device)
    inputs.mask = inputs.mask[-1:]
    shared = inputs.attend()
    inputs.mask = inputs.mask.repeat(len(shared), 1, 1, 1)
    assert_same_bits(inputs.attend(), shared, "one mask")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_and_the_lowest_scores(sign: int, dtype: torch.dtype, triton_device: torch.device) -> None:
    """One weighs all, and the rest nothing."""
    inputs = Inputs("odd", dtype, triton_device)
    rows, heads, width, _, last = SHAPES["odd"]
    largest = sign * torch.finfo(dtype).max / 8
    new = inputs.qkv.view(rows, 1, 3, heads, width)
    new[:, :, 0] = 1  # queries: a score is the sum of a key
    new[:, :, 1] = new[:, :, 1].abs() * largest
    inputs.room[0, :, :, :last] = torch.rand_like(inputs.room[0, :, :, :last]) * largest
    given = inputs.attend()
    keys, values = inputs.room[:, :, :, : last + 1]
    scores = (keys.double() * inputs.scale).sum(-1) + inputs.mask[:, 0, :, : last + 1].double()  # (B, H, columns)
    best = scores.argmax(-1)[:, :, None, None].expand(-1, -1, 1, width)
    assert_same_bits(given, values.gather(2, best).reshape(rows, 1, -1), "the value of one column")


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_shows_where_it_is_seen(wrong: float, triton_device: torch.device) -> None:
    inputs = Inputs("odd", torch.float32, triton_device)
    clean = inputs.attend()
    inputs.room[0, 1, :, 7] = wrong  # keys of the second row
    given = inputs.attend()
    assert given[1].isnan().all()
    assert_same_bits(given[[0, 2]], clean[[0, 2]], "other rows")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_operator_is_registered_as_pytorch_expects(triton_device: torch.device) -> None:
    inputs = Inputs("odd", torch.float32, triton_device)
    inputs.room = inputs.room.nan_to_num(7).contiguous()
    arguments = (inputs.qkv, inputs.room, inputs.mask, inputs.column, inputs.scale)
    torch.library.opcheck(torch.ops.minigpt.attend_newest.default, arguments)


@pytest.fixture
def everywhere(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model attends in one launch on the CPU too, where the kernel is interpreted."""
    monkeypatch.setattr(one_launch, "_decided", {})
    monkeypatch.setattr(one_launch, "has_compiler", lambda device: True)


@pytest.fixture
def launched(everywhere: None, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The same; the rows of each launch."""
    rows: list[int] = []
    one_launch.prepare(torch.empty(0, device=triton_device).device)  # with its number
    attend = one_launch.attend
    monkeypatch.setattr(one_launch, "attend", lambda qkv, *given: rows.append(len(qkv)) or attend(qkv, *given))
    return rows


@pytest.mark.parametrize(
    "fields", [{}, {"scale_attn_by_inverse_layer_idx": True}, {"n_head": 3, "n_embd": 21}], ids=str
)
def test_a_batch_writes_the_tokens_of_plain_decoding(
    fields: dict[str, Any], triton_device: torch.device, launched: list[int]
) -> None:
    """float64 leaves no room for rounding."""
    model = small_model(dtype=torch.float64, device=triton_device, **fields)
    settings = parse_settings(max_new_tokens=4, eos_token_id=None, do_sample=True, temperature=1.5, seed=5)
    static, plain = (rows_of(model, [[1, 2, 3, 4, 5], [6]], settings, None) for _ in range(2))
    batch = StaticBatch(model, settings, 3, 12)
    batch.records = False  # what is replayed from a graph could not be counted
    assert len(list(write(batch, static))) == 8
    assert launched == [3] * 2 * 3, "three places, two layers, and three tokens after that of the prompt"
    assert len(list(write(Batch(model, settings, 3, 12), plain))) == 8
    assert len(launched) == 2 * 3
    assert [row.ids for row in static] == [row.ids for row in plain]


@pytest.mark.thorough
@pytest.mark.usefixtures("everywhere", "unchecked")  # the checks of shapes are not for the compiler to see
def test_a_compiled_step_attends_in_one_launch(triton_device: torch.device) -> None:
    """In one program for any number of rows, once there have been two, without a copy of the cache."""
    model, texts = small_model(device=triton_device), [random_ids(rows, 5, device=triton_device) for rows in (2, 3, 5)]
    how: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None}
    wanted = [generate(model, ids, **how) for ids in texts]
    programs: list[torch.fx.GraphModule] = []

    def backend(program: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        programs.append(program)
        return aot_eager(program, inputs)

    compile_steps(model, backend=backend, fullgraph=True)
    try:
        for ids, tokens in zip(texts, wanted, strict=True):
            assert torch.equal(generate(model, ids, **how), tokens)
            one_launch._decided[torch.device("cuda", len(ids))] = True  # of no concern to a program
    finally:
        torch.compiler.reset()
    assert len(programs) == 2
    for program in programs:
        called = [node.target for node in program.graph.nodes]
        assert called.count(torch.ops.minigpt.attend_newest) == model.config.n_layer
        assert "index_copy_" not in called


def test_it_is_for_inference_over_a_cache_that_is_fixed(everywhere: None, triton_device: torch.device) -> None:
    qkv, cache = torch.randn(2, 1, 144, device=triton_device), small_model(device=triton_device).new_cache(2, 8)
    fixed = FixedCache(cache.store.unbind(), torch.tensor([3], device=triton_device))
    with torch.no_grad():
        assert not one_launch.suits(fixed, qkv), "the device is not prepared"
    one_launch.prepare(qkv.device)
    assert not one_launch.suits(fixed, qkv), "gradients may be asked for"
    with torch.no_grad():
        assert one_launch.suits(fixed, qkv)
        assert not one_launch.suits(cache, qkv)
        assert not one_launch.suits(None, qkv)
        assert not one_launch.suits(fixed, qkv.double()), "of two dtypes"
        with torch.autocast(triton_device.type):
            assert not one_launch.suits(fixed, qkv)


def test_nothing_is_left_undropped_in_training(triton_device: torch.device, launched: list[int]) -> None:
    dropouts = {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = small_model(device=triton_device, **dropouts).train()
    cache = model.new_cache(1, 8)
    cache.store.normal_()
    fixed = FixedCache(cache.store.unbind(), torch.tensor([3], device=triton_device))
    x, mask = torch.randn(1, 1, 48, device=triton_device), torch.zeros(1, 8, device=triton_device)
    with torch.no_grad():
        assert not torch.equal(read_fixed(model, x, mask, fixed), read_fixed(model, x, mask, fixed))
        assert not launched
        model.eval()
        assert torch.equal(read_fixed(model, x, mask, fixed), read_fixed(model, x, mask, fixed))
    assert launched == [1] * 4


@pytest.mark.parametrize(("major", "does"), [(9, True), (8, True), (7, False)])
def test_old_devices_are_left_to_the_library(major: int, does: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(one_launch, "interpreting", lambda: False)
    assert one_launch.has_compiler(torch.device("cuda", 0)) == does
    assert not one_launch.has_compiler(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert not one_launch.has_compiler(torch.device("cuda", 0)), "without triton"
    monkeypatch.setattr(one_launch, "interpreting", lambda: True)
    assert not one_launch.has_compiler(torch.device("cuda", 0)), "what is interpreted cannot be recorded"


def test_where_nothing_can_be_compiled_a_warning_says_so_once(
    everywhere: None, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_compiler(*given: Any) -> Tensor:
        raise RuntimeError("Failed to find C compiler\nand more")

    monkeypatch.setattr(one_launch, "attend", without_compiler)
    model, settings = small_model(device=triton_device), parse_settings(max_new_tokens=5, eos_token_id=None)
    with pytest.warns(UserWarning, match=rf"RuntimeError: Failed to find C compiler\), so .* on {triton_device}"):
        batch = StaticBatch(model, settings, 1, 12)
    rows = rows_of(model, [[1, 2]], settings, None)
    assert len(list(write(batch, rows))) == 5
    ids = torch.tensor([[1, 2]], device=triton_device)
    assert [rows[0].ids] == generate(model, ids, max_new_tokens=5, eos_token_id=None).tolist()
    with warnings.catch_warnings(action="error"):
        StaticBatch(model, settings, 1, 12)


def test_threads_wait_until_it_is_known_and_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(one_launch, "_decided", {})
    monkeypatch.setattr(one_launch, "has_compiler", lambda device: True)
    monkeypatch.setattr(one_launch, "_compiles", lambda device: asked.append(device) or time.sleep(0.1) is None)
    device = torch.device("cpu")

    def is_ready(number: int) -> bool:
        one_launch.prepare(device)
        return one_launch._decided[device]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_ready, range(4)))
    assert asked == [device]


@pytest.mark.parametrize(("attention", "arithmetic"), [("eager", "fast"), ("sdpa", "reference")])
def test_formulas_are_computed_as_they_are_written(
    attention: str, arithmetic: str, triton_device: torch.device, launched: list[int]
) -> None:
    model = small_model(attention=attention, arithmetic=arithmetic, device=triton_device)
    settings = parse_settings(max_new_tokens=5, eos_token_id=None)
    for _ in write(StaticBatch(model, settings, 1, 12), rows_of(model, [[1, 2]], settings, None)):
        pass
    assert not launched


COMPILE = """
import json
from gpu_code import compiled, needed
from minigpt.engine.one_launch import HELD, WARPS
from minigpt.engine.one_launch_kernel import attend_newest

for dtype, wide, width, block in (("bf16", 4, 64, 64), ("fp16", 4, 80, 128), ("fp32", 4, 64, 64), ("fp64", 8, 64, 64)):
    types = dict.fromkeys(attend_newest.arg_names, "i32") | dict.fromkeys(("qkv", "room", "mask", "y"), "*" + dtype)
    constants = dict(SCALE=0.125, WIDTH=width, BLOCK=block, PLACES=HELD // (block * wide))
    code = compiled(attend_newest, types | {"column": "*i64"}, constants, WARPS)
    loads = code["ptx"].count("cp.async.cg") + code["ptx"].count("ld.global.v4")
    print(json.dumps({"dtype": dtype, "warps": WARPS, "loads": loads} | needed(code)))
"""


@pytest.mark.thorough
def test_on_a_gpu_nothing_is_spilt_and_keys_come_sixteen_bytes_at_a_time(triton_device: torch.device) -> None:
    """In half precision, the registers of two programs fit into a multiprocessor's 65,536."""
    found = told(COMPILE)
    assert len(found) == 4
    for kernel in found:
        assert kernel["spilt"] == 0
        assert kernel["loads"] > 0
        if kernel["dtype"] in ("bf16", "fp16"):
            assert 2 * kernel["warps"] * 32 * kernel["registers"] <= 65_536, kernel
