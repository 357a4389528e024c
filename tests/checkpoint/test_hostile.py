"""Damaged files, and files made to harm their reader: nothing in them runs, and each is refused with one line."""

import errno
import json
import math
import os
import random
import re
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import config_of
from checkpoints import edit_config, reference, saved, tiny_bpe
from foreign import write_pickle

import minigpt
from minigpt import CheckpointError, GenerationError, MiniGPTError
from minigpt.checkpoint import Files
from minigpt.checkpoint.pretrained import describe_checkpoint
from minigpt.checkpoint.transformers_model import load_with_transformers

ADVICE = "weights_only|likely succeed|add_safe_globals|trust"  # to run a file after all


def refusal(place: Path) -> str:
    """The error of loading, in one line, which is also that of ``minigpt info``."""
    with pytest.raises(MiniGPTError) as raised:
        minigpt.from_pretrained(place, device="cpu")
    with pytest.raises(type(raised.value), match=f"^{re.escape(str(raised.value))}$"):
        describe_checkpoint(Files.at(place))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    return write_pickle(reference(), tmp_path / "model")


class Canary:
    """Writes a file if its pickle is loaded by a reader that runs what it reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return eval, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt"])
def test_a_pickle_never_runs(pickled: Path, legacy: bool, name: str) -> None:
    canary = pickled / "canary"
    (pickled / "pytorch_model.bin").unlink()
    content = {"model": {"wte.weight": torch.ones(2)}, "model_args": Canary(canary)}
    torch.save(content, pickled / name, _use_new_zipfile_serialization=not legacy)
    assert "eval" in refusal(pickled)
    assert not re.search(ADVICE, refusal(pickled)), "the library's advice is to run it after all"
    assert not canary.exists()
    torch.load(pickled / name, weights_only=False)
    assert canary.exists(), "the canary works"


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(2)],
        {"wte.weight": torch.ones(2).to_sparse()},
        {"wte.weight": 3},
        {"wte.weight": torch.ones(2, device="meta")},
        {"wte.weight": torch.ones(1).expand(10**6, 10**6)},
        {0: torch.ones(2)},
    ],
    ids=["list", "sparse", "number", "meta", "more than the file holds", "integer names"],
)
def test_pickles_of_something_else(pickled: Path, content: Any) -> None:
    torch.save(content, pickled / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be read as a .bin file" in refusal(pickled)


class Asking:
    """A pickle that calls something with a number."""

    def __init__(self, function: Callable[..., Any], size: int) -> None:
        self.function, self.size = function, size

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return self.function, (self.size,)


GIGABYTES = 2**33


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "function",
    [bytearray, torch.UntypedStorage, torch.Tensor, torch.FloatTensor, os.system, torch.load],
    ids=["bytearray", "UntypedStorage", "Tensor", "FloatTensor", "system", "load"],
)
def test_a_pickle_that_calls_what_no_checkpoint_needs(
    pickled: Path, legacy: bool, function: Callable[..., Any]
) -> None:
    content = {"wte.weight": Asking(function, GIGABYTES)}
    torch.save(content, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    message = refusal(pickled)
    assert "which no checkpoint needs" in message
    assert not re.search(ADVICE, message)


HOLES = {
    "a far place": b"\x80\x02}r\xff\xff\xff\x7f.",
    "an array of bytes": b"\x80\x05\x96\x00\x00\x00\x00\x02\x00\x00\x00.",
}


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "meta.pkl"])
def test_a_pickle_that_asks_for_memory_alone(pickled: Path, tmp_path: Path, hole: str, name: str) -> None:
    (pickled / name).write_bytes(HOLES[hole])
    tracemalloc.start()
    read = minigpt.Tokenizer.from_pretrained if name == "meta.pkl" else minigpt.from_pretrained
    with pytest.raises(CheckpointError, match=r"memory that it does not fill|but only 1 remain"):
        read(pickled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**28


def test_usual_contents_of_a_pickle_are_read(pickled: Path) -> None:
    """What trainers keep beside the tensors."""
    state = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    beside = {
        "step": 10**12,
        "seen": {1, 2},
        "dtype": torch.bfloat16,
        "shape": torch.Size([2]),
        "at": torch.device("cpu"),
    }
    beside |= {"loss": torch.ones(()), "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "best": float("inf")}
    name = min(name for name in state if name.endswith("wte.weight"))
    state[name] = torch.nn.Parameter(state[name])
    expected = minigpt.from_pretrained(pickled).wte.weight.clone()  # the file is replaced
    for legacy in (False, True):
        torch.save({"model": state} | beside, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        assert torch.equal(minigpt.from_pretrained(pickled).wte.weight, expected)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_damaged_pickle_is_a_sentence_without_advice(pickled: Path, legacy: bool) -> None:
    file = pickled / "pytorch_model.bin"
    torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=not legacy)
    whole = file.read_bytes()
    chance = random.Random(0)
    messages: list[str] = []
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[chance.randrange(3000)] = chance.randrange(256)
        file.write_bytes(damaged)
        try:
            Files(file, pickled, None).tensors()
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert [message for message in messages if re.search(ADVICE, message)] == []


PANICS = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [(PANICS[0], "^the tokenizer in .* cannot be read: "), (PANICS[1], "^the tokenizer cannot read 'the dog': ")],
    ids=("as it is read", "as it reads"),
)
def test_a_tokenizer_that_makes_its_library_panic(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    saved(reference(vocab_size=300), tmp_path)
    tiny_bpe().save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | fields))
    with pytest.raises(MiniGPTError, match=sentence):
        minigpt.Tokenizer.from_pretrained(tmp_path).encode("the dog")


FIELDS = ("n_embd", "n_layer", "n_inner", "vocab_size", "n_positions")


@pytest.mark.parametrize("field", FIELDS)
def test_a_size_is_held_against_the_file_before_anything_is_made(field: str, tmp_path: Path) -> None:
    saved(reference(), tmp_path)
    edit_config(tmp_path, **{field: 2**31 - 1}, n_head=1)
    assert "its config needs" in refusal(tmp_path)


OTHERS = {
    "llama": config_of("llama", num_key_value_heads=4),
    "gptj": config_of("gptj"),
    "opt": config_of("opt", max_position_embeddings=64),
}
MADE_OTHERWISE = "its tensors have other shapes than config.json says"
ABSURD = [
    *(("llama", "num_hidden_layers", n, "num_hidden_layers must be 1 to 21 for these files") for n in (0, -1, 10**9)),
    *(("llama", "rms_norm_eps", x, "rms_norm_eps must be a float, 0 or more") for x in (-1e-6, math.nan, math.inf)),
    ("llama", "num_experts", 10**9, "num_experts must be 0 to 96 for these files, got 1,000,000,000"),
    ("llama", "hidden_size", "32", "transformers cannot open"),
    ("llama", "hidden_size", -32, "transformers cannot open"),
    ("llama", "hidden_size", 0, MADE_OTHERWISE),
    ("llama", "hidden_size", 10**11, "its config needs 74,100,000,000,000 values"),
    ("llama", "vocab_size", 97, MADE_OTHERWISE),
    ("llama", "vocab_size", 10**9, "its config needs 64,000,017,568 values"),
    ("llama", "num_attention_heads", 0, "transformers cannot open"),
    ("llama", "intermediate_size", 0, MADE_OTHERWISE),
    ("llama", "intermediate_size", 10**9, "its config needs"),
    ("gptj", "n_positions", 10**9, "000,000,000 values of tables for its positions"),
    ("gptj", "rotary_dim", 10**9, "values of tables for its positions"),
    ("opt", "max_position_embeddings", 10**9, "its config needs 32,000,018,208 values"),
    ("opt", "word_embed_proj_dim", 10**9, "its config needs"),
]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of other architectures than GPT-2."""
    folders = {}
    for name, config in OTHERS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize(("name", "field", "value", "sentence"), ABSURD)
