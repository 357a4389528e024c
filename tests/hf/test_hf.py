"""Our blocks in transformers' own tools, each tool beside transformers' own network on the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import TINY, edit_config, edit_tensors, reference, saved, tiny_bpe, tokens
from helpers import assert_close, assert_same_bits
from hf_checks import CHECKS, outcome
from sabotages import GammaBeta
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import minigpt
from minigpt import ConfigError, NormError
from minigpt.hf.model import GPT2LMHeadModel

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("registered")]

SWAPPED = {"h.*.ln_1": "rms", "ln_f": "dyt"}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = saved(reference(), tmp_path_factory.mktemp("published"))
    minigpt.Tokenizer(tiny_bpe()).save(place)
    return place


def load(place: Path, **how: Any) -> GPT2LMHeadModel:
    model = AutoModelForCausalLM.from_pretrained(place, **how)
    assert type(model) is GPT2LMHeadModel
    assert not model.training
    return model


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> torch.Tensor:
    inputs = inputs or {"input_ids": tokens(2, 9)}
    out = model(**inputs)
    return out if isinstance(out, torch.Tensor) else out.logits


def config_json(place: Path) -> dict[str, Any]:
    return json.loads((place / "config.json").read_text())


# --- the same model


@pytest.mark.parametrize(
    "fields",
    [{}, {"tie_word_embeddings": False}, {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}],
    ids=["as published", "untied", "other options"],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_loss_and_hidden_states_are_transformers_own(fields: Any, attention: str, tmp_path: Path) -> None:
    saved(hf_result := reference(**fields), tmp_path)
    hf_result.set_attn_implementation(attention)
    ours = load(tmp_path, arithmetic="reference", attn_implementation=attention)
    x = tokens(3, 11)
    actual, expected = (model(x, labels=x, output_hidden_states=True) for model in (ours, hf_result))
    assert_same_bits(actual.logits, expected.logits, "logits")
    assert_same_bits(actual.loss, expected.loss, "loss")
    assert len(actual.hidden_states) == TINY["n_layer"] + 1
    for ours_, theirs_ in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_same_bits(ours_, theirs_, "hidden states")
    assert isinstance(ours(x, return_dict=False), tuple)


# --- generation


def test_a_pipeline_of_a_model_that_is_not_transformers_says_which_to_open(published: Path) -> None:
    """Without a tokenizer, transformers asks for one before it looks at the model."""
    model, tokenizer = minigpt.from_pretrained(published, device="cpu"), AutoTokenizer.from_pretrained(published)
    with pytest.raises(minigpt.ConfigError, match=r"minigpt\.hf\.GPT2LMHeadModel\.from_pretrained"):
        pipeline("text-generation", model=model, tokenizer=tokenizer)


def test_a_pipeline_from_a_folder_with_a_swapped_norm(published: Path, tmp_path: Path) -> None:
    wide = saved(reference(vocab_size=300), tmp_path / "wide")
    minigpt.Tokenizer(tiny_bpe()).save(wide)
    load(wide, norm="rms").save_pretrained(tmp_path / "rms")
    AutoTokenizer.from_pretrained(wide).save_pretrained(tmp_path / "rms")
    how: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)
    text = pipeline("text-generation", model=str(tmp_path / "rms"), device="cpu")("the dog", **how)[0]["generated_text"]
    model, tokenizer = minigpt.from_pretrained(wide, norm="rms", device="cpu"), minigpt.Tokenizer.from_pretrained(wide)
    assert text == "the dog" + "".join(minigpt.stream(model, tokenizer, "the dog", **how))


# --- which norm


def norms_of(model: GPT2LMHeadModel) -> list[str]:
    return [type(model.transformer.get_submodule(site)).__name__ for site in model.transformer.site_names()]


def test_a_norm_is_chosen_in_the_call_in_the_folder_or_for_all(published: Path, tmp_path: Path) -> None:
    assert set(norms_of(load(published))) == {"FusedLayerNorm"}
    assert set(norms_of(load(published, norm=minigpt.LayerNorm))) == {"LayerNorm"}
    chosen = load(published, norm=SWAPPED)
    assert norms_of(chosen) == ["RMSNorm", "FusedLayerNorm", "RMSNorm", "FusedLayerNorm", "DyT"]
    chosen.save_pretrained(tmp_path)
    minigpt.hf.register(norm="textbook", arithmetic="reference")
    assert load(published).config.arithmetic == "reference"
    assert set(norms_of(load(published))) == {"LayerNorm"}
    assert norms_of(load(tmp_path)) == norms_of(chosen), "the folder's own choice comes before what is for all"
    assert set(norms_of(load(tmp_path, norm="rms"))) == {"RMSNorm"}, "and the call's before the folder's"
    assert AutoConfig.from_pretrained(tmp_path, norm="rms").norm == "rms"
    with pytest.raises(NormError, match="unknown norm 'rmss'"):
        load(published, norm="rmss")
    with pytest.raises(NormError, match=r"no norm site matches 'h\.9'"):
        load(published, norm={"h.9": "rms"})
    with pytest.raises(ConfigError, match="slow"):
        load(published, arithmetic="slow")


def test_a_class_is_chosen_beside_settings_for_generation(published: Path, tmp_path: Path) -> None:
    """Which take what they do not know for settings of their own."""
    minigpt.save_pretrained(minigpt.from_pretrained(published, device="cpu"), tmp_path)
    assert (tmp_path / "generation_config.json").exists()
    model = load(tmp_path, norm=minigpt.LayerNorm, arithmetic="fast")
    assert set(norms_of(model)) == {"LayerNorm"}
    assert not {"norm", "arithmetic"} & vars(model.generation_config).keys()


def test_a_model_from_a_config_alone(published: Path) -> None:
    made = AutoModelForCausalLM.from_config(transformers.GPT2Config(**TINY), norm="rms")
    assert set(norms_of(made)) == {"RMSNorm"}
    std = made.transformer.h[0].mlp.c_fc.weight.std().item()
    narrow = made.transformer.h[0].mlp.c_proj.weight.std().item()
    assert 0.019 < std < 0.021
    assert 0.0095 < narrow < 0.0105, "what adds to the stream starts smaller by the root of their number, here 4"
    assert made.transformer.ln_f.weight.eq(1).all()
    assert made.lm_head.weight is made.transformer.wte.weight


def test_a_norm_stands_at_the_cross_attentions_site_too() -> None:
    config = transformers.GPT2Config(**TINY, add_cross_attention=True)
    model = GPT2LMHeadModel(config, norm={"h.*.ln_cross_attn": "rms"})
    sites = model.transformer.site_names()
    assert sites[:3] == ["h.0.ln_1", "h.0.ln_cross_attn", "h.0.ln_2"]
    assert [site for site, name in zip(sites, norms_of(model), strict=True) if name == "RMSNorm"] == [
        site for site in sites if "cross" in site
    ]


def test_a_model_without_numbers(published: Path) -> None:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(transformers.GPT2Config(**TINY), norm=SWAPPED)
        assert made(torch.zeros(2, 5, dtype=torch.int64)).logits.shape == (2, 5, TINY["vocab_size"])
    assert {tensor.device.type for tensor in made.state_dict().values()} == {"meta"}
    made.to_empty(device="cpu").init_weights()
    assert made.transformer.ln_f.alpha.item() == 0.5
    missing, _ = made.load_state_dict(load_file(published / "model.safetensors"), strict=False)
    assert {*missing} == {"transformer.ln_f.alpha", "lm_head.weight"}
    assert_close(logits(made.eval()), logits(load(published, norm=SWAPPED)), 1e-6, "logits")


def test_an_unswapped_model_is_saved_as_the_gpt2_that_it_is(published: Path, tmp_path: Path) -> None:
    load(published).save_pretrained(tmp_path)
    fields = config_json(tmp_path)
    assert (fields["model_type"], fields["architectures"]) == ("gpt2", ["GPT2LMHeadModel"])
    assert not {"norm", "arithmetic"} & fields.keys()
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(published / "model.safetensors").keys()
    minigpt.hf.unregister()
    hf_result = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf_result) is transformers.GPT2LMHeadModel
    assert torch.equal(logits(hf_result), logits(reference()))
    ours = minigpt.from_pretrained(tmp_path, arithmetic="reference", device="cpu")
    assert torch.equal(logits(ours, input_ids=tokens(2, 9)), logits(reference()))


def test_a_swapped_model_comes_back_and_is_nothing_else_to_others(published: Path, tmp_path: Path) -> None:
    model = load(published, norm=SWAPPED, arithmetic="reference")
    norm: Any = model.transformer.ln_f
    assert norm.alpha.item() == 0.5, "what no checkpoint has is as it was built"
    norm.alpha.data.fill_(0.7)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert [tuple(pair) for pair in again.config.norm] == list(SWAPPED.items())
    assert again.config.arithmetic == "reference"
    assert torch.equal(logits(again), logits(model))
    load(tmp_path, norm="fused", arithmetic="fast").save_pretrained(tmp_path / "plain")
    assert config_json(tmp_path / "plain")["model_type"] == "gpt2"

    minigpt.hf.unregister()
    with pytest.raises(ValueError, match="minigpt-gpt2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = minigpt.from_pretrained(tmp_path, arithmetic="reference", device="cpu")
    assert_close(logits(plain, input_ids=tokens(2, 9)), logits(model), 1e-5, "minigpt reads it too")
    assert torch.equal(logits(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "plain")), logits(reference()))


@pytest.mark.parametrize(("norm", "message"), [
    (["rms"], "norms must be a name or pairs"), (3, r"config\.json asks for the norm"),
])  # fmt: skip
def test_a_folder_that_asks_for_no_norm_at_all(published: Path, tmp_path: Path, norm: Any, message: str) -> None:
    load(published, norm="rms").save_pretrained(tmp_path)
    edit_config(tmp_path, norm=norm)
    with pytest.raises(NormError, match=message):
        load(tmp_path)


def test_a_folder_is_read_as_what_it_is_by_the_class_itself(published: Path, tmp_path: Path) -> None:
    """Patterns that overlap are applied in their order again."""
    model = load(published, norm={"*": "rms", "h.0.*": "textbook", "h.0.ln_1": "dyt"})
    model.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert again.config.model_type == "minigpt-gpt2"
    assert norms_of(again) == ["DyT", "LayerNorm", "RMSNorm", "RMSNorm", "RMSNorm"]
    assert torch.equal(logits(again), logits(model))
    plain = GPT2LMHeadModel.from_pretrained(published).eval()
    assert plain.config.model_type == "gpt2"
    assert torch.equal(logits(plain), logits(load(published)))


def another_norm(model: GPT2LMHeadModel) -> None:
    minigpt.swap_norms(model.transformer, "textbook", "ln_f")


def another_eps(model: GPT2LMHeadModel) -> None:
    model.transformer.ln_f.eps = 1e-3


def deviations(model: GPT2LMHeadModel) -> None:
    minigpt.swap_norms(model.transformer, "frozen", "ln_f")
    minigpt.fit_norms(model.transformer, torch.arange(80).view(4, 20) % TINY["vocab_size"], "ln_f")


@pytest.mark.parametrize("change", [another_norm, another_eps, deviations])
def test_what_the_config_does_not_say_is_not_saved(
    published: Path, tmp_path: Path, change: Callable[[GPT2LMHeadModel], None]
) -> None:
    model = load(published, norm="rms")
    change(model)
    with pytest.raises(NormError, match=r"^ln_f is not as the config says, .*layer_norm_epsilon=\.\.\.\), or keep"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_eps_that_the_call_says_is_saved(published: Path, tmp_path: Path) -> None:
    model = load(published, norm="rms", layer_norm_epsilon=1e-3)
    assert model.transformer.ln_f.eps == 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


NORM_FILE = """
import torch
from pathlib import Path

