"""GPT2Config: every field of a config.json is honoured, known to be without effect, or refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from minigpt import ConfigError, GPT2Config
from minigpt.config import ACTIVATIONS

FIELDS = {field.name: field.default for field in dataclasses.fields(GPT2Config)}

PRESETS = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
    "distilgpt2": (768, 6, 12),
}

# The file that came with the first published GPT-2 124M.
PUBLISHED = """{
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
  "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
  "summary_type": "cls_index", "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257
}"""


# GPT2Config().to_dict() of transformers 4.57.
DUMPED = """{
  "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": null,
  "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
  "layer_norm_epsilon": 1e-05, "initializer_range": 0.02, "summary_type": "cls_index", "summary_use_proj": true,
  "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
  "scale_attn_weights": true, "use_cache": true, "scale_attn_by_inverse_layer_idx": false,
  "reorder_and_upcast_attn": false, "bos_token_id": 50256, "eos_token_id": 50256, "return_dict": true,
  "output_hidden_states": false, "torchscript": false, "dtype": null, "pruned_heads": {}, "tie_word_embeddings": true,
  "chunk_size_feed_forward": 0, "is_encoder_decoder": false, "is_decoder": false, "cross_attention_hidden_size": null,
  "add_cross_attention": false, "tie_encoder_decoder": false, "architectures": null, "finetuning_task": null,
  "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
  "task_specific_params": null, "problem_type": null, "tokenizer_class": null, "prefix": null, "pad_token_id": null,
  "sep_token_id": null, "decoder_start_token_id": null, "max_length": 20, "min_length": 0, "do_sample": false,
  "early_stopping": false, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
  "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
  "bad_words_ids": null, "num_return_sequences": 1, "output_scores": false, "return_dict_in_generate": false,
  "forced_bos_token_id": null, "forced_eos_token_id": null, "remove_invalid_values": false,
  "exponential_decay_length_penalty": null, "suppress_tokens": null, "begin_suppress_tokens": null,
  "num_beam_groups": 1, "diversity_penalty": 0.0, "_name_or_path": "", "transformers_version": "4.57.1",
  "model_type": "gpt2", "tf_legacy_loss": false, "use_bfloat16": false, "output_attentions": false
}"""


@st.composite
def configs(draw: st.DrawFn) -> GPT2Config:
    """Any config that we accept, its token ids within its vocabulary."""
    n_head, vocab = draw(st.integers(1, 20)), draw(st.integers(1, 100_000))
    token = st.integers(0, vocab - 1)
    share = st.floats(0, 1)
    return GPT2Config(
        vocab_size=vocab,
        n_positions=draw(st.integers(1, 4096)),
        n_embd=n_head * draw(st.integers(1, 128)),
        n_layer=draw(st.integers(1, 60)),
        n_head=n_head,
        n_inner=draw(st.none() | st.integers(1, 10_000)),
        activation_function=draw(st.sampled_from(ACTIVATIONS)),
        resid_pdrop=draw(share),
        embd_pdrop=draw(share),
        attn_pdrop=draw(share),
        layer_norm_epsilon=draw(st.floats(0, 1)),
        initializer_range=draw(st.floats(0, 10)),
        scale_attn_weights=draw(st.booleans()),
        scale_attn_by_inverse_layer_idx=draw(st.booleans()),
        reorder_and_upcast_attn=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=draw(st.none() | token),
        eos_token_id=draw(st.none() | token | st.lists(token, min_size=1, max_size=3).map(tuple)),
        pad_token_id=draw(st.none() | token),
        used_vocab_size=draw(st.none() | st.integers(1, vocab)),
    )


@given(configs())
def test_its_own_fields_make_it_again_through_json(ours: GPT2Config) -> None:
    assert GPT2Config.from_dict(ours.to_dict()) == ours
    again = GPT2Config.from_dict(json.loads(json.dumps(ours.to_dict())))
    assert again == ours
    assert hash(again) == hash(ours)


@given(configs())
def test_transformers_reads_our_fields_and_we_read_theirs(ours: GPT2Config) -> None:
    theirs = transformers.GPT2Config(**ours.to_dict())
    for name, value in ours.to_dict().items():
        assert getattr(theirs, name) == value, name
    assert GPT2Config.from_dict(theirs.to_dict()) == ours
    assert GPT2Config.from_dict(json.loads(theirs.to_json_string(use_diff=False))) == ours


def test_the_defaults_are_those_of_transformers() -> None:
    theirs = transformers.GPT2Config()
    for name, value in FIELDS.items():
        assert name == "used_vocab_size" or getattr(theirs, name) == value, name
    assert GPT2Config() == GPT2Config.from_dict({}) == GPT2Config.from_dict(theirs.to_dict())


@pytest.mark.parametrize("text", [PUBLISHED, DUMPED], ids=["published", "transformers 4.57"])
def test_real_files_of_gpt2_are_the_default_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert GPT2Config.from_json_file(tmp_path / "config.json") == GPT2Config()


# Presets.


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_shape(name: str) -> None:
    preset = GPT2Config.preset(name)
    assert (preset.n_embd, preset.n_layer, preset.n_head) == PRESETS[name]
    assert dataclasses.replace(preset, n_embd=768, n_layer=12, n_head=12) == GPT2Config()
    assert preset.head_size == 64
    assert preset.inner_size == 4 * preset.n_embd


def test_the_widths_that_follow_from_others() -> None:
    shape = GPT2Config(n_embd=60, n_head=5, n_inner=None)
    assert (shape.head_size, shape.inner_size) == (12, 240)
    assert dataclasses.replace(shape, n_inner=7).inner_size == 7


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt3'; known are .*distilgpt2, gpt2, gpt2-large") as raised:
        GPT2Config.preset("gpt3")
    assert all(name in str(raised.value) for name in PRESETS)


# Honoured, without effect, or refused.


def test_every_field_of_transformers_config_is_judged() -> None:
    """Each is one of ours, or known to be without effect, or a known one to refuse: none falls through."""
    for name, value in transformers.GPT2Config().to_dict().items():
        config = GPT2Config.from_dict({name: value})
        assert getattr(config, name, value) == value


@pytest.mark.parametrize("fields", [None, [1], "n_layer", {3: 4}, {None: 1, "n_layer": 2}], ids=str)
def test_what_are_no_fields(fields: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config fields must be a dict with names as keys, got "):
        GPT2Config.from_dict(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"summary_type": "mean", "summary_use_proj": False, "_num_labels": 1, "n_ctx": 1024, "output_past": True},
        {"task_specific_params": {"text-generation": {"max_length": 50}}, "n_special": 0, "prefix": "x"},
        {"transformers_version": "9", "torch_dtype": "float16", "dtype": "bfloat16", "gradient_checkpointing": True},
        {"max_length": 9, "do_sample": True, "temperature": 0.5, "top_k": 3, "unk_token_id": 3, "_name_or_path": "x"},
        {"add_cross_attention": False, "pruned_heads": {}, "chunk_size_feed_forward": 0, "quantization_config": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert GPT2Config.from_dict(fields) == GPT2Config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "llama"),
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("chunk_size_feed_forward", 8),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.* is not supported, only "):
        GPT2Config.from_dict({name: value})


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown config fields: N_EMBD, layer_norm_eps, rope_theta;"):
        GPT2Config.from_dict({"rope_theta": 1, "n_embd": 768, "N_EMBD": 768, "layer_norm_eps": 1e-5})


# Bad values.

NO_COUNT = (0, -1, 2**31, 10**400, 1.5, 12.0, "12", True, None, [12], float("nan"))
NO_SHARE = (-0.1, 1.1, "0.1", None, True, float("nan"), float("inf"))
NO_AMOUNT = (-1e-5, "1e-5", None, False, float("nan"), float("inf"), 10**400)
NO_FLAG = (0, 1, "true", None)
NO_TOKEN = (1.0, "0", True)

BAD = {
    **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), NO_COUNT),
    "n_inner": tuple(value for value in NO_COUNT if value is not None),
    "activation_function": ("gelu_fast", "", None, 3, ["gelu"]),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), NO_SHARE),
    **dict.fromkeys(("layer_norm_epsilon", "initializer_range"), NO_AMOUNT),
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), NO_FLAG),
    **dict.fromkeys(("reorder_and_upcast_attn", "tie_word_embeddings"), NO_FLAG),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), (*NO_TOKEN, [0])),
    "eos_token_id": (*NO_TOKEN, ["0"], [True], [[0]], {"id": 0}),
    "used_vocab_size": (0, -1, 1.5, "12", True, 50258),
}


def test_every_field_has_bad_values_here() -> None:
    assert BAD.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_name(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ConfigError, match=f"^{name} must be .*, got "):
            GPT2Config.from_dict({name: value})


def test_heads_of_unequal_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_embd=10 must be a multiple of n_head=3"):
        GPT2Config(n_embd=10, n_head=3)


def test_a_list_of_ends_of_text() -> None:
    assert GPT2Config.from_dict({"eos_token_id": [3, 5]}).eos_token_ids == (3, 5)
    assert GPT2Config.from_dict({"eos_token_id": [3, 5]}).to_dict()["eos_token_id"] == [3, 5]
    assert GPT2Config(eos_token_id=3).eos_token_ids == (3,)
    assert GPT2Config(eos_token_id=None).eos_token_ids == ()


def test_it_is_frozen_and_takes_names_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPT2Config().n_embd = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        GPT2Config(50257)  # type: ignore[misc]


# Files.


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read {path}"):
            GPT2Config.from_json_file(path)
