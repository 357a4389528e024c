"""What a verdict reaches: small faults and their places, all positions and tokens, shifts, and files that change."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from judgements import PROMPTS
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

import minigpt
from minigpt.judge.reading import Text, recorded
from minigpt.judge.texts import Texts, lengths_of, notes_on_length
from minigpt.judge.verdict import largest_jump
from minigpt.report.fields import PlaceOff
from minigpt.shape import Shape

DEMO = minigpt.Recipe("demo").place()


@pytest.fixture(scope="module")
def demo_original() -> minigpt.Original:
    return minigpt.Original("demo", gradients=True, device="cpu")


@pytest.fixture
def demo() -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(DEMO).eval()


# Places


@pytest.mark.parametrize(
    ("path", "by", "place"),
    [("h.1.attn.c_attn", 1e-3, "h.1.ln_2"), ("h.2.mlp.c_fc", 2e-4, "h.2"), ("h.0.attn.c_proj", 2e-4, "h.0.ln_2")],
)
def test_a_small_fault_is_named_by_the_largest_jump(
    demo_original: minigpt.Original, demo: GPT2LMHeadModel, path: str, by: float, place: str
) -> None:
    with torch.no_grad():
        demo.transformer.get_submodule(path).weight[0, 7] += by
    report = demo_original.judge(demo, gradients=False)
    ratios = [(site.site, site.propagated_error / site.noise) for site in report.norm_sites]
    assert not report.passed
    assert report.first_off.place == place, ratios
    assert any(f" {place}" in reason for reason in report.reasons)
    assert report.first_off.place in str(report)


def test_without_a_jump_no_place_is_named() -> None:
    places = [PlaceOff(name, 1.0, 1.0, ratio) for name, ratio in (("a", 1.2), ("b", 0.3), ("c", 2.0))]
    assert largest_jump(places) is None
    assert largest_jump([]) is None
    named = largest_jump([*places, PlaceOff("d", 1.0, 1.0, 5.0), PlaceOff("e", 1.0, 1.0, 7.9)])
    assert (named.place, named.ratio_before) == ("d", 2.0)


# Positions and tokens


def test_the_texts_reach_every_position_and_every_token(demo_original: minigpt.Original) -> None:
    config, reach = demo_original.truth.facts.shape, demo_original.judge(gradients=False).coverage
    assert (reach.positions, reach.tokens) == (config.n_positions, config.vocab_size)
    assert (reach.context, reach.vocabulary) == (config.n_positions, config.vocab_size)


def last_position(model: GPT2LMHeadModel) -> None:
    row = model.transformer.wpe.weight.data[-1]
    row += 0.5 * torch.arange(len(row)).sin()  # one number for all channels would be a mean, which every norm removes


def one_token(model: GPT2LMHeadModel) -> None:
    """A token is read as 0, though the head still knows it."""
    model.transformer.wte.register_forward_pre_hook(lambda _, args: (args[0].where(args[0] != 777, 0),))


@pytest.mark.parametrize("fault", [last_position, one_token])
def test_what_the_prompts_do_not_reach(
    demo_original: minigpt.Original, demo: GPT2LMHeadModel, fault: Callable[[Any], None]
) -> None:
    fault(demo)
    report = demo_original.judge(demo, gradients=False)
    assert not report.passed
    assert report.text.first_off is not None


def test_the_last_position_of_a_window_of_a_file(tmp_path: Path, demo: GPT2LMHeadModel) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a young gardener named Tom. " * 40)
    demo_original = minigpt.Original("demo", text=tmp_path / "text", max_new_tokens=1, device="cpu")
    plain = demo_original.judge(demo)
    last_position(demo)
    report = demo_original.judge(demo)
    assert plain.passed
    assert not report.passed
    assert report.text.first_off.position == demo_original.truth.facts.shape.n_positions - 1
    assert report.distribution == plain.distribution, "it counts only where the next window's first token is known"


class WrongLate(torch.autograd.Function):
    """The gradient of later tokens is 1 % off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        is_late = torch.arange(grads[0].shape[1]) > 100
        return grads[0] * (1 + 0.01 * is_late[:, None])


