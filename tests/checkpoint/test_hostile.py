"""Files made to harm whoever reads them: each is refused with its reason, nothing runs, nothing large is allocated."""

import json
import pickle
import pickletools
import resource
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_config, edit_tensors, reference, saved, tiny_bpe
from foreign import write_openai, write_pickle
from safetensors.torch import load_file
from torch import nn

import minigpt
from minigpt import CheckpointError, MiniGPTError
from minigpt.checkpoint.containers.nesting import Sizes
from minigpt.report.describe import describe

GIGABYTE = 10**9


def refusal(place: Path) -> str:
    """Why it is refused: in one line, and without the memory that it asks for."""
    before = peak_mb()
    with pytest.raises(MiniGPTError) as raised:
        minigpt.from_pretrained(place, device="cpu")
    grown = peak_mb() - before
    print(f"memory grew by {grown:.1f} MB: {raised.value}")
    assert grown < 100
    assert "\n" not in str(raised.value)
    return str(raised.value)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(reference(), tmp_path / "model")


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    return write_pickle(reference(), tmp_path / "model")


# Pickles


class Canary:
    """Writes a file where its pickle is loaded by a reader that runs what it reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return eval, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("protocol", [1, 2, 4, 5])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt"])
def test_a_pickle_that_would_run_code(pickled: Path, protocol: int, legacy: bool, name: str) -> None:
    canary = pickled / "canary"
    (pickled / "pytorch_model.bin").unlink()
    content = {"model": {"wte.weight": torch.ones(2)}, "model_args": Canary(canary)}
    torch.save(content, pickled / name, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    assert "eval" in refusal(pickled)
    assert "eval" in describe(pickled)["refused"][0]
    assert not canary.exists()
    torch.load(pickled / name, weights_only=False)
    assert canary.exists(), "the canary would not have sung in any case"


def test_a_bare_pickle(pickled: Path) -> None:
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(pickled / "canary")))
    assert "eval" in refusal(pickled)
    assert not (pickled / "canary").exists()


SMUGGLED = (
    b"\x80\x04\x8c\x05torch\x94\x8c\x04Size\x94\x8c\x08builtins\x94\x8c\x04eval\x94"  # four names, remembered
    b"\x8c\x05torch\x8c\x04Size"  # what was read last is harmless
    b"h\x02h\x03\x93\x8c\x011\x85R."  # and what is called is the third and fourth
)


@pytest.mark.parametrize("protocol", [4, 5])
def test_calls_that_the_stack_names_are_not_believed(pickled: Path, protocol: int) -> None:
    assert pickle.loads(SMUGGLED) == 1, "it would have run"
    file = pickled / "pytorch_model.bin"
    file.write_bytes(SMUGGLED)
    assert "it calls what its stack names" in refusal(pickled)
    torch.save(reference().state_dict(), file, pickle_protocol=protocol)
    assert "torch.save writes protocol 2" in refusal(pickled)


@pytest.mark.parametrize("instruction", [b"\x82\x07", b"\x83\x07\x00", b"\x84\x07\x00\x00\x00"])
def test_a_call_by_a_registered_number(pickled: Path, instruction: bytes) -> None:
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x02" + instruction + b")R.")
    assert "it would call 'extension.7'" in refusal(pickled)


@pytest.mark.parametrize("data", [b"\x80\x02t.", b"\x80\x02K\x01a.", b"\x80\x02(2."])
def test_a_pickle_that_takes_what_is_not_on_its_stack(pickled: Path, data: bytes) -> None:
    (pickled / "pytorch_model.bin").write_bytes(data)
    assert "its pickle is damaged" in refusal(pickled)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_longer_than_any_checkpoint_s(pickled: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pickled / "pytorch_model.bin"
    torch.save(torch.load(file), file, _use_new_zipfile_serialization=zipped)
    monkeypatch.setattr("minigpt.checkpoint.containers.pickled.MOST_BYTES", 1000)
    assert ("more than 1,000 are not read" if zipped else "its pickle is longer than 1,000 bytes") in refusal(pickled)


def test_a_compressed_part_of_an_archive(pickled: Path) -> None:
    """It could unpack to anything, whatever the archive says of it."""
    file = pickled / "pytorch_model.bin"
    rezipped(file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("more", b"text", zipfile.ZIP_DEFLATED)
    assert "'more' in it is compressed, as PyTorch never writes it" in refusal(pickled)


def test_tensors_of_another_kind(pickled: Path) -> None:
    """Built by what builds every tensor, of a storage that says what its bytes are."""
    file = pickled / "pytorch_model.bin"
    torch.save({"wte.weight": torch.zeros(4, dtype=torch.uint8)}, file)
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data.replace(b"ByteStorage", b"QInt8Storage"))
    assert "'wte.weight' in it is no plain tensor" in refusal(pickled)


def test_an_archive_of_arrays_and_something_else(tmp_path: Path) -> None:
    npz = write_openai(reference(), tmp_path / "openai")
    rezipped(npz, **{"model/readme.txt": b"text"})
    assert "'model/readme.txt' in it is no array" in refusal(npz)


class Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


@pytest.mark.parametrize(
    "call",
    [Calls(bytearray, 10**12), Calls(set, range(3)), Calls(torch.zeros, 10**12), nn.Linear(2, 2), np.ones(3)],
    ids=["bytes by the terabyte", "a set", "a large tensor", "a module", "an array of NumPy's"],
)
def test_a_pickle_that_asks_for_more_than_tensors(pickled: Path, call: Any) -> None:
    torch.save({"wte.weight": torch.ones(2), "more": call}, pickled / "pytorch_model.bin")
    assert "it would call" in refusal(pickled)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([torch.ones(2)], "it holds a list, and no state dict"),
        (torch.ones(2), "it holds a Tensor, and no state dict"),
        ({"wte.weight": torch.ones(1).expand(10**6, 10**6)}, "larger than the part of the file that holds it"),
        ({"wte.weight": torch.ones(2).to_sparse()}, "it would call 'torch._utils._rebuild_sparse_tensor'"),
        ({"wte.weight": 3}, "'wte.weight' in it is a int and no tensor"),
        ({"model": {"wte.weight": torch.ones(2)}, "model_args": [1]}, "its model_args is a list"),
    ],
    ids=["list", "tensor", "expanded", "sparse", "number", "args"],
)
def test_pickles_of_something_else(pickled: Path, content: Any, complaint: str) -> None:
    torch.save(content, pickled / "pytorch_model.bin")
    assert complaint in refusal(pickled)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({1: 2}, "'1' among the config's fields is a int, as no config has"),
        ({"n_embd": torch.ones(2)}, "'n_embd' among the config's fields is a Tensor"),
        ({"n_embd": [[1]]}, "'n_embd' among the config's fields is a list"),
    ],
    ids=["names", "values", "lists of lists"],
)
def test_a_config_beside_the_tensors_of_a_pickle(pickled: Path, fields: Any, complaint: str) -> None:
    state = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    torch.save({"model": state, "model_args": fields}, pickled / "pytorch_model.bin")
    assert minigpt.from_pretrained(pickled, device="cpu"), "where there is a config.json nobody asks"
    (pickled / "config.json").unlink()
    assert complaint in refusal(pickled)
    assert complaint in describe(pickled)["refused"][0]


def rezipped(file: Path, method: int = zipfile.ZIP_STORED, **more: bytes) -> None:
    """The archive again, its parts stored by another method, and more parts in it."""
    with zipfile.ZipFile(file) as archive:
        parts = [(part.filename, archive.read(part)) for part in archive.infolist()]
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in [*parts, *more.items()]:
            archive.writestr(name, data)


def with_two_directories(file: Path, hidden: bytes) -> bytes:
    """The archive with another ``data.pkl`` behind it: its own list of parts stands last, the other's where it says."""
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
        first = archive.start_dir
    honest = file.read_bytes()
    other = file.with_suffix(".other")
    with zipfile.ZipFile(other, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, hidden if name.endswith("data.pkl") else data)
        second = archive.start_dir
    end, directory = honest[-22:], honest[first:-22]
    lying = end[:16] + struct.pack("<L", second) + end[20:]
    return other.read_bytes()[:-22] + honest[:first] + directory + lying


