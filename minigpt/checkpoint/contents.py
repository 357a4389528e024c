"""Where a checkpoint is, which files it has, and what they hold. Reading one never runs what is in it."""

import contextlib
import dataclasses
import functools
import json
import os.path
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from minigpt.errors import CheckpointError, ConfigError, MiniGPTError
from minigpt.files import PARTIAL, as_path, read_object
from minigpt.host import GPT2_TYPES

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
MODEL_TYPE = GPT2_TYPES[1]  # of a GPT-2 whose norms are not all LayerNorm
SAFETENSORS = "model.safetensors"
# Patterns of the files that a model is, without its tokenizer.
MODEL = (CONFIG, GENERATION_CONFIG, SAFETENSORS, f"{SAFETENSORS}.index.json", "model-?????-of-?????.safetensors")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-?????-of-?????.bin")
VOCABULARY_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
    "encoder.json", "meta.pkl",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "merges.txt", "vocab.bpe", "tokenizer_config.json", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
WEIGHT_FILES = (SAFETENSORS, "pytorch_model.bin", "ckpt.pt")  # the first that exists, whole or with an index
WEIGHTS_FIELD = "transformers_weights"  # of config.json: the file or index that holds the weights, if it is another
ADAPTER = "adapter_config.json"  # of PEFT
CURRENT = "current"  # names the folder inside that holds the checkpoint while its files are moved to their places

