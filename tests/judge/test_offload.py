"""A model whose weights stay in their files gets the verdict and the figures that it gets in memory."""

import gc
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, random_model
from safetensors.torch import save_file
from torch import nn

import minigpt
from minigpt.files import TemporaryFolder
from minigpt.judge.reading import Reading, StoredReadings, Text
from minigpt.judge.runners import groups_of, of_text, reads_apart, right_padded

ASKED: dict[str, Any] = {"device": "cpu", "max_new_tokens": 3, "prompts": [[5, 6, 7, 8], [9, 10, 11]]}
SLOW = ["qwen3", "qwen2", "mistral", "pythia", "phi", "bloom", "falcon", "olmo2", "mamba", "mixtral", "cohere", "opt"]
NAMES = ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ["gemma", *SLOW])]


class WrongEps(nn.RMSNorm):
    exact = "rms_norm"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, 0.1)


def figures(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a report says, by its place in the JSON, but for what depends on the run."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("notes", "versions"):
                yield from figures(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from figures(inner, f"{path}.{number}")
    else:
        yield path, value


def assert_same_report(report: Any, expected: Any) -> None:
    """Check that two reports have the same figures, and print the largest difference."""
    actual, wanted = dict(figures(report.to_dict())), dict(figures(expected.to_dict()))
    assert actual.keys() == wanted.keys()
    largest = 0.0
    for path, value in wanted.items():
        if isinstance(value, float) and not math.isnan(value):
            largest = max(largest, abs(actual[path] - value))
        elif not isinstance(value, float):
            assert actual[path] == value, path
    print(f"largest difference {largest:.3g}, bound 1e-9")
    assert largest <= 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_verdict_and_figures_are_those_of_a_model_in_memory(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path)
    norm = ARCHITECTURES[name].norm
    reports = [minigpt.parity(str(tmp_path), norm=norm, memory=memory, **ASKED) for memory in ("1TB", 0)]
    assert_same_report(reports[1], reports[0])
    assert reports[1].passed
    assert any("weights are read block by block" in note for note in reports[1].notes)
    assert not any("block by block" in note for note in reports[0].notes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_another_eps_at_one_site_is_named_by_its_path(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path)
    site = ARCHITECTURES[name].site
    original = minigpt.Original(str(tmp_path), memory=0, **ASKED)
    report = original.judge(norm=WrongEps, sites=site)
    assert not report.passed
    assert site in " ".join(report.reasons)
    worst = max(report.norm_sites, key=lambda row: row.local_error)
    assert (worst.site, worst.swapped) == (site, True)
    assert original.judge(norm="rms", sites=site).passed


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_searches_find_the_same_sites(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    sites = ["model.layers.*.input_layernorm"]
    reports = []
    for memory in ("1TB", 0):
        options = ASKED | {"remove": True, "bisect": True, "memory": memory}
        reports.append(minigpt.parity(str(tmp_path), norm="dyt", sites=sites, **options))
    assert reports[0].removal is not None
    assert_same_report(reports[1], reports[0])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_gpt2_is_read_by_transformers_alone(tmp_path: Path) -> None:
    random_model("gpt2").save_pretrained(tmp_path)
    report = minigpt.parity(str(tmp_path), norm="textbook", sites=["h.*.ln_1", "ln_f"], memory=0, **ASKED)
    assert report.passed
    assert report.bitwise is None
    assert [row.site for row in report.norm_sites if row.swapped] == ["h.0.ln_1", "h.1.ln_1", "ln_f"]


def gpt2_folders(folder: Path) -> dict[str, Path]:
    """Save one GPT-2 in the kinds of folders that transformers cannot read block by block, and in one that it can."""
    names = ("plain", "swapped", "bin", "renamed")
    folders = {name: folder / name for name in names}
    model = random_model("gpt2")
    for name in ("plain", "bin", "renamed"):
        model.save_pretrained(folders[name])
    for name in ("bin", "renamed"):
        (folders[name] / "model.safetensors").unlink()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    torch.save(tensors, folders["bin"] / "pytorch_model.bin")
    renamed = {f"module.{name}": tensor for name, tensor in tensors.items()}  # as DataParallel names them
    save_file(renamed, folders["renamed"] / "model.safetensors")
    ours = minigpt.from_pretrained(folders["plain"], device="cpu")
    minigpt.swap_norms(ours, "rms", "h.0.ln_1")
    minigpt.save_pretrained(ours, folders["swapped"])
    return folders


WHY_WHOLE = {
    "swapped": "its config.json names norms of minigpt",
    "bin": "pytorch_model.bin is no safetensors file",
    "renamed": "it has no h.0.attn.c_attn.bias, h.0.attn.c_attn.weight",
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_gpt2_that_cannot_be_read_block_by_block_is_judged_in_memory(tmp_path: Path) -> None:
    folders = gpt2_folders(tmp_path)
    for name, why in WHY_WHOLE.items():
        if name != "renamed":  # transformers cannot be the truth of those names
            reports = [minigpt.parity(folders[name], memory=memory, **ASKED) for memory in ("1TB", 0)]
            assert_same_report(reports[1], reports[0])
            assert any(f"It is in memory all the same, since {why}" in note for note in reports[1].notes)
        report = minigpt.parity(folders[name], against=folders["plain"], memory=0, **ASKED)
        assert report.passed == (name != "swapped")
        assert any(f"is in memory as a whole, since {why}" in note for note in report.notes)
        assert any("weights are read block by block" in note for note in report.notes)


def test_what_fits_nowhere_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.judge.read_original.free_memory", lambda device: 1000)
    folder = gpt2_folders(tmp_path)["bin"]
    expected = r"takes .* KB, 1 KB are free, and it cannot be read block by block: pytorch_model\.bin is no"
    with pytest.raises(minigpt.CheckpointError, match=expected):
        minigpt.Original(folder, memory=0, **ASKED)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sites", ["transformer.h.0.ln_1", "h.0.ln_1", "*.ln_f", "*.ln_*", "late"])
def test_a_gpt2_has_the_same_sites_wherever_its_weights_are(sites: str, tmp_path: Path) -> None:
    random_model("gpt2").save_pretrained(tmp_path)
    reports = [minigpt.parity(tmp_path, norm="rms", sites=sites, memory=memory, **ASKED) for memory in ("1TB", 0)]
    swapped = [[row.site for row in report.norm_sites if row.swapped] for report in reports]
    assert swapped[0] == swapped[1]
    assert reports[0].sites == reports[1].sites
    assert swapped[0]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_somebody_holds_is_read_where_its_weights_are(tmp_path: Path) -> None:
    random_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places | {"model.layers": "disk"}, offload_folder=tmp_path / "disk"
    ).eval()
    asked = ASKED | {"against": str(tmp_path / "model")}
    assert minigpt.parity(model, **asked).passed
    minigpt.swap_norms(model, WrongEps, "model.layers.1.input_layernorm")
    report = minigpt.parity(model, **asked)
    assert not report.passed
    assert report.first_off is not None
    assert report.first_off.place == "model.layers.1.input_layernorm"


@pytest.mark.thorough
def test_a_weight_that_is_used_outside_of_its_module_is_a_sentence(tmp_path: Path) -> None:
    random_model("llama4").save_pretrained(tmp_path)
    with pytest.raises(minigpt.MiniGPTError, match="a weight is used outside of its module"):
        minigpt.Original(str(tmp_path), memory=0, **ASKED)


@pytest.mark.thorough
def test_a_record_says_that_its_original_was_read_block_by_block(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "model")
    original = minigpt.Original(str(tmp_path / "model"), memory=0, **ASKED)
    original.save(tmp_path / "record")
    loaded = minigpt.Original.load(tmp_path / "record").truth
    assert loaded.facts.offload
    assert loaded.facts.notes == original.truth.facts.notes
    assert loaded.facts.notes


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.LlamaConfig(), False),
        (transformers.GPT2Config(), False),
        (transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), True),
        (transformers.Gemma3nTextConfig(), True),
    ],
)
def test_a_model_that_padding_changes_reads_each_text_alone(config: Any, expected: bool) -> None:
    model = torch.nn.Module()
    model.config = config
    assert reads_apart(model) == expected


