"""The weights in other programs' files: dequantized, matched to the original's by what they hold, and faults named."""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from bench import others
from checkpoints import edit_config, reference, saved
from engines import onnx_gpt2
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import CheckpointError, ConfigError, engines
from minigpt.checkpoint.contents import Files
from minigpt.engines.weights import Constant, constants_of
from minigpt.files import write_json
from minigpt.judge.file_weights import partners_of, strange_numbers, weights_of

onnx = pytest.importorskip("onnx", reason="it writes the files and comes with minigpt[dev]")
quantization = pytest.importorskip("onnxruntime.quantization", reason="it comes with minigpt[dev]")


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return reference(std=0.3, vocab_size=96)


@pytest.fixture(scope="module")
def place(model: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("original"))


def by_tensor(file: Path, new: Path) -> None:
    quantization.quantize_dynamic(file, new)


def by_channel(file: Path, new: Path) -> None:
    quantization.quantize_dynamic(file, new, per_channel=True)


def in_blocks(bits: int, is_symmetric: bool) -> Callable[[Path, Path], None]:
    def quantize(file: Path, new: Path) -> None:
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

        how = DefaultWeightOnlyQuantConfig(
            block_size=16, is_symmetric=is_symmetric, bits=bits, op_types_to_quantize=("MatMul", "Gather"),
            quant_axes=(("MatMul", 0), ("Gather", 1)),
        )  # fmt: skip
        quantizer = MatMulNBitsQuantizer(onnx.load(file), algo_config=how)
        quantizer.process()
        quantizer.model.save_model_to_file(str(new), False)

    return quantize


QUANTIZERS: dict[str, tuple[Callable[[Path, Path], None], float]] = {  # and how far a tensor is from the original's
    "int8, one scale": (by_tensor, 0.03),
    "int8, a scale for each row": (by_channel, 0.02),
    "int4, a scale for 16": (in_blocks(4, True), 0.2),
    "int4 with zeros": (in_blocks(4, False), 0.2),
    "int8, a scale for 16": (in_blocks(8, False), 0.02),
}


@pytest.fixture(scope="module")
def floating(model: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_gpt2.write(model, tmp_path_factory.mktemp("onnx") / "gpt2.onnx", positions=True)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_weights_of_onnx_files(kind: str, floating: Path, place: Path, tmp_path: Path) -> None:
    quantize, most = QUANTIZERS[kind]
    quantize(floating, tmp_path / "quantized.onnx")
    weights = weights_of(tmp_path / "quantized.onnx", place)
    assert weights.strange == []
    for name, tensor in minigpt.from_pretrained(place, device="cpu").state_dict().items():
        assert (weights.tensors[name] - tensor).norm() <= most * tensor.norm(), name
    assert kind.startswith("int4 with") or any(stored.startswith(kind) for stored in weights.types.values())
    if "for" in kind and "16" in kind:  # onnxruntime computes these products in float32
        report = minigpt.Original(weights.place, device="cpu", max_new_tokens=2).judge(
            engines.onnx(tmp_path / "quantized.onnx")
        )
        print(f"{kind}: {report.logits.ratio:.2f} times the noise floor of the file's own weights")
        assert report.passed, report.reasons


def test_names_do_not_matter_and_one_without_a_partner_is_named(floating: Path, place: Path, tmp_path: Path) -> None:
    weights = weights_of(floating, place)
    assert weights.strange == []
    assert {*weights.types.values()} == {"float32"}
    changed = onnx.load(floating)
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in changed.graph.initializer}
    expected = minigpt.from_pretrained(place, device="cpu").h[1].mlp.c_fc.weight.detach().numpy()
    (name,) = (name for name, values in stored.items() if np.array_equal(values, expected))
    for tensor in changed.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(onnx.numpy_helper.from_array(expected[::-1].copy(), name))
    onnx.save(changed, tmp_path / "changed.onnx")
    (sentence,) = weights_of(tmp_path / "changed.onnx", place).strange
    assert sentence.startswith("h.1.mlp.c_fc.weight of the file is not the original's: 1.4 of its size away")