def test_gradients_of_the_long_text_are_compared(demo_original: minigpt.Original) -> None:
    class Late(minigpt.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return WrongLate.apply(super().forward(x))

    report = demo_original.judge(norm=Late, sites="h.1.ln_1")
    assert report.logits.ratio < 2
    assert not report.passed
    assert "gradients" in report.reasons[0]


# Equal distributions


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "less their mean": lambda logits: logits - logits.mean(-1, keepdim=True),
    "log-probabilities": lambda logits: logits.log_softmax(-1),
    "plus 7": lambda logits: logits + 7,
}


@pytest.mark.parametrize("shift", SHIFTS)
def test_logits_that_are_shifted_at_each_position(
    demo_original: minigpt.Original, demo: GPT2LMHeadModel, shift: str
) -> None:
    report = demo_original.judge(lambda ids: SHIFTS[shift](demo(ids).logits.detach()), gradients=False)
    assert not report.passed
    assert report.distribution.kl_mean < 1e-9
    assert report.logits.ratio_without_shift < 2 < report.logits.ratio
    assert any("shifted by one constant" in reason for reason in report.reasons)
    assert demo_original.judge(
        lambda ids: SHIFTS[shift](demo(ids).logits.detach()), gradients=False, budget="kl=1e-9"
    ).passed


def test_another_fault_is_no_shift(demo_original: minigpt.Original, demo: GPT2LMHeadModel) -> None:
    report = demo_original.judge(lambda ids: 1.001 * demo(ids).logits.detach(), gradients=False)
    assert not report.passed
    assert not any("shift" in reason for reason in report.reasons)


# Options


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"attention": "eager"}, {"device": "cpu"}, {"norm": "rms"}])
def test_options_beside_a_recipe_are_refused(demo_original: minigpt.Original, option: dict[str, str]) -> None:
    for judge in (minigpt.parity, demo_original.judge):
        with pytest.raises(minigpt.ConfigError) as caught:
            judge(minigpt.Recipe("demo"), **option)
        assert caught.value.argument == next(iter(option))


def test_a_search_of_a_function_is_refused_by_its_own_name(demo_original: minigpt.Original) -> None:
    for option in ("sensitivity", "remove", "bisect"):
        with pytest.raises(minigpt.ConfigError) as caught:
            demo_original.judge(lambda ids: None, **{option: True})
        assert caught.value.argument == option


# Files that change, and what is not a number


def test_a_folder_that_is_saved_while_it_is_judged(folder: Path, tmp_path: Path) -> None:
    model, place = GPT2LMHeadModel.from_pretrained(folder), tmp_path / "model"
    model.save_pretrained(place)

    def save(step: str, done: float) -> None:
        if step.startswith("transformers"):
            model.transformer.h[0].ln_1.weight.data += 0.1
            model.save_pretrained(place)

    with pytest.raises(minigpt.CheckpointError, match="was saved to"):
        minigpt.Original(place, prompts=PROMPTS, device="cpu", progress=save)
    demo_original = minigpt.Original(place, prompts=PROMPTS, max_new_tokens=0, device="cpu")
    assert demo_original.judge().passed
    model.save_pretrained(place)
    with pytest.raises(minigpt.CheckpointError, match="was saved to"):
        demo_original.judge()


@pytest.fixture(scope="module")
def outputs(demo_original: minigpt.Original) -> dict[str, Tensor]:
    """What another program writes: everything, for every text of the record."""
    model, tensors = GPT2LMHeadModel.from_pretrained(DEMO), {}
    places = [*demo_original.truth.facts.sites, *demo_original.truth.facts.blocks]
    for n, text in enumerate(demo_original.truth.texts.all):
        with torch.no_grad(), recorded(model.transformer, places) as (_, kept):
            tensors[f"logits.{n}"] = model(torch.tensor([text.ids])).logits[0].clone()
        tensors |= {f"{place}.{n}": y[0].clone() for place, y in kept.items()}
    return tensors


