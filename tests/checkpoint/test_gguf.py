"""GGUF files as checkpoints: the weights dequantized, the config and the tokenizer of the file's own metadata."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from bench import others
from checkpoints import reference, saved, talking
from gguf_files import finish, writer_of
from helpers import randomize
from transformers import LlamaConfig, LlamaForCausalLM

import minigpt
from minigpt import CheckpointError, Tokenizer
from minigpt.checkpoint import Files
from minigpt.checkpoint.pretrained import describe_checkpoint
from minigpt.judge.file_weights import weights_of

ERRORS = {"f32": 0, "f16": 4e-4, "bf16": 3e-3, "q8_0": 0.01, "q5_1": 0.05, "q4_0": 0.12}  # of a weight, by its size


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking(tmp_path_factory.mktemp("model"), n_layer=2, layer_norm_epsilon=1e-6)


@pytest.fixture(scope="module")
def file(place: Path) -> Path:
    return others.write_gguf(place, "f32", Tokenizer.from_pretrained(place))


@pytest.mark.parametrize("kind", ERRORS)
def test_a_gguf_file_is_the_model(kind: str, place: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(place)
    file = others.write_gguf(place, kind, tokenizer)
    expected = minigpt.from_pretrained(place, device="cpu")
    model, read = minigpt.Recipe(file, device="cpu").open()
    same = dict(n_inner=None, bos_token_id=None)  # which the file says otherwise, and not at all
    assert dataclasses.replace(model.config, **same) == dataclasses.replace(expected.config, **same)
    assert model.config.inner_size == expected.config.inner_size
    assert read is not None
    text = "the dog saw<|endoftext|> naïve 狗 12"
    assert read.encode(text) == tokenizer.encode(text)
    assert read.eos_token_id == tokenizer.eos_token_id
    weights = weights_of(file)
    for name, tensor in expected.state_dict().items():
        error = (model.state_dict()[name] - tensor).norm() / tensor.norm()
        assert error <= ERRORS[kind] * (weights.types.get(name) != "F32"), name
    assert set(weights.types.values()) == {"F32", kind.upper()}
    assert describe_checkpoint(Files.at(file))["format"] == f"GGUF, {file.name}"


def test_it_is_judged_converted_and_written_anew(file: Path, place: Path, tmp_path: Path) -> None:
    report = minigpt.parity(file, against=place, device="cpu", max_new_tokens=2)
    assert report.passed, report.reasons
    original = minigpt.Original(file, device="cpu", max_new_tokens=2)
    assert original.judge(place).passed
    original.save(tmp_path / "record.safetensors")
    assert minigpt.Original.load(tmp_path / "record.safetensors", device="cpu").judge().passed
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    model = minigpt.from_pretrained(copy)
    copy.write_bytes(others.write_gguf(place, "bf16").read_bytes())
    assert not torch.equal(minigpt.from_pretrained(copy).wte.weight, model.wte.weight)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    place = saved(reference(tie_word_embeddings=False), tmp_path / "untied")
    model = minigpt.from_pretrained(others.write_gguf(place, "f32"), device="cpu")
    assert torch.equal(model.lm_head.weight, minigpt.from_pretrained(place, device="cpu").lm_head.weight)


def written(file: Path, metadata: dict[str, Any], *left_out: str, like: Path) -> Path:
    """Write a file anew with other metadata, and without some tensors."""
    reader: Any = gguf.GGUFReader(like)
    writer: Any = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in metadata:
            continue
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1])
    for name, (value, kind) in metadata.items():
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        if tensor.name not in left_out:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return file


UINT32, STRING = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.STRING


@pytest.mark.parametrize(
    ("metadata", "left_out", "message"),
    [
        ({"gpt2.context_length": (47, UINT32)}, "", "its context_length is 47, and its tensors have 48"),
        ({"gpt2.feed_forward_length": (64, UINT32)}, "", r"of another shape: h\.0\.mlp\.c_fc\.bias is \(128,\)"),
        ({"gpt2.feed_forward_length": (2**31 - 1, UINT32)}, "", "and its config needs"),
        ({}, "blk.1.attn_norm.bias", r"missing h\.1\.ln_1\.bias"),
        ({}, "position_embd.weight", r"missing wpe\.weight"),
        ({"split.count": (3, UINT32)}, "", "is one of 3 files; join them"),
        ({"general.type": ("adapter", STRING)}, "", "holds no model, but the adapter of one"),
    ],
)
def test_a_file_that_lies(metadata: dict[str, Any], left_out: str, message: str, file: Path, tmp_path: Path) -> None:
    lying = written(tmp_path / "lying.gguf", metadata, left_out, like=file)
    with pytest.raises(CheckpointError, match=rf"lying\.gguf .*{message}") as raised:
        minigpt.from_pretrained(lying)
    assert "\n" not in str(raised.value)


def test_a_type_that_is_not_known(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    name = b"position_embd.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and two of them
    for kind, message in ((28, "position_embd.weight is of the type F64"), (99, r"99\)? is not a valid")):
        wrong = tmp_path / f"{kind}.gguf"
        wrong.write_bytes(content[:place] + struct.pack("<I", kind) + content[place + 4 :] + bytes(2**14))
        with pytest.raises(CheckpointError, match=rf"{kind}\.gguf cannot be read as a GGUF file: .*{message}"):
            minigpt.from_pretrained(wrong)


def test_damaged_files_are_one_sentence(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for size in range(0, len(whole), len(whole) // 40):
        cut = tmp_path / f"{size}.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"{size}\.gguf cannot be read as a GGUF file: ") as raised:
            minigpt.from_pretrained(cut)
        assert "\n" not in str(raised.value)


def write_llama(model: LlamaForCausalLM, file: Path, kind: str = "F32", **more: np.ndarray) -> Path:
    """Write a Llama of transformers as llama.cpp's converter does: queries and keys have the rows of a head in pairs.

    Args:
        more: tensors that no Llama of transformers has.
    """
    config: Any = model.config
    names, writer = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), writer_of(config, "llama", file)
    writer.add_rope_dimension_count(config.head_dim)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        path, _, role = name.rpartition(".")
        values = tensor.numpy()
        if path.rpartition(".")[2] in heads:
            halves = values.reshape(heads[path.rpartition(".")[2]], 2, config.head_dim // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stored = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(values), stored)
        writer.add_tensor(f"{names.get_name(path)}.{role}", data, raw_dtype=stored)
    for name, values in more.items():
        writer.add_tensor(f"{name}.weight", values)
    finish(writer)
    return file


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5)
    model = LlamaForCausalLM(config).eval()
    randomize(model)
    return model


def test_another_architecture_is_transformers_own(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    place = saved(llama, tmp_path / "llama")
    report = minigpt.parity(write_llama(llama, tmp_path / "llama.gguf"), against=place, device="cpu", max_new_tokens=2)
    assert report.passed, report.reasons
    file = write_llama(llama, tmp_path / "q8_0.gguf", "Q8_0")
    weights = weights_of(file, place)
    assert weights.strange == []
    assert weights.types["model.layers.1.self_attn.q_proj.weight"] == "Q8_0"
    for name, tensor in llama.state_dict().items():
        assert (weights.tensors[name] - tensor).norm() < 0.01 * tensor.norm(), name
    assert Files.at(file).architecture == "llama"


def test_what_transformers_leaves_out_or_fills_in_is_no_model(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    scaled = write_llama(llama, tmp_path / "scaled.gguf", rope_freqs=np.ones(8, np.float32))
    lacking = written(tmp_path / "lacking.gguf", {}, "blk.0.ffn_up.weight", like=scaled)
    wide = written(tmp_path / "wide.gguf", {"llama.feed_forward_length": (256, UINT32)}, like=scaled)
    yarn = written(tmp_path / "yarn.gguf", {"llama.rope.scaling.type": ("yarn", STRING)}, like=scaled)
    for file, message in (
        (yarn, r"transformers does not read its rope\.scaling\.type, yarn, without which it is another model"),
        (scaled, "LlamaForCausalLM has 86,336 values, and the file 86,344: some would be left out"),
        (lacking, r"it has no model\.layers\.0\.mlp\.up_proj\.weight"),
        (wide, "its tensors have other shapes than its metadata say"),
    ):
        with pytest.raises(CheckpointError, match=f"{file.name} cannot be read as a GGUF file: .*{message}"):
            minigpt.Original(file, device="cpu")
