"""The weights in another program's file: dequantized, and by the names that the original's tensors have."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from minigpt.checkpoint.contents import (
    CONFIG,
    GENERATION_CONFIG,
    SAFETENSORS,
    TOKENIZER_FILES,
    Files,
    is_gguf,
    local_place,
    read_stable,
)
from minigpt.checkpoint.gguf import LINEAR_WEIGHTS, types_of
from minigpt.checkpoint.pretrained import loaded_tensors
from minigpt.engines.weights import Constant, constants_of
from minigpt.errors import CheckpointError, ConfigError, listing
from minigpt.files import TemporaryFolder, write_json

HEAD = "lm_head.weight"
MOST_SAID = 5  # sentences on tensors
SAMPLED = 4096  # values of a tensor by which its partner is searched
MOST_MOVED = 0.7  # of its size: two bits a weight move a tensor by 0.35, and another tensor of its size is 1.4 away
BLOCK_VALUES = 32  # values
FAR_BLOCK = 0.5  # of its size, beside four times the median of all: rounding to a few bits makes 2.7 times it at most
ROUNDED = {"f64": 1e-6, "f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}  # how far a block may be in a floating dtype


@dataclasses.dataclass(frozen=True)
class FileWeights:
    """The weights in another program's file.

    Attributes:
        place: what minigpt opens as a checkpoint with these weights: the GGUF file, or a folder that goes with this
            object.
        tensors: in float32, by the names and in the layouts that ``tensors_of`` gives of a checkpoint.
        types: how the file stores each tensor, as "Q4_K" or "int8, a scale for each row".
        strange: a sentence on each tensor that is not the original's, or has no partner in the file, and on each
            number of the config that is another.
    """

    place: Path
    tensors: dict[str, Tensor]
    types: dict[str, str]
    strange: list[str]
    folder: TemporaryFolder | None = None


def weights_of(file: str | Path, original: str | Path | None = None) -> FileWeights:
    """Return the weights in a file of llama.cpp, onnxruntime, OpenVINO or CTranslate2.

    A GGUF file says what its tensors are. Those of other files are known by what they hold: each of the original's
    tensors has the nearest one of its shape, transposed or not, or the rows of a longer one.

    Args:
        file: a .gguf, .onnx or .xml file, or a folder of CTranslate2.
        original: the checkpoint of which the file was made. Other files than GGUF need it.

    Raises:
        ConfigError: if the package that reads such a file is not installed, or the original is not given.
        CheckpointError: if the file or the original cannot be read.
    """
    path = Path(file)
    files, expected = None, dict[str, Tensor]()
    if original is not None:
        files = Files.at(local_place(original))
        for name, tensor in read_stable(files.place, loaded_tensors).items():
            expected[name] = tensor.float()
    if is_gguf(path):
        tensors, strange = read_stable(path, loaded_tensors), list[str]()
        types = types_of(path)
        if files is not None:
            strange = strange_numbers(Files.at(path), files) + strange_tensors(tensors, expected, types)
        return FileWeights(path, tensors, types, strange)
    if files is None:
        raise ConfigError(f"must name the checkpoint of which {file} was made", argument="original")
    config: dict[str, Any] = dict(files.config or {}) | {"dtype": "float32"}
    partners = partners_of(constants_of(path), expected, config.get("vocab_size"))
    tensors, types, strange = dict(expected), dict[str, str](), list[str]()
    for name, (values, kind) in partners.items():
        tensors[name], types[name] = values.clone(memory_format=torch.contiguous_format), kind
    if HEAD in partners and HEAD not in expected:
        config["tie_word_embeddings"] = False
    alone: list[str] = []
    for name in sorted(expected.keys() - partners.keys()):
        if expected[name].unique().tolist() not in ([0], [1]):  # programs leave out what changes nothing
            alone.append(name)
    if not partners:
        raise CheckpointError(f"{file} has none of the tensors of {original}")
    if alone:
        strange.append(f"of the original, {listing(alone)} has no partner in the file, and is taken from the original")
    folder = TemporaryFolder("weights")
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
        if (files.folder / name).is_file():
            (folder.path / name).symlink_to((files.folder / name).resolve())
    write_json(folder.path / CONFIG, config)
    save_file(tensors, folder.path / SAFETENSORS, {"format": "pt"})
    return FileWeights(folder.path, tensors, types, strange_tensors(tensors, expected, types) + strange, folder)


class StoredForm(NamedTuple):
    """A constant of a file without sizes of 1, as it is or transposed."""

    values: Tensor
    constant: Constant


def partners_of(
    constants: Sequence[Constant], expected: Mapping[str, Tensor], vocab_size: int | None = None
) -> dict[str, tuple[Tensor, str]]:
    """Return what a file has of the original's tensors, and how it is stored, by their names.

    A tensor is given what is near, of its shape or among the rows of a longer one, else what is left of its shape.

    Args:
        vocab_size: the rows of the embedding, whose second copy is the head.
    """
    forms: list[StoredForm] = []
    for constant in constants:
        values = torch.from_numpy(constant.values).squeeze()
        forms.append(StoredForm(values, constant))
        if values.ndim == 2:
            forms.append(StoredForm(values.mT, constant))
    pairs: list[tuple[float, str, StoredForm]] = []
    for name, tensor in expected.items():
        for form in forms:
            if form.values.shape == tensor.shape:
                pairs.append((away(_sample(form.values), _sample(tensor)), name, form))
    pairs.sort(key=lambda pair: pair[0])
    near = [pair for pair in pairs if pair[0] < MOST_MOVED]
    partners, taken = dict[str, StoredForm](), dict[int, str]()  # which tensor has taken a constant

    def take(pairs: Sequence[tuple[float, str, StoredForm]]) -> None:
        for _, name, form in pairs:
            if name not in partners and id(form.constant) not in taken:
                partners[name] = form
                taken[id(form.constant)] = name

    take(near)
    for _, name, form in near:  # tensors of the same values, of which a file may keep one
        if name not in partners and torch.equal(expected[name], expected[taken[id(form.constant)]]):
            partners[name] = form
    for name in expected.keys() - partners.keys():
        for form in forms:
            rows = rows_like(form.values, expected[name])
            if rows is not None and away(rows, expected[name]) < MOST_MOVED:
                partners[name] = StoredForm(rows, form.constant)
    for _, name, form in near:  # a second copy of the embedding
        is_embedding = expected[name].ndim == 2 and len(expected[name]) == vocab_size
        if not is_embedding or id(form.constant) in taken or HEAD in {*expected, *partners}:
            continue
        table, head = partners[name], form
        if head.constant.is_table:
            table, head = head, table
        if not torch.equal(table.values, head.values):
            partners[name], partners[HEAD] = table, head
    take(pairs)
    return {name: (form.values, form.constant.kind) for name, form in partners.items()}


def rows_like(longer: Tensor, tensor: Tensor) -> Tensor | None:
    """Return the rows of a longer matrix, or the values of a longer vector, that are nearest to a tensor.

    None if it is not longer, or has rows of another length.
    """
    if longer.shape[1:] != tensor.shape[1:] or len(longer) <= len(tensor):
        return None
    size = len(tensor) if tensor.ndim == 1 else 1
    windows = longer.unfold(0, size, 1).reshape(len(longer) - size + 1, -1)
    begin = int((windows - tensor[:size].reshape(-1)).square().sum(1).argmin())
    return longer[begin : begin + len(tensor)] if begin + len(tensor) <= len(longer) else None


def away(tensor: Tensor, expected: Tensor) -> float:
    """Return how far a tensor is from another, by the other's size."""
    size = expected.norm().item()
    distance = (tensor - expected).norm().item()
    return distance / size if size else math.inf * distance if distance else 0.0


