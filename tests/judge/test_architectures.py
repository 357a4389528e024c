"""The judge of other architectures: the sites are the modules of transformers' model, and faults are named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from architectures import ARCHITECTURES, HEADS, random_model
from checkpoints import edit_config, reference, saved
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

import minigpt
from minigpt.checkpoint.transformers_model import require_floating
from minigpt.host import host_of
from minigpt.shape import MOST_WINDOW

FEW = ["qwen3", "pythia"]
EVERY = [
    pytest.param(name, marks=() if name in FEW else pytest.mark.thorough)
    for name in ARCHITECTURES
    if name not in ("gpt2", "mamba")
]
PROMPTS = [[5, 17, 3, 80, 41, 9], [60, 2, 2, 33]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of an architecture's name that returns the folder of its model."""
    root = tmp_path_factory.mktemp("architectures")

    def save(name: str) -> Path:
        if not (root / name).exists():
            random_model(name).save_pretrained(root / name)
        return root / name

    return save


class WrongEps(nn.Module):
    """An RMSNorm with an eps of its own."""

    exact = "rms_norm"

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 4.0)


class OtherEps(nn.LayerNorm):
    """A LayerNorm with an eps of its own."""

    exact = True

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, 4.0)


class WithoutOne(WrongEps):
    """Gemma's norm without the 1 of 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight - 1, 1e-6)


class RoundsTheRow(WrongEps):
    """Llama's norm: the row is rounded before the weight multiplies it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype)


class FewBits(WrongEps):
    """It computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def judged(original: minigpt.Original, **options: Any) -> minigpt.ParityReport:
    return original.judge(device="cpu", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EVERY)
def test_the_sites_own_function_passes_and_another_is_named(name: str, dtype: str, folder_of: Any) -> None:
    right, site = ARCHITECTURES[name].norm, ARCHITECTURES[name].site
    original = minigpt.Original(folder_of(name), dtype=dtype, device="cpu", prompts=PROMPTS, max_new_tokens=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(name))
    norms = [path for path, module in model.named_modules() if "norm" in type(module).__name__.lower()]
    assert {*original.truth.facts.sites} == {*norms}
    report = judged(original, norm=right)
    assert report.outcome == "PASS", report.reasons
    assert report.logits.ratio < 1.5
    assert report.missing == []
    other = judged(original, norm="fused" if right == "rms" else "rms", sites=site)
    assert (other.outcome, other.difference) == (
        "DIFFERENT", "fused is not an RMSNorm" if right == "rms" else "rms is not a LayerNorm",
    )  # fmt: skip
    assert other.first_off is not None
    assert other.first_off.place == site
    wrong = judged(original, norm=WrongEps if right == "rms" else OtherEps, sites=site)
    assert (wrong.outcome, wrong.first_off and wrong.first_off.place) == ("FAIL", site)
    held = original.judge(model.to(original.truth.facts.dtype))
    assert (held.outcome, held.missing) == ("PASS", [])
    assert held.decoding is not None


@pytest.mark.parametrize("name", ["gemma", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_gemmas_weight_is_moved_by_one_and_a_norm_that_lacks_the_one_fails(name: str, folder_of: Any) -> None:
    original = minigpt.Original(folder_of(name), device="cpu", prompts=PROMPTS, max_new_tokens=2)
    report = judged(original, norm="rms")
    assert report.passed
    assert report.notes == ["the sites multiply by 1 + weight; the new norms are given that sum"]
    site = ARCHITECTURES[name].site
    wrong = judged(original, norm=WithoutOne, sites=site)
    assert (wrong.outcome, wrong.first_off and wrong.first_off.place) == ("FAIL", site)


@pytest.mark.parametrize(
    ("name", "other", "same", "words"),
    [
        ("gemma", RoundsTheRow, "rms", "rounded before the weight multiplies it, and after; in the original"),
        ("llama", "rms", RoundsTheRow, "rounded once, after the weight has multiplied it; in the original"),
        ("llama", FewBits, RoundsTheRow, "rounded otherwise; in the original it is rounded before"),
    ],
    ids=["gemma", "llama", "few bits"],
)  # fmt: skip
def test_the_site_that_rounds_elsewhere_is_named(name: str, other: Any, same: Any, words: str, folder_of: Any) -> None:
    """In half precision one rounding more is within twice transformers' own error, so it passes with a note."""
    original = minigpt.Original(folder_of(name), dtype="bfloat16", device="cpu", prompts=PROMPTS, max_new_tokens=0)
    site = ARCHITECTURES[name].site
    report = judged(original, norm=other, sites=site)
    assert report.outcome == "PASS"
    assert report.notes[0].startswith(f"at {site} a row is {words}")
    assert not any("a row is" in note for note in judged(original, norm=same, sites=site).notes)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("opt", marks=pytest.mark.thorough)])