def test_rows_of_a_longer_tensor_and_a_head_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)

    def constant(values: torch.Tensor, is_table: bool = False) -> Constant:
        return Constant("any", "float32", values.numpy(), is_table)

    expected = {name: torch.randn(8, 6, generator=generator) for name in ("q", "k", "v")}
    expected |= {f"{name}.bias": torch.randn(8, generator=generator) for name in ("q", "k", "v")}
    expected["embedding"] = torch.randn(20, 6, generator=generator)
    fused = torch.cat([expected[name] for name in ("q", "k", "v")])
    biases = torch.cat([expected[f"{name}.bias"] for name in ("q", "k", "v")])
    head = expected["embedding"] + 0.01
    constants = [constant(fused.mT), constant(biases), constant(head), constant(expected["embedding"], is_table=True)]
    partners = partners_of(constants, expected, vocab_size=20)
    for name, tensor in expected.items():
        assert torch.equal(partners[name][0], tensor), name
    assert torch.equal(partners["lm_head.weight"][0], head)
    assert "lm_head.weight" not in partners_of(constants[:3], expected, vocab_size=20)


def test_tensors_of_the_same_values_share_what_a_file_keeps_once() -> None:
    expected = {name: torch.ones(40) for name in ("one", "other")} | {"third": torch.arange(40.0)}
    constants = [Constant("kept", "f32", np.ones(40, np.float32), False), Constant("far", "f32", np.eye(40)[0], False)]
    partners = partners_of(constants, expected)
    assert torch.equal(partners["one"][0], partners["other"][0])
    assert partners["third"][0].sum() == 1, "what is left of its shape, though it is far away"


def damaged(file: Path, new: Path, name: str, change: Callable[[np.ndarray], None]) -> Path:
    """Write a GGUF file whose tensor of a name has other bytes."""
    new.write_bytes(file.read_bytes())
    reader: Any = gguf.GGUFReader(new, "r+")
    (data,) = (tensor.data for tensor in reader.tensors if tensor.name == name)
    change(data)
    reader.data.flush()
    return new


def double_a_scale(data: np.ndarray) -> None:
    data[3, :2].view(np.float16)[:] *= 2


def shift_rows(data: np.ndarray) -> None:
    data[:] = np.roll(data, 18, axis=1)  # the bytes of a block


def change_a_value(data: np.ndarray) -> None:
    data[5] += 0.1


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("blk.1.ffn_up.weight", double_a_scale, r"1 of 128 blocks in h\.1\.mlp\.c_fc\.weight of .*: up to (0\.9|1)"),
        ("blk.1.ffn_down.weight", shift_rows, r"h\.1\.mlp\.c_proj\.weight of the file is not the original's: 1\.4 of"),
        ("blk.0.attn_norm.weight", change_a_value, r"1 of 1 blocks in h\.0\.ln_1\.weight of the file are not"),
    ],
)
def test_a_damaged_gguf_file_is_named(
    name: str, change: Callable[[np.ndarray], None], sentence: str, place: Path, tmp_path: Path
) -> None:
    file = others.write_gguf(place, "q4_0")
    assert weights_of(file, place).strange == []
    assert weights_of(file).strange == []
    (said,) = weights_of(damaged(file, tmp_path / "damaged.gguf", name, change), place).strange
    assert re.match(sentence, said), said


def test_a_number_of_the_config_is_named(place: Path, model: GPT2LMHeadModel, tmp_path: Path) -> None:
    other = edit_config(saved(model, tmp_path / "other"), layer_norm_epsilon=1e-6)
    (said,) = weights_of(others.write_gguf(other, "f32"), place).strange
    assert said == "layer_norm_epsilon of the file is 1e-06, and the original's 1e-05"


