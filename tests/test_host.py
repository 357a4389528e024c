"""The norms of any causal language model: where they are, and what each computes, against the module tree."""

from typing import Any

import pytest
import torch
import transformers
from helpers import small_model
from torch import nn

import minigpt
from minigpt.host import NormSite, host_of, norm_site, prefix_of

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
# The config, what its norms compute, the names of a block's norms, and of the others.
MODELS: dict[str, tuple[Any, NormSite, list[str], list[str]]] = {
    "llama": (transformers.LlamaConfig(**GROUPED), NormSite("rms_norm", 1e-6, rounds="row"),
              ["input_layernorm", "post_attention_layernorm"], ["model.norm"]),
    "qwen3": (transformers.Qwen3Config(**GROUPED, head_dim=8), NormSite("rms_norm", 1e-6, rounds="row"),
              ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"], ["model.norm"]),
    "gemma": (transformers.GemmaConfig(**GROUPED, head_dim=8),
              NormSite("rms_norm", 1e-6, adds_one=True, rounds="once"),
              ["input_layernorm", "post_attention_layernorm"], ["model.norm"]),
    "olmo": (transformers.OlmoConfig(**SIZES), NormSite("layer_norm", 1e-5),  # without scale and shift
             ["input_layernorm", "post_attention_layernorm"], ["model.norm"]),
    "phi": (transformers.PhiConfig(**SIZES), NormSite("layer_norm", 1e-5, rounds="once"), ["input_layernorm"],
            ["model.final_layernorm"]),
    "pythia": (transformers.GPTNeoXConfig(**SIZES, layer_norm_eps=1e-4),
               NormSite("layer_norm", 1e-4, rounds="once"),
               ["input_layernorm", "post_attention_layernorm"], ["gpt_neox.final_layer_norm"]),
    "bloom": (transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4),
              NormSite("layer_norm", 1e-5, rounds="once"), ["input_layernorm", "post_attention_layernorm"],
              ["transformer.word_embeddings_layernorm", "transformer.ln_f"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_norms_of_other_architectures(name: str) -> None:
    config, expected, in_block, others = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(config)
    blocks = host_of(model).blocks
    assert len(blocks) == 2
    assert set(minigpt.norm_sites(model)) == {f"{block}.{norm}" for block in blocks for norm in in_block} | {*others}
    for site, actual in minigpt.norm_sites(model).items():
        assert (actual.kind, actual.eps, actual.adds_one, actual.rounds) == (
            expected.kind, pytest.approx(expected.eps, rel=1e-6), expected.adds_one, expected.rounds
        ), site  # fmt: skip
    embedding = model.get_submodule(host_of(model).embedding)
    assert embedding.weight is model.get_input_embeddings().weight


def test_a_gpt2_of_ours_and_of_transformers() -> None:
    model = small_model("rms")
    assert [*minigpt.norm_sites(model)] == model.norm_sites()
    assert {site.kind for site in minigpt.norm_sites(model).values()} == {"rms_norm"}
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)
    sites = minigpt.norm_sites(transformers.GPT2LMHeadModel(config))
    assert next(iter(sites)) == "transformer.h.0.ln_1"
    host = host_of(transformers.GPT2LMHeadModel(config))
    assert (host.prefix, host.sites[-1], host.blocks) == ("transformer.", "ln_f", ["h.0", "h.1"])


@pytest.mark.parametrize("name", ["dyt", "hardtanh", "std_eps", "no_scale"])
def test_what_no_formula_fits_is_another_kind(name: str) -> None:
    assert norm_site(minigpt.norms.build(name, 16, eps=1e-3), 16).kind == "other"


def test_the_norm_itself_is_left_as_it_was() -> None:
    norm = nn.LayerNorm(8)
    before = norm.weight.detach().clone()
    norm_site(norm, 8)
    assert torch.equal(norm.weight, before)


def test_places_are_found_under_any_prefix() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(1, 1), "c": nn.Linear(1, 1)})})
    assert prefix_of(model, ["b", "c"]) == "a."
    assert prefix_of(model, ["a.b"]) == ""
    assert prefix_of(model, ["b", "d"]) is None