def test_an_archive_that_shows_each_reader_another_pickle(pickled: Path) -> None:
    """Python's reader takes the list of parts right before the end; another might take the one that the end names."""
    file, canary = pickled / "pytorch_model.bin", pickled / "canary"
    rezipped(file)
    file.write_bytes(with_two_directories(file, pickle.dumps({"wte.weight": Canary(canary)})))
    with zipfile.ZipFile(file) as archive:
        assert any(part.filename.endswith("data.pkl") for part in archive.infolist()), "it is an archive all the same"
    assert "its parts are listed in another place than its end says" in refusal(pickled)
    assert not canary.exists()


@pytest.mark.parametrize("more", [b"", bytes(100), b"PK"], ids=["", "zeros", "letters"])
@pytest.mark.parametrize("comment", [b"", b"mine"], ids=["", "comment"])
def test_what_stands_behind_an_archive_is_no_part_of_it(pickled: Path, more: bytes, comment: bytes) -> None:
    file = pickled / "pytorch_model.bin"
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = comment
    file.write_bytes(file.read_bytes() + more)
    try:
        torch.load(file, weights_only=True)
    except RuntimeError:
        pytest.skip("the library itself does not open it")
    assert minigpt.from_pretrained(pickled, device="cpu")


@pytest.mark.parametrize("kind", [tuple, frozenset])
@pytest.mark.parametrize("protocol", [1, 2, 4, 5])
def test_a_key_whose_hash_takes_forever(pickled: Path, kind: type, protocol: int) -> None:
    """Tuples that hold one another twice; built here by hand, since to hash one is what must not be done."""
    if kind is frozenset and protocol < 4:
        pytest.skip("such a pickle has no instruction for it")
    last: Any = ()
    for _ in range(40):
        last = (last, last)
    data = pickle.dumps([last], protocol)
    if kind is frozenset:
        start = b"\x80\x04(N\x91\x94"  # a set of None, remembered
        data = start + b"".join(b"(h%ch%c\x86\x91\x94" % (i, i) for i in range(40)) + b"."
    (pickled / "pytorch_model.bin").write_bytes(data)
    assert "members within members" in refusal(pickled)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_ordinary_values_are_followed_to_the_end_of_a_pickle(protocol: int) -> None:
    shared = (0.9, 0.95)
    value = {
        "groups": [{"betas": shared, "lr": 1e-3}, {"betas": shared, "params": [*range(300)]}], "set": {1, 2},
        "rng": ("MT19937", tuple(range(624)), 5), "ordered": OrderedDict(a=1, b=(shared, shared)), "none": None,
        "bytes": b"abc", "large": 2**70, "text": "naïve", "frozen": frozenset({1, (2, 3)}), "number": 1j,
    }  # fmt: skip
    sizes = Sizes()
    for operation, argument, _ in pickletools.genops(pickle.dumps(value, protocol)):
        sizes.follow(operation, argument)
    assert sizes.stack == []
    assert max(sizes.memo.values()) < 1000


