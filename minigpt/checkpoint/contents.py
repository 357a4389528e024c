"""The place, the files and the contents of a checkpoint. Reading one never runs what is in it."""

import contextlib
import dataclasses
import functools
import logging
import os.path
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from minigpt.checkpoint.formats import CONFIG, SAFETENSORS
from minigpt.checkpoint.pickles import check_pickles
from minigpt.choices import GPT2_TYPES
from minigpt.errors import CheckpointError, ConfigError, MiniGPTError, listing, near, raised
from minigpt.files import as_path, file_state, is_temporary, read_object

GENERATION_CONFIG = "generation_config.json"
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
GGUF = ".gguf"  # of a file that is a whole checkpoint
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
FileContent = tuple[dict[str, Tensor], Mapping[str, Any] | None]  # tensors by name, and the config of a trainer's file
State = dict[Path, tuple[int, ...] | None]  # of each file


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
        source: "demo", a directory, a file of weights (``WEIGHT_SUFFIXES``), a GGUF file, or a repository id.
        files: shell-style patterns of the files to fetch from a repository.
        revision: branch, tag or commit of a repository.
        local_files_only: never use the network.

    Raises:
        CheckpointError: if there is no such thing, or it cannot be fetched.
    """
    if source == "demo":
        if holds_model(Path(source)):
            _note_demo(Path(source).absolute())
        return DEMO
    path = Path(os.path.expanduser(as_path(source, "source", CheckpointError)))
    suffixes = (*WEIGHT_SUFFIXES, GGUF)
    is_weights = path.name.endswith(suffixes)
    try:
        if path.is_file() and not is_weights:
            raise CheckpointError(f"{source} must be a directory or a {', '.join(suffixes)} file")
        if path.exists():
            return path
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error.strerror}") from error
    if not isinstance(source, str) or not REPOSITORY.fullmatch(source) or is_weights:
        raise CheckpointError(f"there is no directory or file of weights {source}")
    return _fetch(source, files, revision, local_files_only)


@functools.cache  # once
def _note_demo(folder: Path) -> None:
    logging.getLogger("minigpt").warning("demo is the packaged model; the model in %s is ./demo", folder)


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
        at = ""
        if revision:
            at = f" at revision {revision!r}"
        meant = near(repository, PUBLISHED, 0.75)
        hint = f" did you mean {meant}?" if meant else ""
        raise CheckpointError(
            f"cannot get {repository!r}{at} from the Hugging Face hub;{hint} give a local folder, or one of "
            f"{', '.join(PUBLISHED)}; only demo needs no network, and a private or gated repository needs HF_TOKEN. "
            f"The hub's client says: {' '.join(str(error).split())}"
        ) from error
    return folder


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a checkpoint.

    Attributes:
        place: the folder, or the file of weights, that the user names.
        folder: where the other files are: ``place`` or its folder, a folder inside if a save was cut short, or a
            temporary one that has what a GGUF file holds.
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
            CheckpointError: if it, or another file beside the weights, is a link that leads nowhere.
        """
        folder = place if place.is_dir() else place.parent
        if is_gguf(place):
            from minigpt.checkpoint.gguf import folder_of  # imported here: other models need no gguf

            folder = folder_of(place)
        require_whole_links(folder, (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES))
        if not (folder / CONFIG).is_file():
            return cls(place, folder, None)
        config = read_object(folder / CONFIG, ConfigError)
        inner, slash, _ = str(config.get(WEIGHTS_FIELD) or "").partition("/")
        is_cut_short = slash and is_temporary(inner, CURRENT)  # a save that was moving the files to their places
        if is_cut_short and place.is_dir():
            folder = place / inner
            del config[WEIGHTS_FIELD]
        return cls(place, folder, config)

    @property
    def architecture(self) -> str | None:
        """The ``model_type`` of an architecture other than GPT-2, else None."""
        if self.config is None:
            return None
        kind = self.config.get("model_type")
        if not isinstance(kind, str) or kind in GPT2_TYPES:
            return None
        return kind

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer's vocabulary."""
        return _has_one(self.folder, VOCABULARY_FILES)

    def generation_fields(self) -> dict[str, Any] | None:
        """Return all fields of generation_config.json; None without one.

        Raises:
            CheckpointError: if the file is not a JSON object.
        """
        file = self.folder / GENERATION_CONFIG
        return fields_of(file) if file.is_file() else None

    def weights(self) -> list[Path]:
        """Return the files that hold the tensors: one, or those that an index names.

        Raises:
            CheckpointError: if there are none, the index is damaged or names a file that is not in the folder, or
                an adapter of PEFT is in the folder.
        """
        if self.place.is_file() and not is_gguf(self.place):
            return [self.place]
        require_no_adapter(self.folder)
        config = self.config or {}
        named = str(config.get(WEIGHTS_FIELD) or "")
        if named:
            _require_beside(self.folder / CONFIG, named)
            return _parts(self.folder / named)
        for name in WEIGHT_FILES:
            file, index = self.folder / name, self.folder / f"{name}.index.json"
            if file.is_file():
                return [file]
            if index.is_file():
                return _parts(index)
        require_whole_links(self.folder, sorted(path.name for path in self.folder.iterdir()))
        raise CheckpointError(f"{self.place} has {self._lacks()}")

    def _lacks(self) -> str:
        """Return the files that are missing, and the file of weights to name instead."""
        lacks = f"no {SAFETENSORS}"
        if self.config is None:
            lacks = f"no {CONFIG} and {lacks}"
        others = sorted(path.name for path in self.folder.glob("*") if path.suffix in (*WEIGHT_SUFFIXES, GGUF))
        if others:
            lacks += f"; to load one of {', '.join(others)}, give the path of that file"
        return lacks

    def tensors(self) -> FileContent:
        """Return the tensors by their names in the files, and the config that a trainer's file carries, if it does.

        The tensors are on the CPU, mapped into memory where the format allows, and read when first used.

        Raises:
            CheckpointError: if there are no weights, or a file is damaged or holds more than tensors.
        """
        first, *others = self.weights()
        tensors, fields = _read(first)
        for file in others:
            tensors.update(_read(file)[0])
        return tensors, fields


