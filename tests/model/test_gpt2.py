"""The whole network: its shape, its first weights, its modes, and what it refuses to read."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import reference
from helpers import SMALL, assert_close, assert_same_bits, left_padding, random_ids, small_model
from torch import nn
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import GPT2, ConfigError, GenerationError, GPT2Config, LayerNorm, NormError
from minigpt.engine.parts import head_rows

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
}

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = GPT2(GPT2Config.preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_names_and_layouts_are_those_of_a_checkpoint(tied: bool) -> None:
    fields = SMALL | {"n_inner": 100, "tie_word_embeddings": tied}
    hf = {
        name.removeprefix("transformer."): tuple(tensor.shape)
        for name, tensor in GPT2LMHeadModel(TheirConfig(**fields)).state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    ours = {name: tuple(tensor.shape) for name, tensor in GPT2(GPT2Config(**fields)).state_dict().items()}
    assert ours == hf
    assert ours["h.1.mlp.c_fc.weight"] == (48, 100), "stored (in, out)"


def test_norm_sites_come_in_the_order_data_meets_them() -> None:
    model, met = small_model(), []
    for name, module in model.named_modules():
        if isinstance(module, LayerNorm):
            module.register_forward_hook(lambda *_, name=name: met.append(name))
    model(random_ids(1, 3))
    assert model.site_names() == met == ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]
    assert [*model.norm_modules().items()] == [(site, model.get_submodule(site)) for site in met]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@torch.no_grad()
def test_the_head_on_the_last_position_alone(tied: bool) -> None:
    model = small_model(dtype=torch.float64, tie_word_embeddings=tied)
    ids = random_ids(2, 9)
    hidden = model.hidden_states(ids)
    assert hidden.shape == (2, 9, 48)
    assert_close(model.head(hidden[:, -1:]), model(ids)[:, -1:], 1e-14, "the last position")
    weight = model.wte.weight if tied else model.lm_head.weight
    assert_close(model(ids), hidden @ weight.T, 1e-14, "all positions")


# First weights (GPT-2's paper, section 2.3).


@pytest.mark.parametrize("std", [0.02, 0.1])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_first_weights_are_those_of_the_paper(tied: bool, std: float) -> None:
    fields = {"vocab_size": 500, "n_positions": 256, "n_embd": 128, "n_layer": 8, "n_head": 4}
    model = GPT2(GPT2Config(**fields, initializer_range=std, tie_word_embeddings=tied))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif ".ln_" in f".{name}":
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = std / math.sqrt(2 * 8) if "c_proj" in name else std
            spread = expected / math.sqrt(parameter.numel())  # of the mean that so many draws have
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 5 * spread, name


# Training.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NO_DROPOUT)
def test_each_dropout_acts_and_follows_from_the_seed(name: str, attention: str, device: torch.device) -> None:
    model = small_model(attention=attention, device=device, **NO_DROPOUT | {name: 0.5})
    ids = random_ids(2, 9, device=device)
    kept = model(ids)
    model.train()
    torch.manual_seed(1)
    dropped = model(ids)
    torch.manual_seed(1)
    assert_same_bits(model(ids), dropped, "from the same seed")
    assert not torch.equal(model(ids), dropped), "from where the generator stands now"
    assert (dropped - kept).abs().max() > 0.1


@pytest.mark.parametrize("norm", ["fused", "textbook"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_reach_every_parameter_of_a_padded_batch(attention: str, norm: str, device: torch.device) -> None:
    model = small_model(norm, attention=attention, device=device, tie_word_embeddings=False).train()
    model(random_ids(2, 9, device=device), left_padding((6, 9), 9, device)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["whole", "padded"])
@pytest.mark.usefixtures("unchecked")
@torch.no_grad()
def test_compiled_it_is_the_same_model(masked: bool) -> None:
    """Traced as one graph, and run by PyTorch's own kernels."""
    model = small_model()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch, seq in ((2, 9), (2, 1), (2, 7)):
        ids, mask = random_ids(batch, seq), left_padding((1, seq), seq) if masked else None
        assert_close(compiled(ids, mask), model(ids, mask), 1e-6, f"compiled, {seq} tokens")


@pytest.mark.usefixtures("unchecked")
def test_exported_it_reads_texts_of_any_length() -> None:
    model, ids = small_model(), random_ids(2, 9)
    sizes = {0: torch.export.Dim("batch", max=16), 1: torch.export.Dim("seq", min=2, max=128)}
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), dynamic_shapes=(sizes,)).module()
    for batch, seq in ((2, 9), (1, 128), (7, 2)):
        ids = random_ids(batch, seq)
        assert_close(exported(ids), model(ids), 1e-6, f"{batch} texts of {seq}")


# What it refuses.

