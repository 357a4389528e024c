"""A record is checked whole when it is opened, so that a damaged one blames no candidate."""

import json
import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import minigpt

SITE, BLOCK = "h.0.ln_1", "h.0"
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("record") / "record"
    prompts, text = [[5, 17, 42, 8], [3, 60, 1]], file.with_name("text")
    text.write_text("the dog saw " * 40)
    options = dict(prompts=prompts, max_new_tokens=2, gradients=True, device="cpu")
    minigpt.Original("demo", text=text, **options).save(file)
    return file


def damaged(
    record: Path, file: Path, tensors: Callable[[dict[str, Tensor]], Any], fields: Callable[[Fields], Any]
) -> Path:
    """A record with changes in its tensors and in its JSON."""
    with safe_open(record, "pt") as stored:
        held = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = dict(stored.metadata())
    state = json.loads(metadata["minigpt"])
    tensors(held)
    fields(state)
    save_file({name: x.contiguous() for name, x in held.items()}, file, metadata | {"minigpt": json.dumps(state)})
    return file


def nothing(_: Any) -> None:
    return None


def holed(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[3] = math.nan
    return x


LONG = 10**6
OF_TENSORS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "a row of logits less": lambda x: x.update({"logits.0": x["logits.0"][1:].clone()}),
    "a column less": lambda x: x.update({"logits.1": x["logits.1"][:, 1:].clone()}),
    "no logits": lambda x: x.pop("logits.2"),
    "logits of ids": lambda x: x.update({"logits.0": x["logits.0"].long()}),
    "a NaN in logits": lambda x: x.update({"logits.0": holed(x["logits.0"])}),
    "a NaN in a window": lambda x: x.update({"logits.2": holed(x["logits.2"])}),
    "a NaN in an input": lambda x: x.update({f"kept.{SITE}.0": holed(x[f"kept.{SITE}.0"])}),
    "a NaN in a block": lambda x: x.update({f"{BLOCK}.0": holed(x[f"{BLOCK}.0"])}),
    "a shorter input": lambda x: x.update({f"kept.{SITE}.0": x[f"kept.{SITE}.0"][1:].clone()}),
    "a narrower input": lambda x: x.update({f"kept.{SITE}.0": x[f"kept.{SITE}.0"][:, 1:].clone()}),
    "a shorter block": lambda x: x.update({f"{BLOCK}.1": x[f"{BLOCK}.1"][1:].clone()}),
    "a narrower block": lambda x: x.update({f"{BLOCK}.1": x[f"{BLOCK}.1"][:, 1:].clone()}),
    "a shorter weight": lambda x: x.update({f"kept.{SITE}.weight": x[f"kept.{SITE}.weight"][1:].clone()}),
    "no input": lambda x: x.pop(f"kept.{SITE}.0"),
    "no ids": lambda x: x.pop("ids.0"),
    "ids in float": lambda x: x.update({"ids.0": x["ids.0"] + 0.5}),
    "other ids": lambda x: x.update({"ids.0": x["ids.0"] + LONG}),
    "a gradient less": lambda x: x.pop(f"kept.gradient.{SITE}.weight"),
    "a NaN in a gradient": lambda x: x.update({f"kept.gradient.{SITE}.bias": holed(x[f"kept.gradient.{SITE}.bias"])}),
}
OF_FIELDS: dict[str, Callable[[Fields], Any]] = {
    "no texts": lambda fields: fields.pop("texts"),
    "no prompt": lambda fields: fields["texts"].update(prompts=[]),
    "a text too few": lambda fields: fields["texts"]["windows"].pop(),
    "a prompt longer than its text": lambda fields: fields["texts"]["prompts"][0].update(new_from=LONG),
    "a position before the text": lambda fields: fields["texts"]["prompts"][0].update(first=-1),
    "more positions than there are": lambda fields: fields["texts"]["prompts"][0].update(counted=LONG),
    "a position that is a word": lambda fields: fields["texts"]["prompts"][0].update(first="0"),
    "ids outside of the vocabulary": lambda fields: fields["texts"]["file_ids"].append(LONG),
    "a smaller vocabulary": lambda fields: fields["shape"].update(vocab_size=2),
    "a shorter context": lambda fields: fields["shape"].update(n_positions=3),
    "a wider model": lambda fields: fields["shape"].update(n_embd=LONG),
    "a size that is no number": lambda fields: fields["shape"].update(n_embd=True),
    "no such dtype": lambda fields: fields.update(dtype="float7"),
    "a dtype that is no word": lambda fields: fields.update(dtype=[1]),
    "code for a norm": lambda fields: fields.update(norm="evil.py:Norm"),
    "a site that is at no place": lambda fields: fields["sites"].append("h.9"),
    "an infinite floor": lambda fields: fields["floor"]["prompts"].update(squares=math.inf),
    "a negative floor": lambda fields: fields["floor"]["decoded"].update(squares=-1.0),
    "a floor of NaN": lambda fields: fields["floor"]["windows"][0].update(largest=math.nan),
    "a floor without a window": lambda fields: fields["floor"]["windows"].pop(),
    "a loss less": lambda fields: fields["floor"]["losses"].pop(),
    "an unknown field": lambda fields: fields.update(further=1),
    "a floor that is a list": lambda fields: fields.update(floor=[]),
}  # fmt: skip


@pytest.mark.parametrize("damage", OF_TENSORS)
def test_a_tensor_that_does_not_fit_is_refused(damage: str, record: Path, tmp_path: Path) -> None:
    file = damaged(record, tmp_path / "damaged", OF_TENSORS[damage], nothing)
    with pytest.raises(minigpt.CheckpointError, match=r"damaged is not a record of minigpt parity --record: "):
        minigpt.Original.load(file, device="cpu")


@pytest.mark.parametrize("damage", OF_FIELDS)
def test_a_field_that_does_not_fit_is_refused(damage: str, record: Path, tmp_path: Path) -> None:
    file = damaged(record, tmp_path / "damaged", nothing, OF_FIELDS[damage])
    with pytest.raises(minigpt.CheckpointError, match=r"damaged is not a record of minigpt parity --record: "):
        minigpt.Original.load(file, device="cpu")


def test_a_record_that_was_written_again_judges_as_before(record: Path, tmp_path: Path) -> None:
    judged = minigpt.Original.load(record, device="cpu").judge(norm="textbook").to_dict()
    again = damaged(record, tmp_path / "again", nothing, nothing)
    original = minigpt.Original.load(again, device="cpu")
    assert original.judge(norm="textbook").to_dict() == judged
    original.save(tmp_path / "saved")
    assert minigpt.Original.load(tmp_path / "saved", device="cpu").judge(norm="textbook").to_dict() == judged
    assert judged["gradients"]


def test_no_network_is_asked_for_the_name_in_a_record(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name))
    moved = damaged(record, tmp_path / "moved", nothing, lambda fields: fields.update(place="out/tuned"))
    assert minigpt.Original.load(moved, device="cpu").truth.texts.tokenizer is None
    assert not asked


def test_a_record_has_the_mode_of_any_file_and_replaces_no_pipe(record: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    assert record.stat().st_mode == plain.stat().st_mode
    original, pipe = minigpt.Original.load(record, device="cpu"), tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    original.save(pipe)
    reader.join(timeout=30)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "through").write_bytes(read[0])
    through = minigpt.Original.load(tmp_path / "through", device="cpu").truth
    assert torch.equal(through.logits(through.texts.prompts[0]), original.truth.logits(original.truth.texts.prompts[0]))