def test_a_wrong_norm_is_the_only_place_that_adds_an_error(name: str, folder_of: Any) -> None:
    """A norm of heads (1, T, H, D), and one whose rows have no batch (T, C)."""
    original = minigpt.Original(folder_of(name), device="cpu", prompts=PROMPTS[:1], max_new_tokens=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(name))
    site = ARCHITECTURES[name].site
    model.get_parameter(f"{site}.weight").data *= 1.1
    report = original.judge(model)
    assert report.first_off is not None
    assert (report.first_off.place, report.new_errors) == (site, [site])


@pytest.mark.thorough
def test_a_model_of_several_streams_is_judged_where_a_norm_is_wrong(tmp_path: Path) -> None:
    """A block of Gemma 3n returns (4, 1, T, C), of which one stream is compared."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=96, vocab_size_per_layer_input=96, hidden_size=32, intermediate_size=48, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_kv_shared_layers=0,
        hidden_size_per_layer_input=8, laurel_rank=4, activation_sparsity_pattern=[0.0, 0.0],
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    original = minigpt.Original(tmp_path, device="cpu", prompts=PROMPTS, max_new_tokens=0)
    model.get_parameter("model.norm.weight").data *= 1.1
    report = original.judge(model)
    assert report.outcome == "FAIL"
    assert report.new_errors == ["model.norm"]


def test_the_kl_divergence_is_that_of_transformers_alone(folder_of: Any) -> None:
    place = folder_of("pythia")
    original = minigpt.Original(place, device="cpu", prompts=PROMPTS, max_new_tokens=0)
    report = judged(original, norm="rms")
    exact = transformers.AutoModelForCausalLM.from_pretrained(place).double().eval()
    swapped = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    minigpt.swap_norms(swapped, "rms")
    total = tokens = 0.0
    with torch.no_grad():
        for prompt in PROMPTS:
            p = exact(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
            q = swapped(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
            total, tokens = total + float((p.exp() * (p - q)).sum()), tokens + len(prompt)
    assert report.distribution.kl_mean == pytest.approx(total / tokens, abs=1e-9)
    assert report.distribution.kl_mean > 1e-4


def test_a_record_is_judged_by_outputs_that_transformers_wrote(folder_of: Any, tmp_path: Path) -> None:
    place, record, outputs = folder_of("qwen3"), tmp_path / "record.safetensors", tmp_path / "outputs.safetensors"
    minigpt.Original(place, device="cpu", prompts=PROMPTS, max_new_tokens=2, gradients=True).save(record)
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    with safe_open(record, "pt") as stored, torch.no_grad():
        ids = {name: stored.get_tensor(name) for name in stored.keys() if name.startswith("ids.")}  # noqa: SIM118
        logits = {f"logits.{name[4:]}": model(x[None]).logits[0] for name, x in ids.items()}
    save_file(logits, outputs)
    original = minigpt.Original.load(record)
    assert original.judge_outputs(outputs).passed
    save_file(logits | {"logits.1": logits["logits.1"] + 1e-3}, outputs)
    assert not original.judge_outputs(outputs).passed
    assert original.judge(norm="rms", gradients=True).passed


def test_a_model_that_the_caller_holds(folder_of: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of("pythia")).eval()
    options: dict[str, Any] = dict(against=folder_of("pythia"), prompts=PROMPTS, max_new_tokens=2)
    calls = []
    model.gpt_neox.final_layer_norm.register_forward_hook(lambda *_: calls.append(1))
    report = minigpt.parity(model, gradients=True, **options)
    assert report.passed
    assert report.gradients is not None
    assert max(row.ratio for row in report.gradients) < 2
    assert calls
    model.gpt_neox.layers[1].input_layernorm.eps = 0.5
    report = minigpt.parity(model, **options)
    assert report.first_off is not None
    assert report.first_off.place == "gpt_neox.layers.1.input_layernorm"
    assert report.decoding is not None
    assert report.decoding.ratio > 4


@pytest.mark.parametrize("name", ["mamba", "openai-gpt"])
def test_recurrent_models_and_those_without_a_cache_are_read_token_by_token(name: str, folder_of: Any) -> None:
    original = minigpt.Original(folder_of(name), device="cpu", prompts=PROMPTS, max_new_tokens=4)
    assert original.truth.floor.decoded.rms < 1e-5 * original.truth.floor.decoded.scale
    report = judged(original, norm=ARCHITECTURES[name].norm)
    assert (report.outcome, report.missing, report.greedy.tokens_compared) == ("PASS", [], 8)
    assert len(report.blocks) == 2, "a block may return a tuple, or a list"


@pytest.mark.thorough
def test_adapters_of_peft_and_hooks_of_accelerate_change_no_site(folder_of: Any) -> None:
    hooks, peft = pytest.importorskip("accelerate.hooks"), pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of("pythia")).eval()
    sites = minigpt.norm_sites(model)
    for path in sites:
        hooks.add_hook_to_module(model.get_submodule(path), hooks.AlignDevicesHook(execution_device="cpu"))
    assert minigpt.norm_sites(model) == sites
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query_key_value"], r=2)).eval()
    assert minigpt.norm_sites(adapted) == {f"base_model.model.{path}": site for path, site in sites.items()}
    report = minigpt.parity(adapted, against=folder_of("pythia"), prompts=PROMPTS, max_new_tokens=2)
    assert (report.outcome, report.missing) == ("PASS", [])


def compiled_whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_by_blocks(model: Any) -> Any:
    for i, block in enumerate(model.gpt_neox.layers):
        model.gpt_neox.layers[i] = torch.compile(block, backend="eager")
    return model


def compiled_in_place(model: Any) -> Any:
    for block in model.gpt_neox.layers:
        block.compile(backend="eager")
    return model


def compiled_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_by_blocks, compiled_in_place, compiled_forward])
def test_a_compiled_model_that_has_run_is_judged_and_swapped_by_the_paths_that_it_had(
    compiled: Any, folder_of: Any
) -> None:
    model = compiled(transformers.AutoModelForCausalLM.from_pretrained(folder_of("pythia")).eval())
    model(torch.tensor(PROMPTS[:1]))
    options: dict[str, Any] = dict(against=folder_of("pythia"), prompts=PROMPTS, max_new_tokens=2)
    assert {**minigpt.norm_sites(model)} == minigpt.norm_sites(random_model("pythia"))
    report = minigpt.parity(model, gradients=True, **options)
    assert (report.outcome, report.missing) == ("PASS", [])
    assert report.notes == [
        "The logits of whole texts are the compiled model's; the rest is computed without torch.compile."
    ]
    minigpt.swap_norms(model, "rms", "gpt_neox.layers.1.input_layernorm")
    report = minigpt.parity(model, **options)
    assert report.logits.ratio > 100
    assert report.first_off is not None
    assert report.first_off.place == "gpt_neox.layers.1.input_layernorm"


def test_one_norm_at_two_sites_is_named_where_it_is_wrong(folder_of: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of("pythia")).eval()
    layers = model.gpt_neox.layers
    layers[1].input_layernorm = layers[0].input_layernorm
    report = minigpt.parity(model, against=folder_of("pythia"), prompts=PROMPTS, max_new_tokens=0)
    assert report.first_off is not None
    assert report.first_off.place == "gpt_neox.layers.1.input_layernorm"
    errors = {site.site: site.propagated_error for site in report.norm_sites}
    assert errors["gpt_neox.layers.0.input_layernorm"] < 1e-6


def test_a_prompt_may_be_as_long_as_the_models_context_and_its_logits_must_fit(folder_of: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(device="cpu", max_new_tokens=0)
    random_model("pythia", max_position_embeddings=MOST_WINDOW + 2).save_pretrained(tmp_path)
    original = minigpt.Original(tmp_path, prompts=[[3] * (MOST_WINDOW + 2)], **options)
    shape = original.truth.facts.shape
    assert (shape.n_positions, shape.window) == (MOST_WINDOW + 2, MOST_WINDOW)
    with pytest.raises(minigpt.GenerationError, match="prompt 0: 41 tokens do not fit"):
        minigpt.Original(folder_of("pythia"), prompts=[[3] * 41], **options)
    random_model("pythia", vocab_size=2**20, max_position_embeddings=600, hidden_size=8).save_pretrained(tmp_path)
    with pytest.raises(minigpt.GenerationError, match=r"prompt 0 has 513 tokens, and with 1,048,576 .* at most 512; "):
        minigpt.Original(tmp_path, prompts=[[3] * 513], **options)


def test_removal_and_bisection_swap_site_after_site(folder_of: Any) -> None:
    options: dict[str, Any] = dict(norm="rms", prompts=PROMPTS, max_new_tokens=0, device="cpu")
    report = minigpt.parity(folder_of("pythia"), remove=True, budget="kl=10", **options)
    assert report.removal is not None
    assert {step.site for step in report.removal.steps} == {*minigpt.norm_sites(random_model("pythia"))}
    site = "model.layers.1.self_attn.q_norm"
    norms = {"*": "rms", site: WrongEps}
    report = minigpt.parity(folder_of("qwen3"), bisect=True, **options | {"norm": norms})
    assert report.bisect is not None
    assert report.bisect.sites == [site]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantize": "int8"}, "quantize is for a GPT-2, and .* is a qwen3"),
        ({"center": True, "norm": "rms"}, "center is for a GPT-2, and .* is a qwen3"),
        ({"norm": "rms", "sites": "ln_f"}, r"no norm site matches 'ln_f'; the sites are model\.layers\.0"),
    ],
)
def test_what_is_for_gpt2_alone_is_refused_in_one_sentence(options: dict[str, Any], words: str, folder_of: Any) -> None:
    with pytest.raises(minigpt.MiniGPTError, match=words):
        minigpt.parity(folder_of("qwen3"), prompts=PROMPTS, max_new_tokens=0, device="cpu", **options)
    with pytest.raises(minigpt.MiniGPTError, match="is a qwen3, and this needs a GPT-2"):
        minigpt.from_pretrained(folder_of("qwen3"))


def test_a_folder_runs_no_code_and_lacks_no_weight(folder_of: Any, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(folder_of("qwen3"), place)
    config = json.loads((place / "config.json").read_text())
    remote = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (place / "config.json").write_text(json.dumps(config | remote))
    (place / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(minigpt.CheckpointError, match="contains custom code"):
        minigpt.parity(place, prompts=PROMPTS, device="cpu")
    assert not (tmp_path / "ran").exists()
    (place / "config.json").write_text(json.dumps(config))
    tensors = load_file(place / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(minigpt.CheckpointError, match=r"has no model\.layers\.1\.input_layernorm\.weight"):
        minigpt.parity(place, prompts=PROMPTS, device="cpu")
    (place / "model.safetensors").write_bytes(b"short")
    with pytest.raises(minigpt.CheckpointError, match="transformers cannot open"):
        minigpt.parity(place, prompts=PROMPTS, device="cpu")


def test_the_tower_of_images_and_gated_norms_are_no_sites() -> None:
    text = transformers.Gemma3TextConfig(**HEADS)
    vision = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    host = host_of(model)
    assert (len(host.blocks), host.embedding.endswith("embed_tokens")) == (2, True)
    assert not any("vision" in site for site in host.sites)
    mamba = transformers.Mamba2Config(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16,
                                      state_size=8, n_groups=1)  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(mamba)
    assert host_of(model).sites == ["backbone.layers.0.norm", "backbone.layers.1.norm", "backbone.norm_f"]


RECURRENT = {
    "mamba": transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4),
    "mamba2": transformers.Mamba2Config(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1
    ),
    "falcon_mamba": transformers.FalconMambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4),
}


def recurrent(name: str, place: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(RECURRENT[name])
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(place)
    return place


WITHOUT_TEXT = sorted({*minigpt.norms.available()} - {"frozen", "taper", "triton"})  # the last is slow on a CPU


@pytest.mark.parametrize(
    ("name", "dtype", "norms"),
    [
        ("mamba", "bfloat16", ["fused", "rms"]),
        *(
            pytest.param(name, dtype, WITHOUT_TEXT, marks=pytest.mark.thorough)
            for name in ("mamba", "mamba2")
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
def test_the_residual_stream_may_be_float32_in_a_half_precision_model(
    name: str, dtype: str, norms: list[str], tmp_path: Path
) -> None:
    """fla#137, Megatron-LM#1402."""
    place = recurrent(name, tmp_path)
    original = minigpt.Original(place, dtype=dtype, device="cpu", prompts=PROMPTS, max_new_tokens=1)
    real = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()
    assert original.judge(real).logits.ratio == pytest.approx(1, abs=0.03)
    for norm in norms:
        report = judged(original, norm=norm)
        assert report.outcome == ("PASS" if norm == "rms" else "DIFFERENT"), norm