DEMO = Path(__file__).parents[1] / "demo"
PUBLISHED = ("demo", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
COMMITS: dict[tuple[str, str | None], str] = {}  # of repositories and revisions, as this process first saw them
REPOSITORY = re.compile(r"[^./~][^/]*(/[^/]+)?")

# The tokenizer's files count the ids in use, and must come from the same commit.
MODEL_FILES = (*MODEL, *TOKENIZER_FILES, ADAPTER)

Read = TypeVar("Read")


def local_place(
    source: str | Path,
    files: tuple[str, ...] = MODEL_FILES,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the local folder, or file of weights, that ``source`` names. Fetches a hub repository into the cache.

    A process reads all files of a repository from one commit, also when its branch moves meanwhile.

    huggingface_hub fetches it, so HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT have their usual meaning.

    Args:
        source: "demo", a directory, a file of weights (``WEIGHT_SUFFIXES``), or a repository id.
        files: shell-style patterns of the files to fetch from a repository.
        revision: branch, tag or commit of a repository.
        local_files_only: never use the network.

    Raises:
        CheckpointError: if there is no such thing, or it cannot be fetched.
    """
    if source == "demo":
        return DEMO
    path = Path(os.path.expanduser(as_path(source, "source", CheckpointError)))
    is_weights = path.name.endswith(WEIGHT_SUFFIXES)
    try:
        if path.is_file() and not is_weights:
            raise CheckpointError(f"{source} must be a directory or a {', '.join(WEIGHT_SUFFIXES)} file")
        if path.exists():
            return path
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error.strerror}") from error
    if not isinstance(source, str) or not REPOSITORY.fullmatch(source) or is_weights:
        raise CheckpointError(f"there is no directory or file of weights {source}")
    return _fetch(source, files, revision, local_files_only)


def _fetch(repository: str, files: tuple[str, ...], revision: str | None, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download  # imported here: a local model needs no network client

    snapshot = functools.partial(snapshot_download, repository, local_files_only=local_files_only)
    try:
        commit = COMMITS.get((repository, revision), revision)
        folder = Path(snapshot(revision=commit, allow_patterns=[*files]))
        COMMITS[repository, revision] = folder.name
        if SAFETENSORS in files and not any(folder.glob("model*.safetensors*")):  # an old repository
            snapshot(revision=folder.name, allow_patterns=[*PICKLED])  # from the same commit
    except Exception as error:  # the client and its transport raise many kinds
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"cannot get {repository!r}{at} from the Hugging Face hub; give a local folder, or one of "
            f"{', '.join(PUBLISHED)}; only demo needs no network, and a private or gated repository needs HF_TOKEN. "
            f"The hub's client says: {' '.join(str(error).split())}"
        ) from error
    return folder


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a checkpoint.

    Attributes:
        place: the folder, or the file of weights, that the user names.
        folder: where the other files are: in ``place``, beside it, or in a folder inside if a save was cut short.
        config: the fields of config.json, which is read once; None without one.
    """

    place: Path
    folder: Path
    config: dict[str, Any] | None

    @classmethod
    def at(cls, place: Path) -> "Files":
        """Find the files of the checkpoint in a folder, or around a file of weights.

        Raises:
            ConfigError: if config.json is not a JSON object.
        """
        folder = place if place.is_dir() else place.parent
        config = read_object(folder / CONFIG, ConfigError) if (folder / CONFIG).is_file() else None
        inner, slash, _ = str((config or {}).get(WEIGHTS_FIELD) or "").partition("/")
        if config and slash and place.is_dir() and inner.startswith(f".{CURRENT}.") and inner.endswith(PARTIAL):
            folder = place / inner
            del config[WEIGHTS_FIELD]
        return cls(place, folder, config)

    @property
    def architecture(self) -> str | None:
        """The ``model_type`` of an architecture other than GPT-2, else None."""
        kind = (self.config or {}).get("model_type")
        return kind if isinstance(kind, str) and kind not in GPT2_TYPES else None

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer's vocabulary."""
        return any((self.folder / name).is_file() for name in VOCABULARY_FILES)

    def generation_fields(self) -> dict[str, Any]:
        """Return all fields of generation_config.json; an empty dict without one.

        Raises:
            CheckpointError: if the file is not a JSON object.
        """
        return fields_of(self.folder / GENERATION_CONFIG)

    def weights(self) -> list[Path]:
        """Return the files that hold the tensors: one, or those that an index names.

        Raises:
            CheckpointError: if there are none, the index is damaged or names a file that is not beside it, or an
                adapter of PEFT stands beside them.
        """
        if self.place.is_file():
            return [self.place]
        require_no_adapter(self.folder)
        if name := str((self.config or {}).get(WEIGHTS_FIELD) or ""):
            _require_beside(self.folder / CONFIG, name)
            return _shards(self.folder / name) if name.endswith(".index.json") else [self.folder / name]
        for name in WEIGHT_FILES:
            if (self.folder / name).is_file():
                return [self.folder / name]
            if (index := self.folder / f"{name}.index.json").is_file():
                return _shards(index)
        no_config = "" if self.config is not None else f"no {CONFIG} and "
        others = sorted(path.name for path in self.folder.glob("*") if path.suffix in WEIGHT_SUFFIXES)
        hint = f"; to load one of {', '.join(others)}, give the path of that file" if others else ""
        raise CheckpointError(f"{self.place} has {no_config}no {SAFETENSORS}{hint}")

    def tensors(self) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
        """Return the tensors by their names in the files, and the config that a trainer's file carries, if it does.

        The tensors are on the CPU, mapped into memory where the format allows, and read when first used.

        Raises:
            CheckpointError: if there are no weights, or a file is damaged or holds more than tensors.
        """
        (tensors, fields), *shards = [_read(file) for file in self.weights()]
        for shard, _ in shards:
            tensors.update(shard)
        return tensors, fields


def require_no_adapter(folder: Path) -> None:
    """Check that a folder's weights are all that its model is.

    transformers adds an adapter to a model where PEFT is installed, and reads the model alone where it is not.

    Raises:
        CheckpointError: if an adapter of PEFT stands in the folder.
    """
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder} holds an adapter of PEFT ({ADAPTER}), which would be another model with it than without; save "
            "the merged model, by merge_and_unload and save_pretrained, or judge the model that you hold by "
            "minigpt.parity(model, against=...)"
        )


def quantized(place: Path, method: object) -> CheckpointError:
    """Return the error for a checkpoint whose weights are quantized.

    Args:
        method: the ``quant_method`` of its config.
    """
    name = getattr(method, "value", method) or "quantized"
    return CheckpointError(
        f"{place} holds quantized weights ({name}), and minigpt reads floating ones; save what transformers' "
        "model.dequantize() returns, or judge the model that you hold by minigpt.parity(model, against=...)"
    )


