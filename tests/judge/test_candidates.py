"""What can be judged beside our own models: modules, functions, files; and the place at which a fault is named."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judgements import PROMPTS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import minigpt


class Wrapped(nn.Module):
    """A model in a module of somebody's own, as trainers wrap it; it stays in training mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).logits


def test_anybodys_model_is_judged_with_the_parts_that_it_gives(
    original: minigpt.Original, hf_model: GPT2LMHeadModel, folder: Path
) -> None:
    ours = minigpt.from_pretrained(folder, device="cpu").train()
    for candidate, missing in (
        (ours, []),
        (hf_model, []),
        (Wrapped(hf_model), ["tokens one by one"]),
        (lambda ids: hf_model(ids), ["norms and blocks", "tokens one by one", "gradients"]),
        (lambda ids: hf_model(ids).logits.detach().numpy(), ["norms and blocks", "tokens one by one", "gradients"]),
    ):
        report = original.judge(candidate)
        assert report.passed, report.reasons
        assert report.missing == missing
        assert [site.site for site in report.norm_sites] == (
            [] if "norms and blocks" in missing else original.truth.facts.sites
        )
        assert report.logits.ratio < 1.5
    assert (ours.training, hf_model.training) == (True, False)
    assert not any(parameter.grad is not None for parameter in (*ours.parameters(), *hf_model.parameters()))


def test_an_object_that_is_called_has_its_class_s_name(original: minigpt.Original, hf_model: GPT2LMHeadModel) -> None:
    class Mine:
        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            return hf_model(ids).logits

    assert original.judge(Mine()).model.endswith("Mine")


def test_a_folded_checkpoint_is_judged_without_the_norms_that_it_leaves_out(folder: Path, tmp_path: Path) -> None:
    """transformers fills them in, and so does the judge's reference."""
    model = minigpt.fold_norms(minigpt.from_pretrained(folder, device="cpu"))
    minigpt.save_pretrained(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items() if ".ln_1." not in name}
    save_file(tensors, file, {"format": "pt"})
    assert minigpt.parity(tmp_path, prompts=PROMPTS, max_new_tokens=2, device="cpu").passed


def test_the_reference_itself_is_at_the_noise_floor(original: minigpt.Original, hf_model: GPT2LMHeadModel) -> None:
    report = original.judge(hf_model)
    assert report.logits.ratio == 1.0
    for site in report.norm_sites:
        assert site.propagated_error == pytest.approx(site.noise)
    for block in report.blocks:
        assert block.error == pytest.approx(block.noise)
    assert {row.parameter for row in report.gradients} >= {"wte.weight", "ln_f.bias", "inputs_embeds"}
    assert max(row.ratio for row in report.gradients) <= 1.1


@pytest.mark.parametrize(
    ("candidate", "complaint"),
    [
        (lambda ids: "words", "logits"), (lambda ids: torch.zeros(1, 3), "shape"),
        (lambda ids: torch.zeros(*ids.shape, 61, dtype=torch.long), "int64"), (7, "int"),
    ],
)  # fmt: skip
def test_what_gives_no_logits_is_refused(original: minigpt.Original, candidate: Any, complaint: str) -> None:
    with pytest.raises(minigpt.ConfigError, match=complaint) as caught:
        original.judge(candidate)
    assert caught.value.argument == "candidate"


def test_a_module_needs_an_original_and_takes_no_options_of_opening(hf_model: GPT2LMHeadModel, folder: Path) -> None:
    for how, argument in (({}, "against"), ({"against": folder, "norm": "rms"}, "norm")):
        with pytest.raises(minigpt.ConfigError) as caught:
            minigpt.parity(hf_model, **how)
        assert caught.value.argument == argument


