"""Models whose norms, caches or modules are not laid out as Llama's are."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import HEADS, random_model
from torch import Tensor, nn

import minigpt
from minigpt.checkpoint.transformers_model import describe_other

PROMPTS = [[5, 6, 7, 8, 9, 10], [40, 41, 3, 7, 60, 61, 62, 63], [11, 90, 17]]
IDS = torch.tensor(PROMPTS[:1])


@pytest.fixture(scope="module")
def original_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of an architecture's name that returns its model and its original."""
    kept: dict[str, tuple[Any, minigpt.Original]] = {}

    def read(name: str) -> tuple[Any, minigpt.Original]:
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            model = random_model(name)
            model.save_pretrained(folder)
            kept[name] = model, minigpt.Original(folder, device="cpu", prompts=PROMPTS, max_new_tokens=4)
        return kept[name]

    return read


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("nanochat", "model.norm"),  # it is behind the embedding too
        ("nanochat", "model.layers.1.self_attn.q_norm"),
        ("hrm_text", "model.L_module.layers.1.input_layernorm"),  # it is called four times
        ("hrm_text", "model.H_module.final_norm"),
    ],
)
def test_a_wrong_norm_is_found_where_modules_are_called_again(name: str, site: str, original_of: Any) -> None:
    model, truth = original_of(name)
    norm = model.get_submodule(site)
    role = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    before = getattr(norm, role)
    setattr(norm, role, 0.5)
    try:
        report = truth.judge(model, diagnose=False)
    finally:
        setattr(norm, role, before)
    assert report.outcome == "FAIL"
    assert report.first_off.place == site
    assert truth.judge(model).outcome == "PASS"


@pytest.mark.parametrize("name", ["minimax", pytest.param("deepseek_v4", marks=pytest.mark.thorough)])
def test_a_model_makes_its_own_kind_of_cache(name: str, original_of: Any) -> None:
    """MiniMax takes no DynamicCache. DeepSeek V4 compresses keys, and a norm of these has a row for several tokens."""
    model, truth = original_of(name)
    report = truth.judge(model)
    assert report.outcome == "PASS"
    assert report.decoding is not None
    assert report.every_place
    continued = model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert truth.truth.texts.prompts[0].ids == continued[0].tolist()


COMPRESSED = "model.layers.0.self_attn.compressor.kv_norm"


@pytest.fixture(scope="module")
def compressing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek V4 one of whose norms reads 12 tokens at once, so that no shorter text reaches it."""
    folder = tmp_path_factory.mktemp("compressing")
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12}
    random_model("deepseek_v4", compress_rates=rates).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("long_first", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_norm_that_only_long_texts_reach_is_judged_on_these(
    long_first: bool, compressing: Path, tmp_path: Path
) -> None:
    prompts = [PROMPTS[0], [*range(3, 17)]]
    if long_first:
        prompts.reverse()
    original = minigpt.Original(compressing, device="cpu", prompts=prompts, max_new_tokens=2)
    places = original.truth.facts.places
    assert places.index("model.layers.0.self_attn.kv_norm") + 1 == places.index(COMPRESSED)
    original.save(tmp_path / "record.safetensors")
    for truth in (original, minigpt.Original.load(tmp_path / "record.safetensors", device="cpu")):
        report = truth.judge(norm="rms", device="cpu")
        assert (report.outcome, report.every_place, report.notes) == ("PASS", True, [])
        other = truth.judge(norm="fused", sites=COMPRESSED, device="cpu")
        assert other.first_off.place == COMPRESSED


def test_a_norm_that_no_prompt_reaches_is_named(compressing: Path) -> None:
    report = minigpt.parity(compressing, norm="rms", prompts=PROMPTS[:1], max_new_tokens=2, device="cpu")
    assert report.outcome == "PASS"
    (note,) = report.notes
    assert note.startswith(f"No prompt reaches {COMPRESSED}, ")
    assert COMPRESSED not in [site.site for site in report.norm_sites]


def test_a_norm_without_parameters_has_the_width_of_the_matrix_beside_it() -> None:
    model = random_model("deepseek_v4")
    sites = minigpt.norm_sites(model)
    for place, width in (("attn_hc.input_norm", 128), ("self_attn.q_b_norm", 8), ("input_layernorm", 32)):
        assert sites[f"model.layers.0.{place}"].width == width
    before = model(IDS).logits
    minigpt.swap_norms(model, "rms")
    torch.testing.assert_close(model(IDS).logits, before)


class Logits(nn.Module):
    """A model as a function of ids to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def gemma_4() -> Any:
    """A model whose layers have heads of two widths, and norms of values without a weight."""
    return transformers.Gemma4TextConfig(
        **HEADS, global_head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=96,
    )  # fmt: skip


