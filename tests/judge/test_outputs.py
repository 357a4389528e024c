"""A file of what another program wrote: what its numbers were stored at, whose ids they answer, where errors begin."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import minigpt
from minigpt.report.page import report_page
from minigpt.report.sentences import about, sentences

PROMPTS = [[5, 17, 42, 8, 23, 11], [3, 60, 1, 9], [7, 7, 30]]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> minigpt.Original:
    record = tmp_path_factory.mktemp("record") / "record"
    minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=2, device="cpu").save(record)
    return minigpt.Original.load(record, device="cpu")


@torch.no_grad()
def outputs_of(recorded: minigpt.Original, model: GPT2LMHeadModel) -> Tensors:
    """What another program would write: logits, and the outputs of norms and blocks, by the record's names."""
    tensors: Tensors = {}

    def keeping(key: str) -> Callable[..., None]:
        return lambda _, __, output: tensors.update({key: output[0].clone()})

    for n, text in enumerate(recorded.truth.texts.all):
        hooks = []
        for place in (*recorded.truth.facts.sites, *recorded.truth.facts.blocks):
            module = model.get_submodule(f"transformer.{place}")
            hooks.append(module.register_forward_hook(keeping(f"{place}.{n}")))
        tensors[f"logits.{n}"] = model(torch.tensor([text.ids])).logits[0].clone()
        for hook in hooks:
            hook.remove()
    return tensors


def judged(recorded: minigpt.Original, tensors: Tensors, folder: Path) -> minigpt.ParityReport:
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "outputs")
    return recorded.judge_outputs(folder / "outputs")


@pytest.fixture
def right(recorded: minigpt.Original, hf_model: GPT2LMHeadModel) -> Tensors:
    return outputs_of(recorded, hf_model)


# Whose ids


@pytest.mark.parametrize("texts", [[0], [2], [0, 1, 2]])
def test_ids_that_are_the_records_are_welcome(
    recorded: minigpt.Original, right: Tensors, tmp_path: Path, texts: list[int]
) -> None:
    for n in texts:
        right[f"ids.{n}"] = torch.tensor(recorded.truth.texts.all[n].ids)
    assert judged(recorded, right, tmp_path).passed


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ids.0", lambda ids: ids.flip(0), r"ids\.0 must be the record's, but at position 0 it has"),
        ("ids.1", lambda ids: ids + (torch.arange(len(ids)) == 2), r"ids\.1 .* at position 2"),
        ("ids.2", lambda ids: ids[:-1], r"ids\.2 must be the record's 5 ids, got 4"),
        ("ids.9", lambda ids: ids, r"ids\.9'.* no key"),
    ],
)
def test_ids_of_another_record_are_refused(
    recorded: minigpt.Original, right: Tensors, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    """Also where the file has the ids of some texts only."""
    n = min(int(name[-1]), 2)
    right[name] = change(torch.tensor(recorded.truth.texts.all[n].ids))
    with pytest.raises(minigpt.CheckpointError, match=message):
        judged(recorded, right, tmp_path)


def test_logits_of_other_ids_are_named_by_prompt_and_position(
    recorded: minigpt.Original, hf_model: GPT2LMHeadModel, right: Tensors, tmp_path: Path
) -> None:
    ids = torch.tensor([recorded.truth.texts.all[1].ids])
    ids[0, 3] = 12
    with torch.no_grad():
        right["logits.1"] = hf_model(ids).logits[0]
    report = judged(recorded, right, tmp_path)
    off = report.prompt_off
    assert (off.prompt, off.position, off.prompts_off, off.prompts) == (1, 3, 1, 3)
    text = " ".join(report.reasons)
    assert "In prompt 1, from position 3 on, the logits are off" in text
    assert "2 of the 3 prompts are right" in text
    assert "these logits are of other ids" in text


# What numbers were stored at


@pytest.mark.parametrize(("dtype", "is_widened"), [(torch.float16, False), (torch.bfloat16, True)])
def test_logits_that_were_stored_in_half_precision_are_said_to_be_so(
    recorded: minigpt.Original, right: Tensors, tmp_path: Path, dtype: torch.dtype, is_widened: bool
) -> None:
    """Also where they were rounded, and then stored in float32."""
    for name in right:
        if name.startswith("logits"):
            right[name] = right[name].to(dtype).float() if is_widened else right[name].to(dtype)
    report = judged(recorded, right, tmp_path)
    name = str(dtype).removeprefix("torch.")
    print(f"ratio {report.logits.ratio:.4g}, of storing {report.stored.ratio:.4g}")
    assert report.stored.dtype == name
    assert report.stored.explains
    assert report.stored.ratio == pytest.approx(report.logits.ratio, rel=0.02)
    assert len(report.reasons) == 2
    assert f"stored in {name}, and storing alone moves" in report.reasons[1]


def test_storing_does_not_excuse_what_is_wrong(recorded: minigpt.Original, right: Tensors, tmp_path: Path) -> None:
    for name in right:
        if name.startswith("logits"):
            right[name] = (right[name] * 1.01).half()
    report = judged(recorded, right, tmp_path)
    assert not report.stored.explains
    assert any("which explains" in reason and "not the rest" in reason for reason in report.reasons)
    assert any("the error is in the head" in reason for reason in report.reasons)


@pytest.mark.thorough
def test_storing_in_the_originals_dtype_is_its_noise(folder: Path, tmp_path: Path) -> None:
    recorded = minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=0, dtype="bfloat16", device="cpu")
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    report = judged(recorded, outputs_of(recorded, model), tmp_path)
    assert (report.passed, report.stored, report.notes) == (True, None, [])


