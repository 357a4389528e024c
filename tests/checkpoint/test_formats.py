"""Every family of checkpoints in, Hugging Face out: bit-equal tensors, and transformers' own logits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, edit_tensors, reference, saved, tiny_bpe, tokens
from foreign import WRITERS, book_tensors, parts, write_book, write_nanogpt
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import minigpt
from minigpt import CheckpointError, ConfigError

ACTIVATION = {"nanoGPT": "gelu", "nanoGPT, plain": "gelu"}


def load(source: Path, **how: Any) -> minigpt.GPT2:
    return minigpt.from_pretrained(source, arithmetic="reference", device="cpu", **how)


def assert_bit_equal(ours: minigpt.GPT2, hf_model: GPT2LMHeadModel) -> None:
    """Every tensor, and the logits that come of them."""
    expected, tensors = parts(hf_model), {name: tensor.detach() for name, tensor in ours.named_parameters()}
    tensors.pop("lm_head.weight", None)
    assert tensors.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(tensors[name], expected[name])]
    ids = tokens(2, 11)
    with torch.no_grad():
        assert torch.equal(ours(ids), hf_model(ids).logits)


@pytest.mark.parametrize("family", WRITERS)
def test_a_family_comes_in_and_goes_out_bit_for_bit(family: str, tmp_path: Path) -> None:
    hf_model = reference(activation_function=ACTIVATION.get(family, "gelu_new"))
    model = load(WRITERS[family](hf_model, tmp_path / "in"))
    assert_bit_equal(model, hf_model)
    minigpt.save_pretrained(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_bit_equal(load(tmp_path / "out"), hf_model)
    assert_bit_equal(model, again)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.transformer."])
def test_wrappers_leave_their_names_in_front(prefix: str, tmp_path: Path) -> None:
    hf_model = reference()
    saved(hf_model, tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: {prefix + name.removeprefix("transformer."): tensors[name] for name in tensors}
    )
    assert_bit_equal(load(tmp_path), hf_model)


# nanoGPT


@pytest.mark.parametrize(("has", "says"), [(False, True), (False, False), (True, False)])
def test_a_nanogpt_with_and_without_biases(tmp_path: Path, has: bool, says: bool) -> None:
    """Files of before nanoGPT's models could do without them say nothing."""
    hf_model = reference(activation_function="gelu")
    for name, parameter in hf_model.named_parameters():
        if name.endswith(".bias") and not has:
            nn.init.zeros_(parameter)
    file = write_nanogpt(hf_model, tmp_path, bias=has)
    content = torch.load(file, weights_only=True)
    content["model"] = {name: tensor for name, tensor in content["model"].items() if has or not name.endswith(".bias")}
    if not says:
        del content["model_args"]["bias"]
    torch.save(content, file)
    assert_bit_equal(load(file), hf_model)


def test_an_unknown_argument_of_a_nanogpt_is_refused(tmp_path: Path) -> None:
    file = write_nanogpt(reference(activation_function="gelu"), tmp_path, use_rmsnorm=True)
    with pytest.raises(ConfigError, match=r"ckpt\.pt: unknown fields of a nanoGPT config: use_rmsnorm"):
        load(file)


def test_a_config_beside_a_nanogpt_goes_before_its_own(tmp_path: Path) -> None:
    """So that one trained with the older activation can be read."""
    hf_model = reference(activation_function="gelu")
    write_nanogpt(hf_model, tmp_path)
    hf_model.config.activation_function = "gelu_new"
    (tmp_path / "config.json").write_text(hf_model.config.to_json_string())
    assert load(tmp_path).config.activation_function == "gelu_new"


# The book's


def test_the_book_s_head_is_tied_where_its_values_are_the_embedding_s(tmp_path: Path) -> None:
    assert load(write_book(reference(), tmp_path / "tied")).config.tie_word_embeddings
    hf_model = reference(tie_word_embeddings=False)
    model = load(write_book(hf_model, tmp_path / "untied"))
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, hf_model.lm_head.weight)
    assert_bit_equal(model, hf_model)


def test_the_book_s_queries_without_bias(tmp_path: Path) -> None:
    hf_model = reference()
    with torch.no_grad():
        for block in hf_model.transformer.h:
            block.attn.c_attn.bias.zero_()
    file = write_book(hf_model, tmp_path)
    state = {name: tensor for name, tensor in book_tensors(hf_model).items() if not re.search(r"W_\w+\.bias", name)}
    torch.save(state, file)
    edit_config(tmp_path, qkv_bias=False)
    assert_bit_equal(load(file), hf_model)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensor: tensor[:, :-1], "the parts of h.1.attn.c_attn.weight do not fit together"),
        (lambda tensor: tensor.half(), "the parts of h.1.attn.c_attn.weight do not fit together"),
        (lambda tensor: tensor[:-1], "of another shape: h.1.attn.c_attn.weight is (32, 95), not (32, 96)"),
        (None, "missing h.1.attn.c_attn.weight; unexpected trf_blocks.1.att.W_query.weight"),
    ],
    ids=["width", "dtype", "height", "missing"],
)
def test_parts_that_are_no_whole_are_refused(change: Any, complaint: str, tmp_path: Path) -> None:
    hf_model = reference()
    file = write_book(hf_model, tmp_path)
    state = book_tensors(hf_model)
    key = state.pop("trf_blocks.1.att.W_key.weight")
    torch.save(state | ({"trf_blocks.1.att.W_key.weight": change(key)} if change else {}), file)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        load(file)