Path(__file__).with_name("canary").touch()

class Scaled(torch.nn.LayerNorm):
    def __init__(self, size, eps, bias=True):
        super().__init__(size, eps)
        self.register_buffer("twice", torch.full((), 2.0), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.twice
"""


def test_code_that_a_folder_names_is_run_only_when_asked_for(published: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NORM_FILE)
    norm = f"{tmp_path / 'mine.py'}:Scaled"
    model = load(published, norm=norm)
    with torch.no_grad():
        body: Any = model.transformer
        twice = torch.nn.functional.layer_norm(x := torch.randn(3, 32), (32,), body.ln_f.weight, body.ln_f.bias) * 2
        assert_close(body.ln_f(x), twice, 1e-6, "a buffer that no checkpoint has is as it was built")
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "canary").unlink()
    with pytest.raises(NormError, match=r"not a registered one, and code is not run because a file names it") as raised:
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "canary").exists()
    assert torch.equal(logits(load(tmp_path / "saved", norm=norm)), logits(model))


# --- what is refused


def test_fields_of_other_networks_are_refused(tmp_path: Path) -> None:
    odd = edit_config(saved(reference(), tmp_path), rotary_base=10000)
    with pytest.raises(ConfigError, match=r"^rotary_base is of another network than GPT-2"):
        load(odd)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHECKS)
def test_what_transformers_does_with_a_model_works_the_same(name: str) -> None:
    assert outcome(CHECKS[name]) == "same"


def test_nothing_is_left_behind(published: Path) -> None:
    minigpt.hf.register(norm="rms")
    minigpt.hf.unregister()
    minigpt.hf.unregister()
    assert type(AutoModelForCausalLM.from_pretrained(published)) is transformers.GPT2LMHeadModel
    minigpt.hf.register()
    assert set(norms_of(load(published))) == {"FusedLayerNorm"}
    other = transformers.AutoModelForSequenceClassification.from_pretrained(published)
    assert type(other) is transformers.GPT2ForSequenceClassification


# --- training and adapting


def test_trainer_learns_and_saves_what_loads_again(published: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, of the extra hf")
    model = load(published, norm="textbook")
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens(4, 12)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [float(step["loss"]) for step in trainer.state.log_history if "loss" in step]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.8 * losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model.eval()))
    assert again.config.norm == "textbook"
    assert "lm_head.weight" not in load_file(tmp_path / "saved/model.safetensors")


@pytest.mark.parametrize("norm", ["fused", "textbook", "dyt", GammaBeta])
def test_trainer_decays_the_weights_that_it_decays_in_transformers_own(
    published: Path, tmp_path: Path, norm: str | type
) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, of the extra hf")
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)

    def decayed(model: Any) -> set[str]:
        trainer = transformers.Trainer(model=model, args=arguments)
        return set(trainer.get_decay_parameter_names(model))

    hf_result = decayed(transformers.GPT2LMHeadModel.from_pretrained(published))
    assert "transformer.h.0.attn.c_attn.weight" in hf_result
    assert decayed(load(published, norm=norm)) == hf_result


def test_peft_knows_the_layers_of_a_plain_gpt2_by_itself(published: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is of the extra hf")
    config = peft.LoraConfig(fan_in_fan_out=True, task_type="CAUSAL_LM")
    ours = peft.get_peft_model(load(published), config).get_nb_trainable_parameters()[0]
    assert ours == peft.get_peft_model(reference(), config).get_nb_trainable_parameters()[0] > 0


# --- the rest of what a PreTrainedModel does


@pytest.mark.parametrize("tied", [True, False])
def test_token_embeddings_can_be_resized(tied: bool, tmp_path: Path) -> None:
    saved(hf_result := reference(tie_word_embeddings=tied), tmp_path)
    ours = load(tmp_path)
    ours.resize_token_embeddings(70)
    assert ours.config.vocab_size == 70
    assert (ours.lm_head.weight is ours.transformer.wte.weight) == tied
    assert logits(ours).shape[-1] == logits(ours, input_ids=tokens(1, 3) + 9).shape[-1] == 70
    assert_close(logits(ours)[..., : TINY["vocab_size"]], logits(hf_result), 1e-5, "the ids of old")
    ours.save_pretrained(tmp_path / "wider")
    assert_close(logits(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "wider")), logits(ours), 1e-5, "saved")


@pytest.mark.parametrize("size", [40, 90])
def test_of_another_size_nobody_says_how_many_ids_are_in_use(size: int, tmp_path: Path) -> None:
    saved(reference(), tmp_path)
    edit_config(tmp_path, used_vocab_size=50)
    ours = load(tmp_path)
    ours.resize_token_embeddings(TINY["vocab_size"])
    assert ours.config.used_vocab_size == 50, "the same size"
    ours.resize_token_embeddings(size)
    assert (len(ours.transformer.wte.weight), ours.config.vocab_size) == (size, size)
    assert not hasattr(ours.config, "used_vocab_size")
    ours.save_pretrained(tmp_path / "out")
    assert minigpt.from_pretrained(tmp_path / "out").config.used_vocab_size is None


def test_a_missing_tensor_starts_as_in_a_new_model(tmp_path: Path) -> None:
    saved(reference(), tmp_path)
    gone = {"transformer.ln_f.weight", "transformer.h.1.mlp.c_proj.weight"}
    edit_tensors(tmp_path, lambda tensors: {name: value for name, value in tensors.items() if name not in gone})
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(told["missing_keys"]) == gone
    assert model.transformer.ln_f.weight.eq(1).all()
    assert 0.009 < model.transformer.h[1].mlp.c_proj.weight.std() < 0.011
    assert torch.equal(model.transformer.ln_f.bias, reference().transformer.ln_f.bias)