def test_norms_and_blocks_that_were_stored_in_half_precision_are_right(
    recorded: minigpt.Original, right: Tensors, tmp_path: Path
) -> None:
    for name in right:
        if not name.startswith("logits"):
            right[name] = right[name].half()
    report = judged(recorded, right, tmp_path)
    assert (report.passed, report.first_off) == (True, None)
    assert report.notes == ["Norms and blocks are stored in float16; what that rounds counts as noise there."]


# Where errors begin


def exact_gelu(model: GPT2LMHeadModel, block: int) -> None:
    model.transformer.h[block].mlp.act = nn.GELU()


def larger_eps(model: GPT2LMHeadModel, site: str) -> None:
    model.transformer.get_submodule(site).eps = 1e-3


def short_keys(model: GPT2LMHeadModel, block: int) -> None:
    """Keys and values are kept in float16."""
    width = model.config.n_embd

    def rounded(_: nn.Module, __: Any, qkv: Tensor) -> Tensor:
        return torch.cat([qkv[..., :width], qkv[..., width:].half().float()], -1)

    model.transformer.h[block].attn.c_attn.register_forward_hook(rounded)


def rolled_positions(model: GPT2LMHeadModel, _: int) -> None:
    model.transformer.wpe.weight.data = model.transformer.wpe.weight.data.roll(1, 0)


@pytest.mark.parametrize(
    ("plant", "where", "place"),
    [
        (exact_gelu, 0, "h.0"),
        (larger_eps, "h.1.ln_2", "h.1.ln_2"),
        (short_keys, 0, "h.0.ln_2"),
        (rolled_positions, 0, "h.0.ln_1"),
    ],
)
def test_the_place_where_an_error_begins_is_named(
    recorded: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path, plant: Any, where: Any, place: str
) -> None:
    wrong = copy.deepcopy(hf_model)
    plant(wrong, where)
    report = judged(recorded, outputs_of(recorded, wrong), tmp_path)
    assert (report.first_off.place, report.new_errors) == (place, [place])
    assert not any("begins at each of" in reason for reason in report.reasons)


def test_each_place_where_the_error_grows_far_is_named(
    recorded: minigpt.Original, hf_model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    wrong = copy.deepcopy(hf_model)
    wrong.transformer.h[0].mlp.c_fc.bias.data += 1e-4
    wrong.transformer.h[1].ln_2.eps = 0.1
    report = judged(recorded, outputs_of(recorded, wrong), tmp_path)
    assert report.new_errors == ["h.0", "h.1.ln_2"]
    assert "An error of its own begins at each of h.0, h.1.ln_2." in report.reasons


def test_right_logits_beside_a_wrong_output(recorded: minigpt.Original, right: Tensors, tmp_path: Path) -> None:
    for n in range(len(PROMPTS)):
        right[f"h.1.ln_2.{n}"] = right[f"h.1.ln_2.{n}"] * 1.001
    report = judged(recorded, right, tmp_path)
    assert report.passed
    (note,) = report.notes
    assert note.startswith("The logits are right, but the output of h.1.ln_2 is not: it is off by 0.00100 of its size")


def test_the_head_is_named_where_all_before_it_is_right(
    recorded: minigpt.Original, right: Tensors, tmp_path: Path
) -> None:
    for n in range(len(PROMPTS)):
        right[f"logits.{n}"] = right[f"logits.{n}"] * 1.01
    named = "All 5 norms and 2 blocks are right on the prompts, and the logits are not, so the error is in the head."
    assert named in judged(recorded, right, tmp_path).reasons
    for name in [name for name in right if name.startswith("ln_f")]:
        del right[name]
    assert named not in judged(recorded, right, tmp_path).reasons, "the last norm may be at fault"


def test_a_shift_is_all_that_is_said_of_it(recorded: minigpt.Original, right: Tensors, tmp_path: Path) -> None:
    for n in range(len(PROMPTS)):
        right[f"logits.{n}"] = right[f"logits.{n}"].log_softmax(-1)
    report = judged(recorded, right, tmp_path)
    assert len(report.reasons) == 2
    assert "shifted by one constant" in report.reasons[1]
    assert "the logits are off" not in " ".join(sentences(report))
    assert "first-off" not in report_page(report)


# What cannot be known of a file


def test_the_own_error_of_a_files_norms_is_blank(recorded: minigpt.Original, right: Tensors, tmp_path: Path) -> None:
    report = judged(recorded, right, tmp_path)
    assert [site["local_error"] for site in report.to_dict()["norm_sites"]] == [None] * 5
    assert "norms by themselves" in report.missing
    assert "Own error" not in report_page(report)


def test_a_file_has_no_norm_in_question(recorded: minigpt.Original, right: Tensors, tmp_path: Path) -> None:
    report = judged(recorded, right, tmp_path)
    file = str(tmp_path / "outputs")
    assert repr(report) == f"<ParityReport PASS: {file}>"
    assert about(report).startswith(f"{file}, against ")


def test_random_ids_are_explained_once(folder: Path, tmp_path: Path) -> None:
    report = minigpt.parity(folder, norm="textbook", max_new_tokens=0, device="cpu")
    assert about(report).endswith("cpu, 4 sequences of random ids")
    assert " ".join(sentences(report)).count("since ") == 1


@pytest.mark.thorough
def test_a_record_keeps_why_ids_are_random(folder: Path, tmp_path: Path) -> None:
    recorded = minigpt.Original(folder, max_new_tokens=0, device="cpu")
    recorded.save(tmp_path / "record")
    assert (
        minigpt.Original.load(tmp_path / "record").truth.texts.why_random == recorded.truth.texts.why_random is not None
    )