def test_a_program_may_write_every_place_of_every_text(
    demo_original: minigpt.Original, outputs: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(outputs, tmp_path / "file")
    report = demo_original.judge_outputs(tmp_path / "file", gradients=False)
    assert report.passed, report.reasons
    assert [site.site for site in report.norm_sites] == demo_original.truth.facts.sites


@pytest.mark.parametrize(
    ("key", "named"), [("logits.1", "text 1 are NaN from position 3"), ("h.1.ln_2.0", "h.1.ln_2's")]
)
def test_a_nan_in_a_file_fails_with_its_place(
    demo_original: minigpt.Original, outputs: dict[str, Tensor], tmp_path: Path, key: str, named: str
) -> None:
    broken = copy.deepcopy(outputs)
    broken[key][3:, 5] = math.nan
    broken["logits.0"][0, 0] += 1  # what is NaN at a norm alone is not in the logits
    save_file(broken, tmp_path / "file")
    report = demo_original.judge_outputs(tmp_path / "file", gradients=False)
    assert report.outcome == "FAIL"
    assert any(named in reason for reason in report.reasons), report.reasons


def test_a_record_of_another_version_is_refused(demo_original: minigpt.Original, tmp_path: Path) -> None:
    demo_original.save(tmp_path / "record")
    with safe_open(tmp_path / "record", "pt") as record:
        metadata = record.metadata()
    tensors = load_file(tmp_path / "record")
    save_file(tensors, tmp_path / "older", metadata=metadata | {"minigpt": '{"model": "demo"}'})
    del tensors["logits.0"]
    save_file(tensors, tmp_path / "torn", metadata=metadata)
    for name, why in (("older", "another version"), ("torn", r"logits\.0")):
        with pytest.raises(minigpt.CheckpointError, match=why):
            minigpt.Original.load(tmp_path / name)


def test_int8_weights_have_no_gradients_and_the_report_says_so(demo_original: minigpt.Original) -> None:
    report = demo_original.judge(quantize="int8", gradients=True)
    assert report.missing == ["gradients"]
    assert "--gradients compares them" not in str(report)


def test_a_model_has_its_own_norms_again_after_a_search(demo_original: minigpt.Original) -> None:
    model = minigpt.from_pretrained("demo", norm="rms", device="cpu")
    before = model.norm_modules()
    demo_original.judge(model, sensitivity=True, bisect=True, budget="kl=1", gradients=False)
    assert all(module is before[site] for site, module in model.norm_modules().items())


def test_the_worst_position_has_its_place(demo_original: minigpt.Original) -> None:
    worst = demo_original.judge(norm="rms", gradients=False).distribution.worst
    with torch.inference_mode():
        model = minigpt.from_pretrained("demo", norm="rms", device="cpu")
        ids = torch.tensor([demo_original.truth.texts.prompts[worst.window].ids])
        q = model(ids)[0].double().log_softmax(-1)
    p = demo_original.truth.logits(demo_original.truth.texts.prompts[worst.window]).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert int(kl.argmax()) == worst.position
    text = demo_original.truth.texts.decode(ids[0, : worst.position + 1].tolist())
    assert text.endswith(worst.text)


# What the texts are too short to show


def test_every_report_says_which_windows_and_scaled_positions_no_text_reaches(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    model = architectures.random_model("mistral", sliding_window=24, rope_parameters=scaling)
    model.save_pretrained(tmp_path)
    short = minigpt.Original(tmp_path, prompts=[[5, 17, 42]], max_new_tokens=4, device="cpu")
    long = minigpt.Original(tmp_path, prompts=[[*range(1, 31)]], max_new_tokens=4, device="cpu")
    for judged in (lambda ids: model(ids).logits, lambda ids: 2 * model(ids).logits):
        report = short.judge(judged)
        window, scaled = (note for note in report.notes if note.startswith("This model has "))
        assert "a window of 24 positions" in window
        assert "rope scaling (llama3) for more than 16 positions" in scaled
        assert "--text FILE with more tokens shows it" in window
        assert not any(note.startswith("This model has ") for note in long.judge(judged).notes)


def test_a_length_that_no_text_reaches_has_no_way_to_it() -> None:
    config = architectures.config_of("mistral", sliding_window=4096, max_position_embeddings=8192)
    for vocabulary, way in ((96, "--prompts FILE with a longer prompt shows it"), (2**20, "no text that the judge")):
        config.vocab_size = vocabulary
        (note,) = notes_on_length(config, Texts([Text.whole([1, 2])], "1 list of ids"), Shape.of(config))
        assert way in note
    for name in architectures.ARCHITECTURES:
        assert all(length > 1 for length in lengths_of(architectures.config_of(name)).values())
    assert lengths_of(architectures.config_of("qwen2", use_sliding_window=False, sliding_window=8)) == {}
    assert lengths_of(architectures.config_of("gemma3", layer_types=["full_attention"] * 2, sliding_window=8)) == {}
