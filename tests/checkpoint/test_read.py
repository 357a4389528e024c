"""Checkpoint files to tensors: mapped and not read, and no damage to a file gets further than one clear error."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_tensors, reference, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import minigpt
from minigpt import CheckpointError
from minigpt.checkpoint.read import read_tensors
from minigpt.errors import listing

SMALLEST = {"vocab_size": 5, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference(), tmp_path_factory.mktemp("single"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return saved(reference(), tmp_path / "sharded", max_shard_size="40KB")


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few hundred numbers, whose file the tests below damage."""
    return saved(reference(**SMALLEST), tmp_path_factory.mktemp("smallest"))


@pytest.fixture(scope="module")
def whole(smallest: Path) -> bytes:
    return (smallest / "model.safetensors").read_bytes()


def mapped_ranges(file: Path) -> list[range]:
    """The addresses at which this process has ``file`` mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if line[-1] == str(file.resolve())]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def lies_in(tensor: Tensor, ranges: list[range]) -> bool:
    return any(tensor.data_ptr() in addresses for addresses in ranges)


def test_every_tensor_comes_as_it_was_saved(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    for place in (folder, folder / "model.safetensors"):
        tensors = read_tensors(place)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_shards_come_as_one(folder: Path, sharded: Path) -> None:
    whole, parts = read_tensors(folder), read_tensors(sharded)
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
@pytest.mark.parametrize("shards", [False, True])
def test_tensors_are_the_mapped_file(folder: Path, sharded: Path, shards: bool) -> None:
    place = sharded if shards else folder
    tensors = read_tensors(place)
    ranges = [addresses for file in place.glob("*.safetensors") for addresses in mapped_ranges(file)]
    outside = [name for name, tensor in tensors.items() if not lies_in(tensor, ranges)]
    assert not outside, f"copied out of the file: {outside}"
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file: \S"):
        read_tensors(tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        read_tensors(tmp_path)


def damaged(smallest: Path, data: bytes) -> Path:
    """The smallest checkpoint with ``data`` for its file; never in place of one that is still mapped."""
    place = smallest / "damaged"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes((smallest / "config.json").read_bytes())
    (place / "model.safetensors").unlink(missing_ok=True)
    (place / "model.safetensors").write_bytes(data)
    return place


def load_damaged(smallest: Path, data: bytes) -> None:
    """Nothing but success or one sentence may come of loading it; and what was loaded can be read to its last page."""
    try:
        model = minigpt.from_pretrained(damaged(smallest, data), device="cpu")
    except CheckpointError as error:
        message = str(error)
    else:
        message = str(sum(parameter.double().sum() for parameter in model.parameters()))
    assert "\n" not in message
    assert len(message) < 1500


def with_header(header: object, data: bytes) -> bytes:
    """A safetensors file: the length of its header, the header, and the tensors."""
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def header_and_data(whole: bytes) -> tuple[dict[str, Any], bytes]:
    size = 8 + int.from_bytes(whole[:8], "little")
    return json.loads(whole[8:size]), whole[size:]


def test_every_truncation_is_refused(smallest: Path, whole: bytes) -> None:
    for size in [*range(0, 64), *range(64, len(whole), 97), *range(len(whole) - 20, len(whole))]:
        with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
            read_tensors(damaged(smallest, whole[:size]))


def test_bytes_behind_the_end_are_refused(smallest: Path, whole: bytes) -> None:
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        read_tensors(damaged(smallest, whole + b"\0"))


@settings(max_examples=100)
@given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_of_the_header_never_escape(smallest: Path, whole: bytes, edits: list[tuple[float, int]]) -> None:
    damaged, header = bytearray(whole), 8 + int.from_bytes(whole[:8], "little")
    for where, value in edits:
        damaged[int(where * header)] = value
    load_damaged(smallest, bytes(damaged))


@settings(max_examples=40)
@given(start=st.floats(0, 1), end=st.floats(0, 1), filling=st.binary(max_size=40))
def test_cut_and_filled_files_never_escape(
    smallest: Path, whole: bytes, start: float, end: float, filling: bytes
) -> None:
    first, last = sorted((int(start * len(whole)), int(end * len(whole))))
    load_damaged(smallest, whole[:first] + filling + whole[last:])


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_arbitrary_files_never_escape(smallest: Path, data: bytes) -> None:
    load_damaged(smallest, data)


# fmt: off
ODD_DTYPES = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "F64", "I64", "U64", "C64", "f32", "Q4_K",
)
# fmt: on
ODD_VALUES = st.one_of(
    st.sampled_from([None, [], {}, "", -1, 0, 1, 1.5, True, 2**31, 2**63, 2**64, [4, 4], [0], [-1, 4], [2**40, 2**40]]),
    st.lists(st.integers(-1, 100), max_size=4),
    st.sampled_from(ODD_DTYPES),
)


@settings(max_examples=150)
@given(
    data=st.data(),
    field=st.sampled_from(["dtype", "shape", "data_offsets", "name", "extra", "whole"]),
    value=ODD_VALUES,
)
def test_odd_headers_never_escape(smallest: Path, whole: bytes, data: st.DataObject, field: str, value: Any) -> None:
    header, rest = header_and_data(whole)
    name = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    if field == "name":
        header[str(value)] = header.pop(name)
    elif field == "whole":
        header[name] = value
    else:
        header[name][field] = value
    load_damaged(smallest, with_header(header, rest))


@pytest.mark.parametrize("dtype", ODD_DTYPES)
def test_a_file_of_one_odd_dtype_is_loaded_or_refused(smallest: Path, whole: bytes, dtype: str) -> None:
    """Every tensor relabelled and its size made to fit: only the four dtypes that a model computes in get through."""
    header, _ = header_and_data(whole)
    header.pop("__metadata__")
    bits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)
    end = 0
    for entry in header.values():
        start, (first, last) = end, entry["data_offsets"]
        end = start + (last - first) // 4 * bits // 8
        entry.update(dtype=dtype, data_offsets=[start, end])
    place = damaged(smallest, with_header(header, bytes(end)))
    for into in (None, "float32"):
        if dtype in ("F16", "BF16", "F32", "F64"):
            assert minigpt.from_pretrained(place, device="cpu", dtype=into)
        else:
            with pytest.raises(CheckpointError):
                minigpt.from_pretrained(place, device="cpu", dtype=into)


def test_an_index_and_shards_that_disagree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    cases = {
        "of which none is in the shards": {"h.0.new.weight": files[0]},
        "in another shard": {"transformer.wte.weight": files[-1], "transformer.wpe.weight": files[-1]},
    }
    for extra in cases.values():
        index.write_text(json.dumps({"weight_map": content["weight_map"] | extra}))
        with pytest.raises(CheckpointError, match=rf"the index and the shards disagree about .*{next(iter(extra))}"):
            read_tensors(sharded)
    fewer = {name: file for name, file in content["weight_map"].items() if "ln_f" not in name}
    index.write_text(json.dumps({"weight_map": fewer}))
    with pytest.raises(CheckpointError, match=r"disagree about transformer\.ln_f\.bias, transformer\.ln_f\.weight$"):
        read_tensors(sharded)


def test_a_tensor_that_two_shards_hold(sharded: Path) -> None:
    first, *_, last = sorted(file.name for file in sharded.glob("model-*.safetensors"))
    doubled, tensor = next(iter(load_file(sharded / first).items()))
    edit_tensors(sharded, lambda tensors: tensors | {doubled: tensor + 1}, file=last)
    with pytest.raises(CheckpointError, match=rf"disagree about {doubled}$"):
        read_tensors(sharded)


def test_a_damaged_shard_is_named(sharded: Path) -> None:
    last = sorted(sharded.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{last.name} is not a whole safetensors file"):
        read_tensors(sharded)


def test_a_name_that_cannot_be_printed_stays_on_its_line(smallest: Path, whole: bytes) -> None:
    header, rest = header_and_data(whole)
    header["two\nlines\x1b[31m"] = header.pop("transformer.ln_f.bias")
    with pytest.raises(CheckpointError, match=r"unexpected 'two\\nlines\\x1b\[31m'$"):
        minigpt.from_pretrained(damaged(smallest, with_header(header, rest)), device="cpu")


def test_listing_is_sorted_and_counts_the_rest() -> None:
    assert listing(["b", "a"]) == "a, b"
    assert listing(map(str, range(11))) == "0, 1, 10, 2, 3, 4, 5, 6 and 3 more"
    assert listing([]) == ""


def test_an_empty_file_of_no_tensors(folder: Path, tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path) == {}