def test_a_pickle_s_refusal_recommends_nothing(pickled: Path) -> None:
    """What the library says of such a file is how to run it after all."""
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x000.")  # POP, which no checkpoint has
    for said in (refusal(pickled), describe(pickled)["refused"][0]):
        assert "weights_only" not in said.partition("is not a PyTorch file")[2]
        assert "Re-running" not in said


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zip_bombs(pickled: Path, tmp_path: Path) -> None:
    file = pickled / "pytorch_model.bin"
    rezipped(file, zipfile.ZIP_DEFLATED, bomb=bytes(5_000_000))
    assert "unpack to" in refusal(pickled)
    npz = write_openai(reference(), tmp_path / "openai")
    rezipped(npz, zipfile.ZIP_DEFLATED, **{"model/bomb.npy": bytes(5_000_000)})
    assert "unpack to" in refusal(npz)
    npz = write_openai(reference(), tmp_path / "openai")
    rezipped(npz, **{"model/wte.npy": b"again"})
    assert "two parts of the archive have one name" in refusal(npz)


def test_an_array_that_claims_a_terabyte(tmp_path: Path) -> None:
    npz = write_openai(reference(), tmp_path)
    header = repr({"descr": "<f4", "fortran_order": False, "shape": (10**6, 250_000)}).encode().ljust(117) + b"\n"
    rezipped(npz, **{"model/more.npy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header})
    assert "not a whole .npz archive" in refusal(npz)


def test_arrays_of_objects_are_not_read(tmp_path: Path) -> None:
    npz = write_openai(reference(), tmp_path)
    np.savez(npz, **{"model/wte": np.array([Canary(tmp_path / "canary")], dtype=object)})
    assert "Object arrays cannot be loaded" in refusal(npz)
    assert not (tmp_path / "canary").exists()


# safetensors


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:size]), data[size:]