def require_no_adapter(folder: Path) -> None:
    """Check that a folder's weights are all that its model is.

    transformers adds an adapter to a model where PEFT is installed, and reads the model alone where it is not.

    Raises:
        CheckpointError: if an adapter of PEFT is in the folder.
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
    if is_gguf(place):
        return [place]
    if place.is_file():
        return [place, *(path for path in known_files(place.parent) if path.suffix == ".json")]
    endings = [f"*{suffix}" for suffix in (".index.json", *WEIGHT_SUFFIXES)]
    patterns = [*MODEL, *TOKENIZER_FILES, *endings]
    return sorted(path for path in place.iterdir() if matches(path.name, patterns))


def is_gguf(place: Path) -> bool:
    """Return True for a GGUF file, by its name."""
    return place.suffix == GGUF and place.is_file()


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if at least one shell-style pattern matches the name of a file."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_stable(place: Path, read: Callable[[Files], Read]) -> Read:
    """Return what ``read`` returns for a checkpoint's files. If another process saves there meanwhile, read again."""
    while True:
        state = files_state(place)
        try:
            result = read(Files.at(place))
        except (MiniGPTError, OSError):  # a folder inside may go while it is listed
            if files_state(place) == state:
                raise
        else:
            if files_state(place) == state:
                return result


@contextlib.contextmanager
def unchanged(place: Path, since: State | None = None) -> Iterator[None]:
    """Check that nobody saves to a checkpoint while the block reads it.

    Args:
        since: the state of its files; by default that at the beginning of the block.

    Raises:
        CheckpointError: if somebody does, also in place of an error of the block.
    """
    state = files_state(place) if since is None else since
    try:
        yield
    finally:
        if files_state(place) != state:
            raise CheckpointError(f"{place} was saved to while it was read; start again when nothing writes to it")


def files_state(place: Path) -> State:
    """Return what changes when a file of a checkpoint is written."""
    return {path: file_state(path) for path in known_files(place)}


def fields_of(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict if there is no such file.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    if not file.is_file():
        return {}
    return read_object(file, CheckpointError)


def holds_model(folder: Path) -> bool:
    """Return True if a folder contains a config or weights by a checkpoint's names, or a tokenizer."""
    indexes = [f"{name}.index.json" for name in WEIGHT_FILES]
    return _has_one(folder, (CONFIG, *WEIGHT_FILES, *indexes, *VOCABULARY_FILES))


def _has_one(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _read(file: Path) -> FileContent:
    try:
        if file.suffix == ".safetensors":
            return load_file(file), None
        return _read_pickle(file)
    except raised() as error:  # each library raises its own kinds
        # torch.load also says how to run the file without restrictions. Keep only the reason.
        reason = str(error).rpartition("WeightsUnpickler error:")[2]
        reason = re.split(r"Please use|Check the documentation", reason)[0]
        raise CheckpointError(f"{file} cannot be read as a {file.suffix} file: {' '.join(reason.split())}") from error


def _read_pickle(file: Path) -> FileContent:
    """Return the tensors of a state dict, or of a trainer's checkpoint that holds one.

    ``torch.load(weights_only=True)`` reads the pickle. It builds tensors and plain containers, and calls nothing else.
    """
    check_pickles(file)
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it must hold a state dict, got a {type(loaded).__name__}")
    tensors: dict[str, Tensor] = {}
    for name, value in _state_in(loaded).items():
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if not isinstance(name, str) or not is_plain:
            raise ValueError(f"{name!r:.100} must be the name of a plain tensor")
        if value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{name!r} has shape {tuple(value.shape)}, and the file does not hold so many values")
        tensors[name] = value.detach()
    return tensors, loaded.get("model_args")  # as nanoGPT


def _state_in(loaded: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the state dict that a trainer keeps with its own state, or what was loaded if that is one."""
    for name in ("model", "model_state_dict", "state_dict"):
        state = loaded.get(name)
        if isinstance(state, Mapping):
            return state
    return loaded


def _parts(file: Path) -> list[Path]:
    """Return a file of weights, or those that an index names.

    Raises:
        CheckpointError: if the index is damaged or names a file that is not in its folder.
    """
    if not file.name.endswith(".index.json"):
        return [file]
    weight_map = read_object(file, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} must have a weight_map from tensors to files")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        _require_beside(file, name)
    return [file.parent / name for name in names]


def require_whole_links(folder: Path, names: Iterable[str]) -> None:
    """Check that no file of these names is a link that leads nowhere.

    Raises:
        CheckpointError: if one is.
    """
    broken = [name for name in names if (folder / name).is_symlink() and not (folder / name).exists()]
    if broken:
        raise CheckpointError(
            f"{folder} holds links that lead nowhere: {listing(broken)}; the links of a hub's cache need its folder "
            "blobs; copy the files themselves, as cp -rL does"
        )


def _require_beside(file: Path, name: str) -> None:
    require_whole_links(file.parent, [Path(name).name])
    if Path(name).name != name or not os.path.isfile(file.parent / name):  # of a path that NUL is in too
        raise CheckpointError(f"{file} names {name!r}, which is not a file in the same folder")