IDS = torch.tensor([[5, 1, 7]])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"input_ids": torch.tensor([[0, -1]])}, "^token id -1 is outside the vocabulary of 83$"),
        ({"input_ids": torch.tensor([[0, 83]])}, "^token id 83 is outside the vocabulary of 83$"),
        ({"input_ids": IDS.repeat(1, 3)}, "^9 tokens do not fit the model's context of 8$"),
        ({"input_ids": IDS.repeat(1, 4), "attention_mask": left_padding((9,), 12)}, "^9 tokens do not fit"),
        ({"input_ids": IDS[:0]}, r"^input_ids is empty: its shape is \(0, 3\)$"),
        ({"input_ids": IDS[0]}, "^input_ids must be int64 or int32"),
        ({"input_ids": IDS.float()}, "^input_ids must be int64 or int32"),
        ({"input_ids": [[1, 2]]}, r"^input_ids must be a tensor .* got list; use torch\.tensor\(\[ids\]"),
        ({"position_ids": IDS - 6}, "^position -5 is outside"),
        ({"position_ids": IDS + 1}, "^position 8 is outside"),
        ({"position_ids": IDS.repeat(2, 1)}, "^position_ids must have shape"),
        ({"position_ids": IDS.float()}, "^position_ids must be int64 or int32"),
        ({"attention_mask": torch.ones(1, 2)}, r"^attention_mask must have shape \(1, 3\), "),
        ({"attention_mask": [[1] * 3]}, r"^attention_mask must be a tensor \(batch, seq\), got list$"),
        ({"attention_mask": torch.tensor([[-torch.inf, 0.0, 0.0]])}, "^attention_mask must hold 1 for real tokens"),
        ({"cache": ()}, "^cache must be .* got tuple"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_a_forward_refuses(how: dict[str, Any], message: str, device: torch.device) -> None:
    """On a GPU an index out of range would end the process's use of it."""
    model = small_model(n_positions=8, device=device)
    supplied = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in how.items()}
    with pytest.raises(GenerationError, match=message):
        model(**{"input_ids": IDS.to(device)} | supplied)


@pytest.mark.parametrize(
    ("config", "how", "kind", "message"),
    [
        (SMALL, {"attention": "flash"}, ConfigError, "attention must be sdpa or eager, got 'flash'"),
        (SMALL, {"norm": "bachnorm"}, NormError, "unknown norm 'bachnorm'; registered are .*fused.*textbook"),
        (transformers.GPT2Config(), {}, ConfigError, "got transformers's GPT2Config; use its preset or "),
    ],
)
def test_what_a_model_is_not_made_of(config: Any, how: dict[str, Any], kind: type[ValueError], message: str) -> None:
    with pytest.raises(kind, match=message):
        GPT2(GPT2Config(**config) if config is SMALL else config, **how)


def test_a_model_of_another_class_is_told_so(tmp_path: Path) -> None:
    hf: Any = reference()
    prompt, tokenizer = torch.tensor([[1, 2]]), minigpt.Tokenizer.from_pretrained("demo")
    for use in (
        lambda: minigpt.generate(hf, prompt, max_new_tokens=2),
        lambda: minigpt.stream(hf, tokenizer, "the dog", max_new_tokens=2),
        lambda: minigpt.generation.complete(hf, tokenizer, ["the dog"], max_new_tokens=2),
        lambda: minigpt.fold_norms(hf),
        lambda: minigpt.save_pretrained(hf, tmp_path / "saved"),
        lambda: minigpt.load_norms(hf, "demo"),
    ):
        with pytest.raises(ConfigError, match=r"model must be a minigpt\.GPT2.* got .*transformers.*GPT2LMHeadModel"):
            use()
    wrapped: Any = torch.compile(small_model(), backend="eager")
    assert minigpt.generate(wrapped, prompt, max_new_tokens=2, eos_token_id=None).shape == (1, 4)


def with_bias(head: nn.Linear) -> nn.Module:
    head.bias = nn.Parameter(torch.randn(head.out_features))
    return head


def with_hook(head: nn.Linear) -> nn.Module:
    head.register_forward_hook(lambda module, supplied, y: y * 2)
    return head


def with_forward(head: nn.Linear) -> nn.Module:
    head.forward = lambda x: x @ head.weight.t() / 2
    return head


@pytest.mark.parametrize("change", [with_bias, with_hook, with_forward, lambda head: nn.Sequential(head, nn.Tanh())])
@pytest.mark.parametrize("arithmetic", ["fast", "reference"])
@torch.no_grad()
def test_a_head_that_is_more_than_a_matrix_is_asked(change: Callable[[nn.Linear], nn.Module], arithmetic: str) -> None:
    model, ids = small_model(tie_word_embeddings=False, arithmetic=arithmetic), random_ids(2, 5)
    plain = model(ids)
    model.lm_head = change(model.lm_head)
    assert_same_bits(model(ids), model.lm_head(model.hidden_states(ids)), "logits")
    assert not torch.equal(model(ids), plain)
    with pytest.raises(ConfigError, match=r"lm_head must be a plain nn\.Linear without bias or hooks"):
        head_rows(model)