def write_safetensors(file: Path, header: str, data: bytes, length: int | None = None) -> None:
    encoded = header.encode()
    file.unlink()
    file.write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data)


@pytest.mark.parametrize("length", [10 * GIGABYTE, 2**63, 2**64 - 1])
def test_a_header_of_ten_gigabytes(folder: Path, length: int) -> None:
    header, data = header_of(folder / "model.safetensors")
    write_safetensors(folder / "model.safetensors", json.dumps(header), data, length)
    assert f"its header claims {length:,} bytes" in refusal(folder)


def test_a_header_that_is_as_long_as_it_claims(folder: Path) -> None:
    """A sparse file: ten gigabytes long, and nothing on the disk."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((10 * GIGABYTE).to_bytes(8, "little"))
        file.truncate(10 * GIGABYTE + 8)
    assert "its header claims 10,000,000,000 bytes" in refusal(folder)


LN, WPE = "transformer.ln_f.bias", "transformer.wpe.weight"


@pytest.mark.parametrize(
    ("offsets", "complaint"),
    [
        (lambda ln, wpe: (wpe, wpe), "invalid offset"),
        (lambda ln, wpe: ([wpe[0] + 4, wpe[0] + 132], wpe), "invalid offset"),
        (lambda ln, wpe: ([2**64 - 128, 2**64 - 0], wpe), ""),
        (lambda ln, wpe: ([ln[0], ln[0] + 2**62], wpe), ""),
        (lambda ln, wpe: ([ln[1], ln[0]], wpe), "invalid offset"),
        (lambda ln, wpe: ([-128, 0], wpe), ""),
    ],
    ids=["the same", "overlapping", "overflowing", "beyond the end", "backwards", "negative"],
)
def test_offsets_that_overlap_or_overflow(folder: Path, offsets: Callable[..., Any], complaint: str) -> None:
    header, data = header_of(folder / "model.safetensors")
    header[LN]["data_offsets"], header[WPE]["data_offsets"] = offsets(
        header[LN]["data_offsets"], header[WPE]["data_offsets"]
    )
    write_safetensors(folder / "model.safetensors", json.dumps(header), data)
    message = refusal(folder)
    assert "model.safetensors is not a whole safetensors file" in message
    assert complaint.lower() in message.lower()


def test_shapes_that_overflow(folder: Path) -> None:
    header, data = header_of(folder / "model.safetensors")
    header[LN]["shape"] = [2**32, 2**32]
    write_safetensors(folder / "model.safetensors", json.dumps(header), data)
    assert "is not a whole safetensors file" in refusal(folder)


def test_a_name_that_stands_twice(folder: Path) -> None:
    """With one range for both, so that the library alone would take the second."""
    header, data = header_of(folder / "model.safetensors")
    entry = json.dumps({LN: header[LN] | {"dtype": "I32"}})
    write_safetensors(folder / "model.safetensors", entry[:-1] + "," + json.dumps(header)[1:], data)
    assert load_file(folder / "model.safetensors")[LN].dtype == torch.float32, "the library does not mind"
    assert f"the name '{LN}' stands in it twice" in refusal(folder)


# Configs, indices, tokenizers


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        (dict(n_embd=2**20, n_head=1, n_layer=100), "1,319,"),
        (dict(vocab_size=2**31 - 1, n_embd=480, n_head=1), "1,030,"),
        (dict(n_layer=2**31 - 1), "27,"),
        (dict(n_embd=2**31 - 1, n_head=1, n_layer=2**31 - 1, n_inner=2**31 - 1), "parameters"),
    ],
    ids=["width", "vocabulary", "layers", "everything"],
)
def test_a_config_of_a_trillion_parameters(folder: Path, fields: dict[str, int], size: str) -> None:
    message = refusal(edit_config(folder, **fields))
    assert f"asks for {size}" in message or size == "parameters"
    assert "parameters, " in message
    assert " GB at float32, and its weights are" in message
    assert "parameters, " in describe(folder)["refused"][0]


def test_a_config_of_many_layers_of_next_to_nothing(folder: Path) -> None:
    """Its numbers would do no harm; to build its modules takes a while."""
    assert "asks for 2" in refusal(edit_config(folder, n_layer=1000, n_embd=1, n_head=1))


def test_numbers_that_no_model_has(folder: Path) -> None:
    assert "n_layer must be a whole number above 0 and below 2^31" in refusal(edit_config(folder, n_layer=10**400))


def test_files_of_endless_json(folder: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        with (folder / name).open("ab") as file:
            file.truncate(10 * GIGABYTE)
    assert "config.json is 10,000,000,000 bytes long" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "index.json is 10,000,000,000 bytes long" in refusal(folder)


def test_a_name_twice_in_a_config(folder: Path) -> None:
    text = (folder / "config.json").read_text().strip()
    (folder / "config.json").write_text('{"n_layer": 1, ' + text[1:])
    assert "the name 'n_layer' stands in it twice" in refusal(folder)


def test_an_index_that_leads_outside(tmp_path: Path) -> None:
    folder = saved(reference(), tmp_path / "model", max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = min(folder.glob("model-*.safetensors"))
    (tmp_path / shard.name).write_bytes(shard.read_bytes())
    for outside in (f"../{shard.name}", str(tmp_path / shard.name), f"sub/../../{shard.name}"):
        moved = {name: outside if file == shard.name else file for name, file in content["weight_map"].items()}
        index.write_text(json.dumps({"weight_map": moved}))
        assert "not a .safetensors file in its own folder" in refusal(folder)
    index.write_text(json.dumps(content))
    shard.unlink()
    shard.symlink_to(tmp_path / shard.name)
    assert "a link to a file outside its folder" in refusal(folder)


def test_a_tokenizer_that_makes_the_library_panic_or_swell(tmp_path: Path) -> None:
    """A chain of replacements, each of which doubles the text, would fill any memory with thirty of them."""
    tiny_bpe(300).save(str(tmp_path / "tokenizer.json"))
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [doubling] * 40}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    before = peak_mb()
    with pytest.raises(CheckpointError, match="normalizer"):
        minigpt.Tokenizer.from_pretrained(tmp_path)
    assert peak_mb() - before < 100


def test_a_tokenizer_whose_pattern_gives_up_on_a_text(tmp_path: Path) -> None:
    tiny_bpe(300).save(str(tmp_path / "tokenizer.json"))
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, fields["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = minigpt.Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(minigpt.GenerationError, match=r"^the tokenizer cannot split this text"):
        tokenizer.encode("x" * 60)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex64], ids=str)
def test_norms_of_a_dtype_that_is_none_of_ours_are_described_too(folder: Path, dtype: torch.dtype) -> None:
    edit_tensors(folder, lambda tensors: tensors | {"transformer.ln_f.weight": torch.ones(32).to(dtype)})
    assert "ln_f.weight" in " ".join(describe(folder)["refused"])


def test_an_index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "it has no weight_map of file names" in refusal(folder)
    assert "weight_map" in " ".join(describe(folder)["refused"])


def test_an_error_shows_all_that_it_says() -> None:
    assert str(MiniGPTError("a \x1b]0;title\x07\nb \udcff \u202e")) == "a \\x1b]0;title\\x07 b \\udcff \\u202e"


def test_what_is_ordinary_in_a_pickle_is_not_taken_for_hostile(pickled: Path) -> None:
    state = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    ordered = OrderedDict((name, nn.Parameter(tensor)) for name, tensor in state.items())
    torch.save(ordered, pickled / "pytorch_model.bin")
    assert minigpt.from_pretrained(pickled, device="cpu")
