"""The mistake in a file of another architecture, or in a model of transformers that was edited by hand, is named.

llama.cpp needs its extra: ``pip install -e '.[gguf]'``.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import ported
import pytest
import torch
from gguf_files import finish, writer_of
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import minigpt
from minigpt import engines

pytestmark = pytest.mark.thorough
THETA = "rope theta 10,000 in place of 1,000,000"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    ported.random_family("qwen2", folder, hidden_size=64, intermediate_size=64)  # llama.cpp has rows of 32 numbers
    return folder


@pytest.fixture(scope="module")
def port_original(place: Path) -> minigpt.Original:
    return minigpt.Original(place, prompts=ported.PROMPTS, max_new_tokens=4, device="cpu")


def named(port_original: minigpt.Original, candidate: Any) -> list[str]:
    report = port_original.judge(candidate, diagnose=True)
    return [found.mistake for found in report.diagnosis or []]


def with_other_config(place: Path, **fields: Any) -> Any:
    config = AutoConfig.from_pretrained(place)
    for name, value in fields.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(place, config=config, dtype=torch.float32).eval()


def test_a_model_that_was_edited_by_hand(port_original: minigpt.Original, place: Path) -> None:
    model = with_other_config(place)
    assert port_original.judge(model).passed
    model.model.rotary_emb.inv_freq = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    assert named(port_original, model) == [THETA]
    model = with_other_config(place)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = layer.self_attn.k_proj.bias = layer.self_attn.v_proj.bias = None
    assert named(port_original, model) == ["no biases of q, k and v"]


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).logits


def test_modules_of_torch_export(port_original: minigpt.Original, place: Path) -> None:
    wrong = with_other_config(place, hidden_act="gelu")
    tokens = torch.export.Dim("tokens", min=2, max=64)
    ids = torch.tensor([[5, 17, 42, 8]])
    program = torch.export.export(Logits(wrong), (ids,), dynamic_shapes=({1: tokens},), strict=False)
    assert named(port_original, program.module()) == ["the exact GELU in place of SiLU"]


def test_an_onnx_file_with_a_changed_config(port_original: minigpt.Original, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch's exporter needs it")
    pytest.importorskip("onnxruntime", reason="an extra of its own brings it")
    wrong = with_other_config(place, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    file = tmp_path / "qwen2.onnx"
    tokens = torch.export.Dim("seq", min=2, max=64)
    ids = torch.tensor([[5, 17, 42, 8]])
    torch.onnx.export(
        Logits(wrong).eval(), (ids,), file, input_names=["input_ids"], output_names=["logits"], dynamo=True,
        dynamic_shapes=({1: tokens},), verbose=False,
    )  # fmt: skip
    assert named(port_original, engines.onnx(file)) == [THETA]


def write_gguf(place: Path, file: Path, theta: float) -> None:
    """Write a Qwen2 as llama.cpp reads it, with a rotary base."""
    config = AutoConfig.from_pretrained(place)
    writer = writer_of(config, "qwen2", file)
    writer.add_rope_freq_base(theta)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in AutoModelForCausalLM.from_pretrained(place).state_dict().items():
        part, _, field = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(part)}.{field}", tensor.float().numpy().astype(np.float32))
    finish(writer)


def test_a_gguf_file_with_a_wrong_base(port_original: minigpt.Original, place: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="an extra of its own brings it")
    settings = {"type_k": "f32", "type_v": "f32", "n_threads": 1}
    write_gguf(place, tmp_path / "right.gguf", 1e6)
    write_gguf(place, tmp_path / "wrong.gguf", 1e4)
    assert port_original.judge(engines.gguf(tmp_path / "right.gguf", **settings)).passed
    assert named(port_original, engines.gguf(tmp_path / "wrong.gguf", **settings)) == [THETA]
