"""Checkpoint to model and back: exactly these tensors, exactly their values, mapped from the file, or refused."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    TINY,
    Tensors,
    edit_tensors,
    largest_difference,
    reference,
    saved,
    tiny_bpe,
    tokens,
    without_prefix,
)
from helpers import small_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

import minigpt
from minigpt import GPT2, CheckpointError, GPT2Config, NormError, Tokenizer
from minigpt.precision import DTYPES


@pytest.fixture
def single(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint of one file, as transformers writes it; each test may damage its own."""
    return shutil.copytree(folder, tmp_path / "single")


@pytest.fixture
def sharded(hf_model: GPT2LMHeadModel, tmp_path: Path) -> Path:
    return saved(hf_model, tmp_path / "sharded", max_shard_size="40KB")


def load(source: str | Path, **how: Any) -> GPT2:
    return minigpt.from_pretrained(source, arithmetic="reference", device="cpu", **how)


@torch.no_grad()
def assert_same_logits(ours: GPT2, hf_model: nn.Module) -> None:
    """Bit for bit: in reference arithmetic nothing may differ but the values of the weights."""
    ids = tokens(3, 17)
    mine, hers = ours(ids), hf_model(ids).logits
    assert mine.dtype == hers.dtype
    assert torch.equal(mine, hers), largest_difference(mine, hers)


def values(model: GPT2) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_values(model: GPT2, expected: Tensors) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(parameters[name], expected[name])]
    assert not differing


# --- from_pretrained: every shape of a checkpoint


def test_a_bare_file(single: Path, hf_model: GPT2LMHeadModel) -> None:
    file = (single / "model.safetensors").rename(single / "my run, step 900.safetensors")
    assert_same_logits(load(file), hf_model)
    assert_same_logits(load(str(file)), hf_model)


def test_old_buffers_of_any_dtype_are_skipped(single: Path, hf_model: GPT2LMHeadModel) -> None:
    buffers = {
        "h.0.attn.bias": torch.ones(1, 1, 48, 48, dtype=torch.uint8).tril(),
        "h.1.attn.bias": torch.ones(1, 1, 48, 48).tril(),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.1.attn.masked_bias": torch.tensor(-1e4, dtype=torch.float16),
    }
    edit_tensors(single, lambda tensors: without_prefix(tensors) | buffers)
    assert_same_logits(load(single), hf_model)


# --- from_pretrained: strictness


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding(single: Path, hf_model: GPT2LMHeadModel) -> None:
    head = load_file(single / "model.safetensors")["transformer.wte.weight"].clone()
    edit_tensors(single, lambda tensors: tensors | {"lm_head.weight": head})
    model = load(single)
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert_same_logits(model, hf_model)
    head.view(torch.int32)[-1, -1] ^= 1  # one bit
    edit_tensors(single, lambda tensors: tensors | {"lm_head.weight": head})
    complaint = r"lm_head\.weight differs from wte\.weight.*\"tie_word_embeddings\": false"
    with pytest.raises(CheckpointError, match=complaint):
        load(single)


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


STRICT: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "misnamed": (
        lambda tensors: {name.replace("h.1.ln_1.weight", "h.1.ln_1.gamma"): tensor for name, tensor in tensors.items()},
        r"missing h\.1\.ln_1\.weight; unexpected h\.1\.ln_1\.gamma",
    ),
    "transposed": (
        lambda tensors: tensors | {"transformer.h.0.mlp.c_fc.weight": tensors["transformer.h.0.mlp.c_fc.weight"].T},
        r"of another shape: h\.0\.mlp\.c_fc\.weight is \(128, 32\), not \(32, 128\)",
    ),
    "of no dtype": (
        lambda tensors: tensors | {"transformer.ln_f.bias": torch.ones(32, dtype=torch.int8)},
        r"of a dtype other than .*: ln_f\.bias is int8",
    ),
    "a layer too many": (
        lambda tensors: tensors | {"h.2.ln_1.weight": torch.ones(32)},
        r"unexpected h\.2\.ln_1\.weight",
    ),
}


@pytest.mark.parametrize(("change", "complaint"), STRICT.values(), ids=STRICT)
def test_tensors_that_do_not_fit_are_listed(single: Path, change: Callable[[Tensors], Tensors], complaint: str) -> None:
    edit_tensors(single, change)
    with pytest.raises(CheckpointError, match=rf"does not hold this model's tensors: {complaint}$"):
        load(single)