def test_code_that_raises_is_named(original: minigpt.Original) -> None:
    def broken(ids: Tensor) -> Tensor:
        raise KeyError("ids")

    class Broken(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return broken(input) if input.shape[1] > 5 else super().forward(input)

    for candidate, name in (({"candidate": broken}, ".broken"), ({"norm": Broken}, " with .*Broken")):
        with pytest.raises(minigpt.NormError, match=f"{name} raised KeyError") as caught:
            original.judge(**candidate)
        assert Path(__file__).name in str(caught.value)


def test_assert_parity_says_why(hf_model: GPT2LMHeadModel, folder: Path) -> None:
    how = {"prompts": PROMPTS, "max_new_tokens": 2}
    minigpt.testing.assert_parity(hf_model, folder, **how)
    wrong = copy.deepcopy(hf_model)
    with torch.no_grad():
        wrong.transformer.h[1].mlp.c_fc.bias += 0.1
    with pytest.raises(AssertionError, match=r"^FAIL") as caught:
        minigpt.testing.assert_parity(wrong, folder, **how)
    assert "h.1" in str(caught.value)


def test_the_originals_own_source_is_the_same_model_however_it_is_named() -> None:
    original = minigpt.Original("demo", prompts=["Once upon"], max_new_tokens=2, device="cpu")
    louder = type("Louder", (minigpt.LayerNorm,), {"forward": lambda norm, x: 1.1 * minigpt.LayerNorm.forward(norm, x)})
    for candidate in (None, "demo", minigpt.Recipe("demo").place()):
        report = original.judge(candidate, norm=louder)
        assert (report.outcome, report.model, report.against) == ("FAIL", "demo", None)
    with pytest.raises(minigpt.ConfigError) as caught:
        original.judge(minigpt.Recipe("demo", dtype="bfloat16"))
    assert caught.value.argument == "dtype"
    eager = original.judge(minigpt.Recipe("demo", attention="eager"))
    assert (eager.passed, eager.attention) == (True, "eager")


# A file of what another program wrote, with a fault of each kind


def residual_missing(model: GPT2LMHeadModel) -> None:
    block = model.transformer.h[0]
    block.register_forward_hook(lambda _, args, output: output - args[0])


def other_gelu(model: GPT2LMHeadModel) -> None:
    model.transformer.h[1].mlp.act = nn.GELU()


def other_eps(model: GPT2LMHeadModel) -> None:
    model.transformer.h[1].ln_2.eps = 1e-3


def shifted_positions(model: GPT2LMHeadModel) -> None:
    model.transformer.wpe.weight.data = model.transformer.wpe.weight.data.roll(1, 0)


def untied_head(model: GPT2LMHeadModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.01)


FAULTS: dict[str | None, Callable[[GPT2LMHeadModel], None]] = {
    "h.0": residual_missing, "h.1": other_gelu, "h.1.ln_2": other_eps, "h.0.ln_1": shifted_positions,
    None: untied_head,
}  # fmt: skip


def write_outputs(original: minigpt.Original, model: GPT2LMHeadModel, file: Path) -> None:
    """What another program would write: logits, and the outputs of norms and blocks, by the record's names."""
    tensors = {}
    for n, text in enumerate(original.truth.texts.prompts):
        places = {
            place: model.get_submodule(f"transformer.{place}")
            for place in (*original.truth.facts.sites, *original.truth.facts.blocks)
        }
        hooks = [
            module.register_forward_hook(
                lambda _, __, output, place=place, n=n: tensors.update({f"{place}.{n}": output[0].detach().clone()})
            )
            for place, module in places.items()
        ]
        tensors[f"logits.{n}"] = model(torch.tensor([text.ids])).logits[0].detach().clone()
        for hook in hooks:
            hook.remove()
    save_file(tensors, file)


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_is_named_by_the_first_output_that_it_touches(
    original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path, place: str | None
) -> None:
    right, wrong = copy.deepcopy(hf_model), copy.deepcopy(hf_model)
    FAULTS[place](wrong)
    write_outputs(original, right, tmp_path / "right")
    write_outputs(original, wrong, tmp_path / "wrong")
    assert original.judge_outputs(tmp_path / "right", gradients=False).passed
    report = original.judge_outputs(tmp_path / "wrong", gradients=False)
    assert not report.passed
    assert (report.first_off and report.first_off.place) == place
    assert place is None or any(f" {place}'s" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop("logits.1"), r"no logits\.1"),
        (lambda tensors: tensors.update({"h.7.0": torch.zeros(14, 32)}), r"h\.7\.0"),
        (lambda tensors: tensors.update({"logits.0": torch.zeros(2, 61)}), r"logits\.0 must have shape"),
        (lambda tensors: tensors.update({"logits.0": torch.zeros(1, 14, 61)}), r"leave the batch axis out, as x\[0\]"),
        (lambda tensors: tensors.update({"logits.0": torch.zeros(1, 61)}), r"these are of one position"),
        (lambda tensors: tensors.update({"logits.0": torch.zeros(14, 64)}), r"cut to the first 61 columns"),
        (lambda tensors: tensors.update({"ln_f.0": torch.zeros(14, 32, dtype=torch.long)}), r"ln_f\.0"),
    ],
)
def test_a_file_that_does_not_fit_the_record(
    original: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path, change: Any, complaint: str
) -> None:
    write_outputs(original, hf_model, tmp_path / "file")
    tensors = load_file(tmp_path / "file")
    change(tensors)
    save_file(tensors, tmp_path / "file")
    with pytest.raises(minigpt.CheckpointError, match=complaint):
        original.judge_outputs(tmp_path / "file", gradients=False)


# The record


def test_a_record_holds_what_transformers_says(original: minigpt.Original, folder: Path, tmp_path: Path) -> None:
    original.save(tmp_path / "record")
    tensors, truth = load_file(tmp_path / "record"), GPT2LMHeadModel.from_pretrained(folder).double()
    for n in range(2):
        ids = tensors[f"ids.{n}"]
        assert (ids.dtype, ids[: len(PROMPTS[n])].tolist()) == (torch.int64, PROMPTS[n])
        with torch.no_grad():
            states = truth(ids[None], output_hidden_states=True)
        np.testing.assert_allclose(tensors[f"logits.{n}"], states.logits[0], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(tensors[f"h.0.{n}"], states.hidden_states[1][0], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(tensors[f"ln_f.{n}"], states.hidden_states[-1][0], rtol=1e-10, atol=1e-10)


def test_a_record_judges_as_the_original_did(original: minigpt.Original, tmp_path: Path) -> None:
    original.save(tmp_path / "record")
    loaded = minigpt.Original.load(tmp_path / "record")
    for norm in ("textbook", "rms"):
        first, again = (one.judge(norm=norm).to_dict() for one in (original, loaded))
        assert first == again


def test_a_file_that_is_no_record(tmp_path: Path) -> None:
    save_file({"logits.0": torch.zeros(1)}, tmp_path / "other")
    (tmp_path / "text").write_text("no record")
    for name in ("other", "text", "absent"):
        with pytest.raises(minigpt.CheckpointError, match=name):
            minigpt.Original.load(tmp_path / name)