def gemma_4_with_towers() -> Any:
    tower = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return transformers.Gemma4Config(
        text_config=gemma_4().to_dict(),
        vision_config=tower | dict(num_key_value_heads=2, head_dim=8, patch_size=4, pooling_kernel_size=1),
        audio_config=None,
    )


def falcon_mamba() -> Any:
    """A model whose norms of dt, B and C keep ones, of another width than their rows, for a kernel."""
    return transformers.FalconMambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8)


@pytest.mark.parametrize("config", [gemma_4, gemma_4_with_towers, falcon_mamba])
def test_norms_of_several_widths_are_judged(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert minigpt.parity(model, against=tmp_path, prompts=PROMPTS, max_new_tokens=4).outcome == "PASS"
    assert describe_other(tmp_path)["norms"]
    widths = {path: site.width for path, site in minigpt.norm_sites(model).items() if path.endswith("self_attn.v_norm")}
    assert [*widths.values()] == ([] if config is falcon_mamba else [8, 16])


def test_a_mistake_of_a_model_whose_layers_have_settings_of_their_own_is_named(tmp_path: Path) -> None:
    """transformers' config raises where it is asked for a width of heads that not all layers have."""
    torch.manual_seed(0)
    config = gemma_4()
    config.final_logit_softcapping = 5.0
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(tmp_path)
    model.config.final_logit_softcapping = None
    report = minigpt.parity(model, against=tmp_path, prompts=PROMPTS, max_new_tokens=4, diagnose=True, device="cpu")
    assert report.outcome == "FAIL"
    assert [found.mistake for found in report.diagnosis] == ["no soft cap of the logits"]


@pytest.mark.parametrize("part", ["an activation", "a frozen activation", "a norm", "the model"])
def test_parts_of_torchscript_are_judged(part: str, original_of: Any) -> None:
    """They take no hook of ours, and a frozen one has no mode."""
    model, truth = original_of("llama")
    held = copy.deepcopy(model)
    scripted = torch.jit.script(nn.SiLU().eval())
    if part == "the model":
        held = torch.jit.trace(Logits(held), IDS, check_trace=False)
    elif part == "a norm":
        held.model.norm = torch.jit.script(Scripted(held.model.norm.weight.data))
    else:
        held.model.layers[1].mlp.act_fn = torch.jit.freeze(scripted) if part == "a frozen activation" else scripted
        assert minigpt.norm_sites(held) == minigpt.norm_sites(model)
        assert len(minigpt.swap_norms(held, "rms")) == 5
    assert truth.judge(held).outcome == "PASS"


class Scripted(nn.Module):
    """An RMSNorm that TorchScript compiles."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, [32], self.weight, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_process_changes_nothing(dtype: torch.dtype, original_of: Any, tmp_path: Path) -> None:
    """Training scripts set it."""
    model, truth = original_of("qwen3")
    sites = minigpt.norm_sites(model)
    expected = truth.judge(model).logits
    model.save_pretrained(tmp_path)
    torch.set_default_dtype(dtype)
    try:
        assert minigpt.norm_sites(model) == sites
        held = copy.deepcopy(model)
        for norm in ("rms", nn.RMSNorm):
            minigpt.swap_norms(held, norm)
            assert {parameter.dtype for parameter in held.parameters()} == {torch.float32}
            assert truth.judge(held).outcome == "PASS"
        again = minigpt.Original(tmp_path, device="cpu", prompts=PROMPTS, max_new_tokens=4)
        assert again.judge(model).logits == expected
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_modules_of_torch_export_are_judged_by_their_logits(original_of: Any) -> None:
    """They refuse ``eval``. As modules, a norm lists its input beside its output where both are used later."""
    model, truth = original_of("llama")
    tokens = torch.export.Dim("tokens", min=2, max=40)
    program = torch.export.export(Logits(model), (IDS,), dynamic_shapes=({1: tokens},), strict=False)
    for exported in (program.module(), torch.export.unflatten(program)):
        modes = [part.training for part in exported.modules()]
        report = truth.judge(exported)
        assert report.outcome == "PASS"
        assert not any(site.propagated_error > 1e-5 for site in report.norm_sites)
        assert not report.notes
        assert [part.training for part in exported.modules()] == modes


@pytest.mark.parametrize(
    ("name", "factor"), [pytest.param("granite", 8.0, marks=pytest.mark.thorough), ("llama", -0.05)]
)
def test_a_factor_of_the_logits_is_named(name: str, factor: float, original_of: Any) -> None:
    """It multiplies the noise of the logits too. Granite's config has one, which a port may forget."""
    model, truth = original_of(name)
    report = truth.judge(lambda ids: factor * model(ids).logits, diagnose=True)
    assert [found.mistake for found in report.diagnosis] == ["logits multiplied by a constant"]