def known_files(place: Path) -> list[Path]:
    """Return the files that a checkpoint may be read from, its tokenizer's included, sorted by name."""
    if place.is_file():
        return [place, *(path for path in known_files(place.parent) if path.suffix == ".json")]
    patterns = (*MODEL, *TOKENIZER_FILES, "*.index.json", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES))
    return sorted(path for path in place.iterdir() if any(fnmatchcase(path.name, pattern) for pattern in patterns))


def read_stable(place: Path, read: Callable[[Files], Read]) -> Read:
    """Return what ``read`` returns for a checkpoint's files. If another process saves there meanwhile, read again."""
    while True:
        state = state_of(place)
        try:
            result = read(Files.at(place))
        except MiniGPTError:
            if state_of(place) == state:
                raise
        else:
            if state_of(place) == state:
                return result


@contextlib.contextmanager
def unchanged(place: Path) -> Iterator[None]:
    """Check that nobody saves to a checkpoint while the block reads it.

    Raises:
        CheckpointError: if somebody does, also in place of an error of the block.
    """
    state = state_of(place)
    try:
        yield
    finally:
        if state_of(place) != state:
            raise CheckpointError(f"{place} was saved to while it was read; start again when nothing writes to it")


def state_of(place: Path) -> list[tuple[Path, int, int, int]]:
    """Return what changes when a file of a checkpoint is written: number, size and time of each."""
    state = []
    for path in known_files(place):
        with contextlib.suppress(OSError):  # it is gone
            entry = path.stat()
            state.append((path, entry.st_ino, entry.st_size, entry.st_mtime_ns))
    return state


def fields_of(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict if there is no such file.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    return read_object(file, CheckpointError) if file.is_file() else {}


def write_json(path: Path, fields: Mapping[str, object]) -> None:
    """Write fields as readable JSON.

    Raises:
        OSError: if that fails.
    """
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def holds_model(folder: Path) -> bool:
    """Return True if a folder contains a config or weights by a checkpoint's names, or a tokenizer."""
    indexes = (f"{name}.index.json" for name in WEIGHT_FILES)
    return any((folder / name).is_file() for name in (CONFIG, *WEIGHT_FILES, *indexes, *VOCABULARY_FILES))


def _read(file: Path) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
    try:
        return (load_file(file), None) if file.suffix == ".safetensors" else _read_pickle(file)
    except Exception as error:  # each library raises its own kinds
        # torch.load also says how to run the file without restrictions. Keep only the reason.
        reason = str(error).partition("WeightsUnpickler error:")[2].partition("Please use")[0] or str(error)
        raise CheckpointError(f"{file} cannot be read as a {file.suffix} file: {' '.join(reason.split())}") from error


def _read_pickle(file: Path) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
    """Return the tensors of a state dict, or of a trainer's checkpoint that holds one.

    ``torch.load(weights_only=True)`` reads the pickle. It builds tensors and plain containers, and calls nothing else.
    """
    is_archive = zipfile.is_zipfile(file)
    if is_archive and any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(file).infolist()):
        raise ValueError("its archive is compressed, which torch.save never does")
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it must hold a state dict, got a {type(loaded).__name__}")
    nested = ("model", "model_state_dict", "state_dict")  # where trainers keep the weights beside their own state
    state = next((loaded[name] for name in nested if isinstance(loaded.get(name), Mapping)), loaded)
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            raise ValueError(f"{name!r:.100} must be the name of a plain tensor")
        if value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{name!r} has shape {tuple(value.shape)}, and the file does not hold so many values")
    return {name: value.detach() for name, value in state.items()}, loaded.get("model_args")  # as nanoGPT


def _shards(index: Path) -> list[Path]:
    weight_map = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must have a weight_map from tensors to files")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        _require_beside(index, name)
    return [index.parent / name for name in names]


def _require_beside(file: Path, name: str) -> None:
    if Path(name).name != name or not os.path.isfile(file.parent / name):  # of a path that NUL is in too
        raise CheckpointError(f"{file} names {name!r}, which is not a file beside it")