def test_a_config_of_another_architecture_is_held_against_the_headers(
    others: dict[str, Path], tmp_path: Path, name: str, field: str, value: Any, sentence: str
) -> None:
    """Before memory is taken."""
    shutil.copytree(others[name], tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, **{field: value})
    with pytest.raises(MiniGPTError) as raised:
        load_with_transformers(tmp_path)
    assert sentence in str(raised.value)
    assert "enforce fail" not in str(raised.value)


def test_a_full_temporary_folder_blames_no_model(
    others: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(MiniGPTError, match="No space left on device; TMPDIR names a folder with more room"):
        load_with_transformers(others["llama"], memory=0)


def test_usual_configs_of_other_architectures_are_opened(others: dict[str, Path], tmp_path: Path) -> None:
    """Also one with many more positions than the model has values."""
    for folder in others.values():
        load_with_transformers(folder)
    shutil.copytree(others["llama"], tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, max_position_embeddings=2**20, head_dim=None, num_key_value_heads=None)
    assert load_with_transformers(tmp_path).config.max_position_embeddings == 2**20


def test_an_archive_that_is_compressed_is_not_unpacked(tmp_path: Path) -> None:
    """It may unpack to far more than its size, and torch.save compresses nothing."""
    file = write_pickle(reference(), tmp_path / "bin") / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(tmp_path / "new", "w", zipfile.ZIP_DEFLATED) as new:
        for name in archive.namelist():
            new.writestr(name, archive.read(name))
    (tmp_path / "new").rename(file)
    assert "its archive is compressed" in refusal(file.parent)


@pytest.mark.parametrize("place", ["", "nul\0", b"bytes", 3])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_path(place: Any) -> None:
    for read in (minigpt.from_pretrained, minigpt.Tokenizer.from_pretrained, minigpt.GPT2Config.from_json_file):
        with pytest.raises(MiniGPTError, match="must be a path") as raised:
            read(place)
        assert raised.value.argument in ("source", "path")


def test_a_token_without_an_embedding(tmp_path: Path) -> None:
    """A text that has it is refused."""
    saved(reference(vocab_size=300), tmp_path)
    backend = tiny_bpe()
    backend.add_tokens(["<tool>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    model, tokenizer = minigpt.from_pretrained(tmp_path), minigpt.Tokenizer.from_pretrained(tmp_path)
    assert minigpt.perplexity(model, tokenizer, "the dog saw the other") > 1
    with pytest.raises(GenerationError, match="300"):
        minigpt.perplexity(model, tokenizer, "the dog saw <tool> the other")


def test_an_index_that_leads_outside(tmp_path: Path) -> None:
    folder = saved(reference(), tmp_path / "model", max_shard_size="40KB")
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    content, fields = json.loads(index.read_text()), json.loads(config.read_text())
    shard = min(folder.glob("model-*.safetensors"))
    (tmp_path / shard.name).write_bytes(shard.read_bytes())
    for outside in (f"../{shard.name}", str(tmp_path / shard.name), f"sub/../../{shard.name}"):
        moved = {name: outside if file == shard.name else file for name, file in content["weight_map"].items()}
        index.write_text(json.dumps({"weight_map": moved}))
        assert "which is not a file in the same folder" in refusal(folder)
        config.write_text(json.dumps(fields | {"transformers_weights": outside}))
        assert "which is not a file in the same folder" in refusal(folder)
        config.write_text(json.dumps(fields))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    folder = saved(reference(), tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for number, size in enumerate([0, 7, 8, 100, len(whole) // 2, len(whole) - 1]):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cannot be read as a \.safetensors file"):
            Files(file, tmp_path, None).tensors()