# Heads, folded norms, vocabularies, values


HEADS = {
    "v_head.summary.weight": (1, 32), "v_head.summary.bias": (1,), "score.weight": (2, 32), "classifier.bias": (2,),
    "qa_outputs.weight": (2, 32), "multiple_choice_head.summary.weight": (1, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_another_task_is_left_out_and_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf_model = reference()
    saved(hf_model, tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors | {name: torch.ones(*HEADS[name])})
    assert_bit_equal(load(tmp_path), hf_model)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}: left out {name}, ")


def is_norm_of(*norms: str) -> Any:
    return lambda name: any(f".{norm}." in f".{name}" for norm in norms)


FOLDED = {
    "all": is_norm_of("ln_1", "ln_2", "ln_f"),
    "all but the last": is_norm_of("ln_1", "ln_2"),
    "scales": lambda name: is_norm_of("ln_1", "ln_2", "ln_f")(name) and name.endswith("weight"),
    "shifts": lambda name: is_norm_of("ln_1", "ln_2", "ln_f")(name) and name.endswith("bias"),
}


@pytest.mark.parametrize("left_out", FOLDED)
def test_norms_that_were_folded_are_filled_in_as_transformers_does(
    left_out: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(reference(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if not FOLDED[left_out](name)})
    assert_bit_equal(load(tmp_path), GPT2LMHeadModel.from_pretrained(tmp_path).eval())
    (message,) = (record.message for record in caplog.records if record.name == "minigpt")
    assert "h.0.ln_1" in message
    assert "folded" in message


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda name: name.replace("ln_1.weight", "ln_1.gamma"), r"unexpected h\.0\.ln_1\.gamma, h\.1\.ln_1\.gamma$"),
        (lambda name: None if "h.1.ln_1" in name else name, r"missing h\.1\.ln_1\.bias, h\.1\.ln_1\.weight$"),
        (lambda name: None if "h.0.ln_1" in name else name, r"missing h\.0\.ln_1\.bias, h\.0\.ln_1\.weight$"),
        (lambda name: None if "ln_f.bias" in name else name, r"missing ln_f\.bias$"),
        (lambda name: None if "c_fc.bias" in name else name, r"missing h\.0\.mlp\.c_fc\.bias, h\.1\.mlp\.c_fc\.bias$"),
    ],
    ids=["misnamed", "of one block", "of the first block", "the last one's shift", "no norms"],
)
def test_norms_that_are_lost_or_misnamed_are_not_filled_in(change: Any, complaint: str, tmp_path: Path) -> None:
    saved(reference(), tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: {new: tensors[name] for name in tensors if (new := change(name)) is not None}
    )
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)


def test_a_vocabulary_filled_up_is_honoured_and_never_written(tmp_path: Path) -> None:
    hf_model = reference(vocab_size=50304, activation_function="gelu", n_layer=1)
    with torch.no_grad():
        hf_model.transformer.wte.weight[50257:] *= 100  # so that their logits would win, were they not masked
    model = load(write_nanogpt(hf_model, tmp_path / "in"))
    assert (model.config.vocab_size, model.config.used_vocab_size) == (50304, 50257)
    ids = tokens(2, 5)
    with torch.no_grad():
        assert torch.equal(model(ids), hf_model(ids).logits)
        assert int(model(ids)[:, -1].argmax(-1).min()) >= 50257
    for how in ({}, {"do_sample": True, "seed": 1}):
        assert int(minigpt.generate(model, ids, max_new_tokens=6, **how).max()) < 50257
    minigpt.save_pretrained(model, tmp_path / "out")
    assert load(tmp_path / "out").config.used_vocab_size == 50257
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 50304


TOOL = {"content": "<tool>", "special": True}


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"<tool>": 300}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"300": TOOL}, "add_bos_token": True}},
        {"tokenizer_config.json": {"pad_token": "<tool>", "eos_token": "<|endoftext|>"}},
        {"special_tokens_map.json": {"pad_token": TOOL}},
        {},
    ],
    ids=str,
)
def test_tokens_that_a_tokenizer_was_given_later_are_written(files: dict[str, Any], tmp_path: Path) -> None:
    """Wherever they are named; ids that no file names are not."""
    hf_model = reference(vocab_size=320)
    with torch.no_grad():
        hf_model.transformer.wte.weight[300:302] *= 100  # the likeliest; the second still stands for nothing
    saved(hf_model, tmp_path)
    edit_config(tmp_path, used_vocab_size=300)
    backend = tiny_bpe(300)
    if not files:
        backend.add_tokens(["<tool>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    model = load(tmp_path)
    assert model.config.used_vocab_size == minigpt.Tokenizer.from_pretrained(tmp_path).vocab_size == 301
    written = minigpt.generate(model, tokens(4, 5), max_new_tokens=30, do_sample=True, seed=0)[:, 5:]
    assert int(written.max()) == 300


def test_old_and_bare_configs(tmp_path: Path) -> None:
    """Fields that are missing, n_ctx for n_positions, other names of the width."""
    hf_model = reference(n_positions=1024)
    saved(hf_model, tmp_path)
    bare = {"vocab_size": 61, "n_ctx": 1024, "hidden_size": 32, "num_hidden_layers": 2, "n_head": 4, "n_special": 0}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    assert_bit_equal(load(tmp_path), hf_model)
    (tmp_path / "config.json").write_text(json.dumps(bare | {"n_embd": 48}))
    with pytest.raises(ConfigError, match="hidden_size=32 contradicts n_embd=48"):
        load(tmp_path)