def test_gradients_need_the_model_in_memory(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(minigpt.ConfigError, match="needs the whole model in memory"):
        minigpt.Original(str(tmp_path), memory=0, gradients=True, device="cpu")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_left_behind(tmp_path: Path, temporary: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "model")
    original = minigpt.Original(str(tmp_path / "model"), memory=0, **ASKED)
    assert len([*(tmp_path / "temp").rglob("*.safetensors")]) == 2  # true logits of two prompts
    del original
    gc.collect()
    assert not [*temporary.glob("minigpt-*")]


def test_no_room_for_the_true_logits_is_a_sentence(tmp_path: Path) -> None:
    kept = StoredReadings(torch.device("cpu"))
    text = Text.whole([1, 2])
    kept[text] = Reading(torch.ones(2, 3), {"a": torch.zeros(2, 4)}, {"b": torch.ones(2, 4)})
    reading = kept[text]
    assert (reading.logits.shape, [*reading.outputs], [*reading.inputs]) == ((2, 3), ["a"], ["b"])
    shutil.rmtree(kept.folder.path)  # as a disk that takes no more
    with pytest.raises(minigpt.MiniGPTError, match=r"cannot keep the true logits in .*; TMPDIR names a folder"):
        kept[Text.whole([3])] = Reading(torch.ones(1, 3))


def test_texts_are_read_together_as_far_as_there_is_room() -> None:
    lengths = [30, 28, 25, 400, 400, 10]
    texts = [Text.whole([1] * length) for length in lengths]
    groups = [[len(text.ids) for text in group] for group in groups_of(texts, 1000)]
    assert groups == [[30, 28, 25], [400, 400], [10]]
    assert [len(group) for group in groups_of(texts, 2**20)] == [2, 1, 1, 1, 1]


def test_the_part_of_a_text_has_no_padding() -> None:
    texts = [Text.whole([1, 2, 3]), Text.whole([4])]
    ids = right_padded(texts, 64, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    y = torch.arange(2 * 3 * 4).view(2, 3, 4)
    assert torch.equal(of_text(y, 1, ids, 1), y[1, :1])
    assert torch.equal(of_text(y.transpose(1, 2)[..., None], 1, ids, 1), y[1, :1].T[..., None])  # heads first
    assert torch.equal(of_text(y.flatten(0, 1), 0, ids, 3), y[0])


def streaming(model: Path, temporary: Path) -> "subprocess.Popen[str]":
    """Return a command that reads a model block by block, and has begun to keep true logits in ``temporary``."""
    random_model("mixtral", num_hidden_layers=16).save_pretrained(model)
    words = ["parity", "--model", str(model), "--norm", "rms", "--memory", "0"]
    command = [sys.executable, "-m", "minigpt", *words]
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not [*temporary.glob("minigpt-truth-*/0.safetensors")]:
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_within_a_second_and_leaves_nothing(
    number: int, status: int, tmp_path: Path, temporary: Path
) -> None:
    process = streaming(tmp_path / "model", temporary)
    begun = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    print(f"ended after {time.monotonic() - begun:.2f} s")
    assert process.returncode == status
    assert "Traceback" not in said
    assert not [*temporary.glob("minigpt-*")]


@pytest.mark.thorough
def test_the_next_run_removes_what_a_killed_one_has_left(tmp_path: Path, temporary: Path) -> None:
    killed = streaming(tmp_path / "model", temporary)
    folders = {*temporary.iterdir()}
    of_others = temporary / "minigpt-study"
    of_others.mkdir()
    (of_others / "process.lock").touch()
    own = TemporaryFolder("truth")
    assert folders < {*temporary.iterdir()}  # its process lives
    killed.kill()
    killed.communicate(timeout=60)
    another = TemporaryFolder("weights")
    assert {*temporary.iterdir()} == {own.path, another.path, of_others}
