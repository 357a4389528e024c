"""GPT2Config: every field of a config.json is honoured, known to be without effect, or refused by name."""

import dataclasses
import json
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from minigpt import ConfigError, GPT2Config
from minigpt.config import ACTIVATIONS

PRESETS = {
    "gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25),
    "distilgpt2": (768, 6, 12),
}  # fmt: skip
SHARES = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
FLAGS = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "tie_word_embeddings")


@st.composite
def configs(draw: st.DrawFn) -> GPT2Config:
    """Any config that we accept, its token ids within its vocabulary."""
    n_head, vocab = draw(st.integers(1, 20)), draw(st.integers(1, 100_000))
    token = st.integers(0, vocab - 1)
    return GPT2Config(
        vocab_size=vocab,
        n_positions=draw(st.integers(1, 4096)),
        n_embd=n_head * draw(st.integers(1, 128)),
        n_layer=draw(st.integers(1, 60)),
        n_head=n_head,
        n_inner=draw(st.none() | st.integers(1, 10_000)),
        activation_function=draw(st.sampled_from(ACTIVATIONS)),
        **{name: draw(st.floats(0, 1)) for name in SHARES},
        layer_norm_epsilon=draw(st.floats(0, 1)),
        initializer_range=draw(st.floats(0, 10)),
        **{name: draw(st.booleans()) for name in FLAGS},
        bos_token_id=draw(st.none() | token),
        eos_token_id=draw(st.none() | token | st.lists(token, min_size=1, max_size=3).map(tuple)),
        pad_token_id=draw(st.none() | token),
        used_vocab_size=draw(st.none() | st.integers(1, vocab)),
    )


@given(configs())
def test_its_own_fields_make_it_again_through_json(ours: GPT2Config) -> None:
    again = GPT2Config.from_dict(json.loads(json.dumps(ours.to_dict())))
    assert again == ours
    assert hash(again) == hash(ours)


@given(configs())
def test_transformers_reads_our_fields_and_we_read_theirs(ours: GPT2Config) -> None:
    hf_config = transformers.GPT2Config(**ours.to_dict())
    for name, value in ours.to_dict().items():
        assert getattr(hf_config, name) == value, name
    assert GPT2Config.from_dict(hf_config.to_dict()) == ours
    assert GPT2Config.from_dict(json.loads(hf_config.to_json_string(use_diff=False))) == ours


# Presets.


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_shape(name: str) -> None:
    preset = GPT2Config.preset(name)
    assert (preset.n_embd, preset.n_layer, preset.n_head) == PRESETS[name]
    assert dataclasses.replace(preset, n_embd=768, n_layer=12, n_head=12) == GPT2Config()
    assert preset.head_size == 64
    assert preset.inner_size == 4 * preset.n_embd


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt3'; known are demo, distilgpt2, gpt2, .*, gpt2-xl$"):
        GPT2Config.preset("gpt3")


# Honoured, without effect, or refused.


def test_every_field_of_transformers_config_is_judged() -> None:
    """Each is one of ours, or known to be without effect, or a known one to refuse: none falls through."""
    for name, value in transformers.GPT2Config().to_dict().items():
        config = GPT2Config.from_dict({name: value})
        assert getattr(config, name, value) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"summary_type": "mean", "summary_use_proj": False, "_num_labels": 1, "n_ctx": 1024, "output_past": True},
        {"task_specific_params": {"text-generation": {"max_length": 50}}, "n_special": 0, "prefix": "x"},
        {"transformers_version": "9", "torch_dtype": "float16", "dtype": "bfloat16", "gradient_checkpointing": True},
        {"max_length": 9, "do_sample": True, "temperature": 0.5, "top_k": 3, "unk_token_id": 3, "_name_or_path": "x"},
        {"add_cross_attention": False, "pruned_heads": {}, "chunk_size_feed_forward": 8, "quantization_config": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert GPT2Config.from_dict(fields) == GPT2Config()


def test_fields_that_no_gpt2_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert GPT2Config.from_dict({"author": "A", "license": "mit", "created_date": "2021", "window": 1}) == GPT2Config()
    assert "author, created_date, license, window" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"}, {"add_cross_attention": True}, {"is_encoder_decoder": True},
        {"pruned_heads": {"0": [1]}}, {"rope_theta": 1e4}, {"position_embedding_type": "relative_key"},
        {"quantization_config": {"quant_method": "gptq"}}, {"n_embd": 10, "n_head": 3},
        {"auto_map": {"AutoModelForCausalLM": "a.B"}}, {"n_heads": 4}, {"layer_norm_eps": 1e-6},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_would_change_the_model_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^(unknown config field )?{next(iter(fields))}"):
        GPT2Config.from_dict(fields)


# Bad values.

NO_COUNT = (0, -1, 2**31, 1.5, 12.0, "12", True, None, [12])
NO_SHARE = (-0.1, 1.1, "0.1", None, True, float("nan"), float("inf"))
NO_AMOUNT = (-1e-5, "1e-5", None, False, float("nan"), float("inf"), 10**400)
NO_FLAG = (0, 1, "true", None)
NO_TOKEN = (1.0, "0", True)

BAD = {
    **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), NO_COUNT),
    "n_inner": tuple(value for value in NO_COUNT if value is not None),
    "activation_function": ("gelu_fast", "", None, 3, ["gelu"]),
    **dict.fromkeys(SHARES, NO_SHARE),
    **dict.fromkeys(("layer_norm_epsilon", "initializer_range"), NO_AMOUNT),
    **dict.fromkeys(FLAGS, NO_FLAG),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), (*NO_TOKEN, [0])),
    "eos_token_id": (*NO_TOKEN, ["0"], [True], [[0]], {"id": 0}),
    "used_vocab_size": (0, -1, 1.5, "12", True, 50258),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_name(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ConfigError, match=f"^{name} must be .*, got "):
            GPT2Config.from_dict({name: value})