@pytest.mark.parametrize("nested", ["rope_parameters", "rope_scaling"])
def test_a_number_of_the_rotary_positions_is_named(nested: str, tmp_path: Path) -> None:
    """Configs of before have the base of the angles beside the scaling, and those of now in it."""
    configs = {
        "file": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "original": {"rope_theta": 1e6, nested: {"rope_type": "linear", "factor": 4.0}},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", {"model_type": "llama"} | config)
    assert strange_numbers(Files.at(tmp_path / "file"), Files.at(tmp_path / "original")) == [
        "factor of the file is 2.0, and the original's 4.0",
        "rope_theta of the file is 10000.0, and the original's 1000000.0",
    ]


def test_damaged_files_are_one_sentence(floating: Path, place: Path, tmp_path: Path) -> None:
    whole = floating.read_bytes()
    for size in range(0, len(whole) - 100, len(whole) // 10):
        (tmp_path / "cut.onnx").write_bytes(whole[:size])
        try:
            said = weights_of(tmp_path / "cut.onnx", place).strange
        except CheckpointError as error:
            said = [str(error)]
        assert said
        assert "\n" not in said[0]
    with pytest.raises(ConfigError, match=r"^original must name the checkpoint of which .*gpt2\.onnx was made"):
        weights_of(floating)


def ctranslate2_file(folder: Path, version: int, *tensors: tuple[str, np.ndarray], cut: int = 0) -> Path:
    """Write a model.bin as CTranslate2's converters do."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    kinds = {np.dtype(name): number for number, name in enumerate(("float32", "int8", "int16", "int32", "float16"))}
    data = struct.pack("<I", version) + text("TransformerDecoderSpec") + struct.pack("<II", 8, len(tensors))
    for name, values in tensors:
        sizes = struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        data += text(name) + sizes + struct.pack("<BI", kinds[values.dtype], values.nbytes) + values.tobytes()
    folder.mkdir()
    (folder / "model.bin").write_bytes((data + struct.pack("<I", 0))[: -cut or None])
    return folder


def test_weights_of_ctranslate2(tmp_path: Path) -> None:
    weight = np.array([[1, -127], [64, 127]], np.int8)
    scale = ("a/weight_scale", np.array([2, 4], np.float32))
    halves = np.ones(3, np.float16)
    folder = ctranslate2_file(tmp_path / "good", 6, ("a/weight", weight), scale, ("b", halves))
    found = {constant.name: constant for constant in constants_of(folder)}
    assert found["a/weight"].values.tolist() == [[0.5, -63.5], [16, 31.75]]
    assert found["a/weight"].kind == "int8, a scale for each row"
    assert found["b"].kind == "float16"
    for broken, said in (
        (ctranslate2_file(tmp_path / "new", 99), "has the version 99"),
        (ctranslate2_file(tmp_path / "cut", 6, ("a", halves), cut=6), "ends before a tensor"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(CheckpointError, match=f"the weights of {broken} cannot be read: .*{said}"):
            constants_of(broken)


def initializer(name: str, values: np.ndarray) -> Any:
    return onnx.numpy_helper.from_array(values, name)


HOSTILE: dict[str, tuple[list[Any], str]] = {  # nodes, and what is said
    "a scale of another shape": (
        [("QLinearMatMul", ["x", "one", "one", "a", "s", "one", "one", "one"], ["z"])],
        "non-broadcastable|could not be broadcast|broadcast",
    ),
    "a circle": ([("MatMulInteger", ["x", "a"], ["z"]), ("Cast", ["z"], ["z"])], "a weight of int8 has no scale"),
    "of three bits": ([("MatMulNBits", ["x", "a", "s"], ["z"])], "MatMulNBits of 3 bits in this form is not known"),
    "more than it holds": ([("Reshape", ["one", "shape"], ["y"])], "cannot reshape"),
    "nothing": ([("Add", ["x", "x"], ["y"])], "has none of the tensors of"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_onnx_files_are_one_sentence(case: str, place: Path, tmp_path: Path) -> None:
    nodes, message = HOSTILE[case]
    values = {
        "one": np.ones((1, 1), np.float32),
        "a": np.ones((2**17, 1), np.int8),
        "s": np.ones((1, 2**17), np.float32),
        "shape": np.array([2**20, 2**20]),
    }
    made = []
    for kind, inputs, outputs in nodes:
        how = {"bits": 3, "block_size": 32} if kind == "MatMulNBits" else {}
        made.append(onnx.helper.make_node(kind, inputs, outputs, **how))
    graph = onnx.helper.make_graph(made, "g", [], [], [initializer(*pair) for pair in values.items()])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "hostile.onnx")
    with pytest.raises(CheckpointError, match=message) as raised:
        weights_of(tmp_path / "hostile.onnx", place)
    assert "\n" not in str(raised.value)


def test_weights_outside_of_the_folder_are_not_read(place: Path, tmp_path: Path) -> None:
    outside = initializer("w", np.ones(4, np.float32))
    (tmp_path / "secret").write_bytes(outside.raw_data)
    outside.ClearField("raw_data")
    outside.data_location = onnx.TensorProto.EXTERNAL
    entry = outside.external_data.add()
    entry.key, entry.value = "location", "../secret"
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", [], [], [outside])
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/g.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with pytest.raises(CheckpointError, match=r"the weights of .*g\.onnx cannot be read: .*outside"):
        weights_of(tmp_path / "inside/g.onnx", place)