# --- from_pretrained: dtype and device


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_kept_converted_to_and_saved(single: Path, tmp_path: Path, dtype: str) -> None:
    hf_model = reference(std=0.3).to(DTYPES[dtype])
    kept, converted = load(saved(hf_model, tmp_path / "own")), load(single, dtype=dtype)
    assert {parameter.dtype for parameter in (*kept.parameters(), *converted.parameters())} == {DTYPES[dtype]}
    assert_same_logits(kept, hf_model)
    assert_same_values(converted, values(kept))
    minigpt.save_pretrained(converted, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert_same_logits(converted, again)


def test_mixed_dtypes_need_a_name(single: Path) -> None:
    name = "transformer.h.0.ln_1.bias"
    edit_tensors(single, lambda tensors: tensors | {name: tensors[name].half()})
    with pytest.raises(CheckpointError, match="holds tensors of float16, float32; choose the dtype to compute in"):
        load(single)
    assert {parameter.dtype for parameter in load(single, dtype="float32").parameters()} == {torch.float32}


def test_the_meta_device_has_shapes_only(single: Path, tmp_path: Path) -> None:
    model = minigpt.from_pretrained(single, device="meta", dtype="bfloat16")
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", torch.bfloat16)}
    with pytest.raises(NormError, match="has shapes only, and no values to load into"):
        minigpt.load_norms(model, single)
    with pytest.raises(CheckpointError, match="no values to save"):
        minigpt.save_pretrained(model, tmp_path / "out")


@pytest.mark.gpu
def test_the_default_device_is_cuda_where_there_is_one(single: Path) -> None:
    assert {parameter.device.type for parameter in minigpt.from_pretrained(single).parameters()} == {"cuda"}


# --- from_pretrained: the parameters are the file


def mapped_ranges(file: Path) -> list[range]:
    """The addresses at which this process has ``file`` mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if line[-1] == str(file.resolve())]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("norm", ["fused", "textbook"])
def test_parameters_are_the_mapped_file(single: Path, sharded: Path, shards: bool, norm: str) -> None:
    place = sharded if shards else single
    model = minigpt.from_pretrained(place, device="cpu", norm=norm)
    ranges = [addresses for file in place.glob("*.safetensors") for addresses in mapped_ranges(file)]
    for name, parameter in model.named_parameters():
        assert any(parameter.data_ptr() in addresses for addresses in ranges), f"{name} was copied"
        assert parameter.is_contiguous()


@pytest.mark.parametrize("shards", [False, True])
def test_writing_to_the_parameters_leaves_the_file_alone(single: Path, sharded: Path, shards: bool) -> None:
    place = sharded if shards else single
    before = {file: file.read_bytes() for file in place.iterdir()}
    model, other = load(place), load(place)
    expected = values(other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert {file: file.read_bytes() for file in place.iterdir()} == before
    assert_same_values(other, expected)
    assert_same_values(model, {name: tensor + 1 for name, tensor in expected.items()})


def test_a_loaded_model_is_in_eval_mode_and_can_be_trained(single: Path) -> None:
    model = load(single, norm="textbook")
    assert not any(module.training for module in model.modules())
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters())
    before, optimizer = values(model), torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(2, 9)).logsumexp(-1).sum().backward()
    optimizer.step()
    unchanged = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert not unchanged


# --- load_norms


def is_norm(name: str) -> bool:
    return ".ln_" in f".{name}"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint with the same shapes and other values."""
    return saved(reference(seed=1), tmp_path / "other")


def test_only_the_norms_change_and_in_place(single: Path, other: Path) -> None:
    model = load(single)
    before, parameters = values(model), dict(model.named_parameters())
    places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    names = minigpt.load_norms(model, other)
    after, source = values(model), values(load(other))
    assert names == [f"{site}.{name}" for site in model.site_names() for name in ("weight", "bias")]
    assert all(torch.equal(after[name], (source if is_norm(name) else before)[name]) for name in before)
    assert not any(torch.equal(before[name], source[name]) for name in names)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop("transformer.ln_f.bias", "transformer.h.0.ln_2.weight"), r"missing h\.0\.ln_2\.weight, ln_f\.bias$"),
        (
            lambda tensors: tensors | {"transformer.h.1.ln_1.weight": torch.ones(32, dtype=torch.int8)},
            r"h\.1\.ln_1\.weight is int8$",
        ),
    ],
    ids=["missing", "of another kind"],
)
def test_norms_that_do_not_fit_are_named_and_nothing_is_copied(
    single: Path, other: Path, change: Callable[[Tensors], Tensors], complaint: str
) -> None:
    model = load(single)
    before = values(model)
    with pytest.raises(CheckpointError, match=complaint):
        minigpt.load_norms(model, edit_tensors(other, change))
    assert_same_values(model, before)