def test_a_norm_with_a_fixed_weight_is_named() -> None:
    model = transformers.AutoModelForCausalLM.from_config(RECURRENT["falcon_mamba"]).eval()
    with pytest.raises(
        minigpt.NormError, match=r"mixer\.dt_layernorm has a fixed weight, a buffer that no norm can share"
    ):
        minigpt.swap_norms(model, "rms")
    assert len(minigpt.swap_norms(model, "rms", ["*.norm", "*.norm_f"])) == 3


# Models that are not what their weights say, and models without norms


def test_an_adapter_beside_a_model_is_refused_for_every_architecture(folder_of: Any, tmp_path: Path) -> None:
    """transformers adds it where PEFT is installed, and reads the model without it where it is not."""
    saved(reference(), tmp_path / "gpt2")
    shutil.copytree(folder_of("qwen3"), tmp_path / "qwen3")
    for name in ("gpt2", "qwen3"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
        with pytest.raises(minigpt.CheckpointError, match="holds an adapter of PEFT"):
            minigpt.Original(tmp_path / name, prompts=PROMPTS, device="cpu")
    with pytest.raises(minigpt.CheckpointError, match="holds an adapter of PEFT"):
        minigpt.from_pretrained(tmp_path / "gpt2")
    minigpt.from_pretrained(tmp_path / "gpt2" / "model.safetensors")  # it names the weights alone


QUANTIZED = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "torchao": {"quant_method": "torchao", "quant_type": "int8_weight_only"},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_refused_in_a_sentence(method: str, folder_of: Any, tmp_path: Path) -> None:
    """Whether or not the package is installed that would read them, and wherever the weights would be."""
    saved(reference(), tmp_path / "gpt2")
    shutil.copytree(folder_of("qwen3"), tmp_path / "qwen3")
    for name in ("gpt2", "qwen3"):
        edit_config(tmp_path / name, quantization_config=QUANTIZED[method])
        with pytest.raises(minigpt.CheckpointError, match=r"quantized weights|transformers cannot open"):
            minigpt.parity(tmp_path / name, prompts=PROMPTS, device="cpu")
    with pytest.raises(minigpt.CheckpointError, match=rf"holds quantized weights \({method}\)"):
        minigpt.parity(tmp_path / "qwen3", prompts=PROMPTS, device="cpu", memory=0)


def test_weights_of_eight_bits_are_refused(tmp_path: Path) -> None:
    """The weights that a quantized model holds, whatever its config says."""
    model = random_model("qwen3")
    layer = model.model.layers[0].mlp.up_proj
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        with pytest.raises(minigpt.CheckpointError, match="holds quantized weights"):
            require_floating(model, tmp_path)


class PlainConfig(transformers.PretrainedConfig):
    model_type = "without_norms"
    vocab_size, hidden_size, num_hidden_layers = 96, 16, 2


class TanhModel(transformers.PreTrainedModel):
    """A language model of tanh layers."""

    config_class = PlainConfig

    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return CausalLMOutputWithPast(logits=self.lm_head(x))


def test_a_model_without_norms_is_judged_and_not_swapped(tmp_path: Path) -> None:
    transformers.AutoConfig.register("without_norms", PlainConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(PlainConfig, TanhModel, exist_ok=True)
    torch.manual_seed(0)
    model = TanhModel(PlainConfig()).eval()
    model.save_pretrained(tmp_path)
    options: dict[str, Any] = dict(prompts=PROMPTS, max_new_tokens=2)
    assert minigpt.parity(tmp_path, device="cpu", **options).passed
    report = minigpt.parity(model, against=tmp_path, gradients=True, **options)
    assert (report.outcome, report.missing, report.norm_sites) == ("PASS", [], [])
    for sites in ("*", "early"):
        with pytest.raises(minigpt.NormError, match="has no norm that can be swapped"):
            minigpt.parity(tmp_path, norm="rms", sites=sites, device="cpu", **options)