def _sample(tensor: Tensor) -> Float[Tensor, " values"]:
    """Return some of the values, the same of each tensor of a shape."""
    places = torch.linspace(0, tensor.numel() - 1, min(SAMPLED, tensor.numel()), dtype=torch.float64).long()
    return tensor[torch.unravel_index(places, tensor.shape)]


def strange_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], types: Mapping[str, str]
) -> list[str]:
    """Return a sentence on each tensor, or block of one, that rounding to its type cannot have moved so far.

    A block is of 32 inputs of an output, as a file has a scale for.

    Args:
        types: how each is stored.
    """
    strange: list[tuple[float, str]] = []
    for name, tensor in expected.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            strange.append((math.inf, f"the file has no {name} of the original's shape, {tuple(tensor.shape)}"))
            continue
        moved = away(tensors[name], tensor)
        if moved >= MOST_MOVED:
            strange.append((moved, f"{name} of the file is not the original's: {moved:.2g} of its size away"))
            continue
        rows, stored = tensor, tensors[name]
        if name.endswith(LINEAR_WEIGHTS):  # (in, out)
            rows, stored = rows.mT, stored.mT
        moves = _moves_of_blocks(stored, rows)
        median = moves.median().item()
        most = ROUNDED.get(types.get(name, "").lower().replace("float", "f"), FAR_BLOCK + 4 * median)
        far = int((moves > most).sum())
        if far:
            sentence = (
                f"{far:,} of {len(moves):,} blocks in {name} of the file are not the original's: up to "
                f"{moves.max().item():.2g} of their size away, where half of all are {median:.2g} away at most"
            )
            strange.append((moved, sentence))
    strange.sort(key=lambda pair: -pair[0])
    sentences = [sentence for _, sentence in strange[:MOST_SAID]]
    more = len(strange) - MOST_SAID
    if more > 0:
        sentences.append(f"{more} more of {len(expected)} tensors of the file are not the original's")
    return sentences


def _moves_of_blocks(tensor: Tensor, expected: Tensor) -> Float[Tensor, " blocks"]:
    """Return how far each block of 32 values has moved, by its size, or the mean size of all if that is larger."""
    whole = expected.numel() // BLOCK_VALUES * BLOCK_VALUES
    if not whole:
        return torch.zeros(1)
    blocks = expected.reshape(-1)[:whole].view(-1, BLOCK_VALUES)
    moves = (tensor.reshape(-1)[:whole].view(-1, BLOCK_VALUES) - blocks).square().sum(1)
    sizes = blocks.square().sum(1)
    return (moves / sizes.maximum(sizes.mean())).nan_to_num().sqrt()


def strange_numbers(files: Files, original: Files) -> list[str]:
    """Return a sentence on each number in a config that is not the original's."""
    strange: list[str] = []
    found, expected = dict(files.config or {}), dict(original.config or {})
    for config in (found, expected):
        for name in ("rope_scaling", "rope_parameters"):  # older files have the base beside it
            config.update(config.get(name) or {})
    for name, value in found.items():
        is_number = all(isinstance(number, int | float) for number in (value, expected.get(name)))
        if is_number and not name.endswith("_id") and not math.isclose(value, expected[name], rel_tol=1e-6):
            strange.append(f"{name} of the file is {value}, and the original's {expected[name]}")
    return strange