# --- save_pretrained


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_save(tmp_path: Path, shards: bool, tied: bool) -> None:
    """Also what is compiled, and a norm that is at two sites."""
    hf_model = reference(tie_word_embeddings=tied)
    model = load(saved(hf_model, tmp_path / "in", **{"max_shard_size": "40KB"} if shards else {}))
    assert_same_logits(model, hf_model)
    assert_same_logits(load(tmp_path / "in"), hf_model)
    model.h[1].ln_2 = model.h[0].ln_1
    expected = model(tokens(3, 17))
    minigpt.save_pretrained(model, tmp_path / "out", Tokenizer(tiny_bpe()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again(tokens(3, 17)).logits, expected)
    ids = Tokenizer(tiny_bpe()).encode(text := "the naïve dog <|endoftext|>")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids
    whole: Any = torch.compile(model, backend="eager")
    model.h[1] = torch.compile(model.h[1], backend="eager")
    for number, compiled in enumerate((whole, model)):
        minigpt.save_pretrained(compiled, tmp_path / f"compiled {number}")
        assert_same_logits(load(tmp_path / f"compiled {number}"), again)


def test_the_config_comes_back_field_by_field(tmp_path: Path) -> None:
    fields = {
        **TINY, "n_inner": 50, "activation_function": "relu", "layer_norm_epsilon": 1e-3, "eos_token_id": [3, 5],
        "pad_token_id": 7, "scale_attn_by_inverse_layer_idx": True, "resid_pdrop": 0.25, "tie_word_embeddings": False,
    }  # fmt: skip
    model = minigpt.model.GPT2(GPT2Config.from_dict(fields)).eval()  # as it is constructed
    minigpt.save_pretrained(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert load(tmp_path).config == model.config
    assert {name: getattr(again.config, name) for name in fields} == fields
    assert (again.generation_config.eos_token_id, again.generation_config.pad_token_id) == ([3, 5], 7)


def test_an_eps_that_the_config_does_not_say_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    minigpt.swap_norms(model, lambda size, eps, bias: nn.LayerNorm(size, 1e-2, bias=bias), "ln_f")
    model.h[0].ln_1.eps = 1e-3
    model.h[0].ln_2.eps = torch.tensor(1e-5).item()  # the same in float32, and no other
    caplog.clear()
    minigpt.save_pretrained(model, tmp_path)
    assert caplog.messages == [
        "the checkpoint cannot say that eps is 0.001, 0.01 at h.0.ln_1, ln_f; it will load with the config's 1e-05"
    ]


@pytest.mark.parametrize("shards", [False, True])
def test_saving_over_what_the_model_is_mapped_from(single: Path, sharded: Path, shards: bool) -> None:
    """Nor does it reach another model that is mapped from there."""
    place = sharded if shards else single
    model, bystander = load(place), load(place)
    with torch.no_grad():
        model.ln_f.weight.mul_(2)
    expected, old = values(model), values(bystander)
    minigpt.save_pretrained(model, place)
    assert_same_values(model, expected)
    assert_same_values(bystander, old)
    assert_same_values(load(place), expected)
    assert_same_logits(model, AutoModelForCausalLM.from_pretrained(place).eval())


@pytest.mark.parametrize("most", [10**9, 40_000], ids=["single", "sharded"])
def test_whoever_may_read_the_config_may_read_the_weights(single: Path, tmp_path: Path, most: int) -> None:
    minigpt.save_pretrained(load(single), tmp_path / "new", max_shard_bytes=most)
    (tmp_path / "any").touch()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "new").iterdir()}
    assert set(modes.values()) == {(tmp_path / "any").stat().st_mode}, modes


def test_what_is_no_gpt2_any_more_leaves_the_old_checkpoint(single: Path, tmp_path: Path) -> None:
    minigpt.save_pretrained(load(single), out := tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    model = load(single)
    nn.utils.parametrizations.weight_norm(model.h[0].mlp.c_fc)
    model.wte = nn.Embedding(70, 32)
    complaint = (
        r"missing transformer\.h\.0\.mlp\.c_fc\.weight; unexpected transformer\.h\.0\.mlp\.c_fc\.param.*; "
        r"of another shape: transformer\.wte\.weight is \(70, 32\), not \(61, 32\); keep the state_dict"
    )
    with pytest.raises(CheckpointError, match=f"is not a GPT-2 of its config: {complaint}"):
        minigpt.save_pretrained(model, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
