"""The norms of any causal language model: where they are, and what each computes, against the module tree."""

import copy

import pytest
import torch
import transformers
from architectures import config_of, random_model
from helpers import small_model
from torch import nn

import minigpt
from minigpt.host import NormSite, host_of, prefix_of, probe_norm

IN_BLOCK = ["input_layernorm", "post_attention_layernorm"]
OF_HEADS = ["self_attn.q_norm", "self_attn.k_norm"]
# What its norms compute, the names of a block's norms, and of the others.
MODELS: dict[str, tuple[NormSite, list[str], list[str]]] = {
    "llama": (NormSite("rms_norm", 1e-6, rounds="row"), IN_BLOCK, ["model.norm"]),
    "qwen3": (NormSite("rms_norm", 1e-6, rounds="row"), [*OF_HEADS, *IN_BLOCK], ["model.norm"]),
    "gemma": (NormSite("rms_norm", 1e-6, adds_one=True, rounds="once"), IN_BLOCK, ["model.norm"]),
    "olmo": (NormSite("layer_norm", 1e-5), IN_BLOCK, ["model.norm"]),  # without scale and shift
    "nemotron": (NormSite("layer_norm", 1e-5, adds_one=True, rounds="once"), IN_BLOCK, ["model.norm"]),
    "phi": (NormSite("layer_norm", 1e-5, rounds="once"), ["input_layernorm"], ["model.final_layernorm"]),
    "pythia": (NormSite("layer_norm", 1e-5, rounds="once"), IN_BLOCK, ["gpt_neox.final_layer_norm"]),
    "bloom": (
        NormSite("layer_norm", 1e-5, rounds="once"), IN_BLOCK,
        ["transformer.word_embeddings_layernorm", "transformer.ln_f"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_norms_of_other_architectures(name: str) -> None:
    expected, in_block, others = MODELS[name]
    model = random_model(name)
    blocks = host_of(model).blocks
    assert len(blocks) == 2
    assert set(minigpt.norm_sites(model)) == {f"{block}.{norm}" for block in blocks for norm in in_block} | {*others}
    for site, actual in minigpt.norm_sites(model).items():
        assert (actual.kind, actual.eps, actual.adds_one, actual.rounds) == (
            expected.kind, pytest.approx(expected.eps, rel=1e-6), expected.adds_one, expected.rounds
        ), site  # fmt: skip
    with torch.device("meta"):  # whose Parameters have no values
        assert minigpt.norm_sites(transformers.AutoModelForCausalLM.from_config(model.config)) == minigpt.norm_sites(
            model
        )
    embedding = model.get_submodule(host_of(model).embedding)
    assert embedding.weight is model.get_input_embeddings().weight


def test_a_norm_of_heads_without_a_weight_has_their_width() -> None:
    sites = minigpt.norm_sites(random_model("llama4"))
    expected = NormSite("rms_norm", pytest.approx(1e-5), width=8)
    assert [site for path, site in sites.items() if path.endswith("qk_norm")] == [expected] * 2


def test_a_gpt2_of_ours_and_of_transformers() -> None:
    model = small_model("rms")
    assert [*minigpt.norm_sites(model)] == model.site_names()
    assert {site.kind for site in minigpt.norm_sites(model).values()} == {"rms_norm"}
    config = config_of("gpt2")
    sites = minigpt.norm_sites(transformers.GPT2LMHeadModel(config))
    assert next(iter(sites)) == "transformer.h.0.ln_1"
    host = host_of(transformers.GPT2LMHeadModel(config))
    assert (host.prefix, host.sites[-1], host.blocks) == ("transformer.", "ln_f", ["h.0", "h.1"])


@pytest.mark.parametrize("name", ["dyt", "hardtanh", "std_eps", "no_scale"])
def test_what_no_formula_fits_is_another_kind(name: str) -> None:
    assert probe_norm(minigpt.norms.build(name, 16, eps=1e-3), 16).kind == "other"


def test_the_norm_itself_is_left_as_it_was() -> None:
    norm = nn.LayerNorm(8)
    before = norm.weight.detach().clone()
    probe_norm(norm, 8)
    assert torch.equal(norm.weight, before)


def test_places_are_found_under_any_prefix() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(1, 1), "c": nn.Linear(1, 1)})})
    assert prefix_of(model, ["b", "c"]) == "a."
    assert prefix_of(model, ["a.b"]) == ""
    assert prefix_of(model, ["b", "d"]) is None


class Small(nn.Module):
    """A language model of somebody's own."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(8, 16), nn.ModuleList(parts)


class Odd(nn.LayerNorm):
    """A kind of LayerNorm whose name does not say it."""


class Scales(nn.Module):
    """A norm with its scale and shift in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner_norm(x)


class FullNorm(Scales):
    """The same, called a norm."""


@pytest.mark.parametrize(
    ("part", "sites"),
    [
        (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), ["0"]),
        (nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.1)), ["0"]),
        (nn.ModuleDict({"norms": nn.ModuleDict({"q": nn.RMSNorm(16), "k": nn.RMSNorm(16)})}), ["norms.q", "norms.k"]),
        (nn.ModuleDict({"a": Odd(16), "norm": nn.Identity()}), ["a"]),
        (nn.ModuleDict({"norm": nn.Sequential(nn.LayerNorm(16), nn.GELU())}), ["norm.0"]),
        (Scales(), ["inner_norm"]),
        (FullNorm(), [""]),
    ],
    ids=str,
)
def test_norms_are_found_inside_of_whatever_holds_them(part: nn.Module, sites: list[str]) -> None:
    paths = [f"blocks.0.{site}".rstrip(".") for site in sites]
    assert list(host_of(Small(part, copy.deepcopy(part))).sites)[: len(sites)] == paths


def test_an_rms_norm_of_torch_without_an_eps_has_that_of_float32() -> None:
    site = probe_norm(nn.RMSNorm(16), 16)
    assert (site.kind, site.eps) == ("rms_norm", torch.finfo(torch.float32).eps)


def test_a_norm_that_cannot_be_called_is_another_kind() -> None:
    class Fails(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError

    assert probe_norm(Fails(16), 16).kind == "other"
