"""A process that has replaced code of transformers or PyTorch has no truth, and says where."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import ARCHITECTURES, config_of, random_model
from torch import Tensor, nn
from transformers import masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import minigpt
from minigpt.judge.own_code import replaced_code

LLAMA = "transformers.models.llama.modeling_llama"
FEW: Any = dict(prompts=[[5, 17, 3, 80, 41, 9]], max_new_tokens=2, device="cpu")


class OtherNorm(nn.Module):
    """An RMSNorm with an eps of 1e-2, whatever it is told."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)


class OfAutograd(torch.autograd.Function):
    """A function of autograd."""


def in_another(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another, and has its names."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return call


def in_the_module(module: Any, source: str, name: str) -> Any:
    """A function that is made of source in a module of transformers, as some packages do."""
    names = dict(vars(module))
    exec(source, names)
    made = names[name]
    return type(made)(made.__code__, vars(module), name)


ROTARY = "def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):\n    return q, k\n"
# The object, what it gets another value of, the value, the architecture, and the place that is named.
REPLACED: dict[str, tuple[Any, str, Any, str, str]] = {
    "a class": (modeling_llama, "LlamaRMSNorm", OtherNorm, "llama", f"{LLAMA}.LlamaRMSNorm"),
    "a class by PyTorch's": (modeling_llama, "LlamaRMSNorm", nn.RMSNorm, "llama", f"{LLAMA}.LlamaRMSNorm"),
    "a class by another's": (
        modeling_llama, "LlamaRMSNorm", modeling_mistral.MistralRMSNorm, "llama", f"{LLAMA}.LlamaRMSNorm"
    ),
    "a forward": (
        modeling_llama.LlamaRMSNorm, "forward", OtherNorm.forward, "llama", f"{LLAMA}.LlamaRMSNorm.forward"
    ),
    "a compiled forward": (
        modeling_llama.LlamaRMSNorm, "forward", torch.compile(OtherNorm.forward), "llama",
        f"{LLAMA}.LlamaRMSNorm.forward",
    ),
    "a call": (modeling_llama.LlamaMLP, "__call__", OtherNorm.forward, "llama", f"{LLAMA}.LlamaMLP.__call__"),
    "an __init__": (
        modeling_llama.LlamaRMSNorm, "__init__", in_another(modeling_llama.LlamaRMSNorm.__init__), "llama",
        f"{LLAMA}.LlamaRMSNorm.__init__",
    ),
    "a function": (
        modeling_llama, "apply_rotary_pos_emb", in_another(modeling_llama.apply_rotary_pos_emb), "llama",
        f"{LLAMA}.apply_rotary_pos_emb",
    ),
    "a function from source": (
        modeling_llama, "apply_rotary_pos_emb", in_the_module(modeling_llama, ROTARY, "apply_rotary_pos_emb"), "llama",
        f"{LLAMA}.apply_rotary_pos_emb",
    ),
    "a function of autograd": (modeling_llama, "rotate_half", OfAutograd.apply, "llama", f"{LLAMA}.rotate_half"),
    "a partial": (
        modeling_llama, "rotate_half", functools.partial(OtherNorm.forward, None), "llama", f"{LLAMA}.rotate_half"
    ),
    "what is imported": (
        modeling_llama, "create_causal_mask", in_another(masking_utils.create_causal_mask), "llama",
        f"{LLAMA}.create_causal_mask",
    ),
    "what that calls": (
        sdpa_attention, "repeat_kv", in_another(sdpa_attention.repeat_kv), "llama",
        "transformers.integrations.sdpa_attention.repeat_kv",
    ),
    "attention": (
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", in_another(sdpa_attention.sdpa_attention_forward), "llama",
        f"{LLAMA}.ALL_ATTENTION_FUNCTIONS['sdpa']",
    ),
    "an activation": (ACT2FN, "silu", (OtherNorm, {"hidden_size": 8}), "llama", f"{LLAMA}.ACT2FN['silu']"),
    "PyTorch's forward": (
        nn.LayerNorm, "forward", in_another(nn.LayerNorm.forward), "gpt2",
        "torch.nn.modules.normalization.LayerNorm.forward",
    ),
    "PyTorch's forward by another": (
        nn.LayerNorm, "forward", nn.RMSNorm.forward, "gpt2", "torch.nn.modules.normalization.LayerNorm.forward"
    ),
    "PyTorch's class": (nn, "LayerNorm", OtherNorm, "gpt2", "torch.nn.LayerNorm"),
    "PyTorch's function": (
        F, "layer_norm", in_another(F.layer_norm), "gpt2", "torch.nn.functional.layer_norm"
    ),
    "PyTorch's attention": (
        F, "scaled_dot_product_attention", in_another(F.scaled_dot_product_attention), "gpt2",
        "torch.nn.functional.scaled_dot_product_attention",
    ),
    "what that calls in C": (torch, "layer_norm", in_another(torch.layer_norm), "gpt2", "torch.layer_norm"),
    "an operation": (torch, "rsqrt", in_another(torch.rsqrt), "llama", "torch.rsqrt"),
    "a method of tensors": (Tensor, "pow", in_another(Tensor.pow), "llama", "torch._tensor.Tensor.pow"),
    "every call": (
        nn.Module, "__call__", in_another(nn.Module.__call__), "llama", "torch.nn.modules.module.Module.__call__"
    ),
}  # fmt: skip


def empty(name: str) -> Any:
    """An architecture's model without values."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(name))


@pytest.mark.parametrize("way", REPLACED)
def test_what_is_replaced_is_named(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name, value, architecture, place = REPLACED[way]
    replace: Any = monkeypatch.setitem if isinstance(holder, dict) else monkeypatch.setattr
    assert replaced_code(empty(architecture)) == []
    replace(holder, name, value)
    model = empty(architecture)
    found = replaced_code(model)
    monkeypatch.undo()
    assert found == [place]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_model_of_transformers_is_refused(name: str) -> None:
    import peft  # noqa: F401  (what other packages change on import is no model's code)

    import minigpt.hf  # noqa: F401

    assert replaced_code(empty(name)) == []


def test_a_judgement_is_refused_until_there_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate may have the other norm, and is judged as what it is."""
    place, record = tmp_path / "model", tmp_path / "record.safetensors"
    model = random_model("llama")
    model.save_pretrained(place)
    minigpt.Original(place, **FEW).save(record)
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", OtherNorm)
    monkeypatch.setattr(F, "rms_norm", in_another(F.layer_norm))
    with pytest.raises(minigpt.MiniGPTError, match=f"this process has replaced {LLAMA}.LlamaRMSNorm, so .* a record"):
        minigpt.parity(model, against=place, prompts=FEW["prompts"])
    truth = minigpt.Original.load(record)
    assert truth.judge(model).outcome == "PASS"
    other = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    report = truth.judge(other, diagnose=True)
    assert report.outcome == "FAIL"
    assert report.first_off.place == "model.layers.0.input_layernorm"
    assert "is another model" in " ".join(report.notes)


def test_an_architecture_that_another_package_registers_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnConfig(transformers.LlamaConfig):
        model_type = "own-llama"

    class OwnModel(transformers.LlamaForCausalLM):
        config_class = OwnConfig

        def __init__(self, config: OwnConfig) -> None:
            super().__init__(config)
            self.model.norm = OtherNorm(config.hidden_size)

    for registry in (
        transformers.models.auto.configuration_auto.CONFIG_MAPPING,
        transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        monkeypatch.setattr(registry, "_extra_content", dict(registry._extra_content))
    transformers.AutoConfig.register("own-llama", OwnConfig)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnModel)
    model = OwnModel(OwnConfig(**config_of("llama").to_dict() | {"model_type": "own-llama"})).eval()
    model.save_pretrained(tmp_path)
    assert minigpt.parity(model, against=tmp_path, prompts=FEW["prompts"]).outcome == "PASS"
