"""Where a checkpoint lies: a folder, a .safetensors file, the bundled demo, or a repository of the Hugging Face hub."""

import json
import os.path
from pathlib import Path

from minigpt.checkpoint import hub
from minigpt.errors import CheckpointError

DEMO = Path(__file__).parents[1] / "demo"
KNOWN = ("demo", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL_FILES = (CONFIG, "generation_config.json", WEIGHTS, INDEX, "model-?????-of-?????.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def locate(
    source: str | Path,
    files: tuple[str, ...] = MODEL_FILES,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """The local folder, or .safetensors file, that ``source`` names; a hub repository is fetched into its cache first.

    It is asked through huggingface_hub, so HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT mean what they always do.

    Args:
        source: "demo", a directory, a .safetensors file, or a repository id.
        files: shell-style patterns of the files to fetch from a repository.
        revision: branch, tag or commit of a repository.
        local_files_only: never ask the network.

    Raises:
        CheckpointError: there is no such thing, or it cannot be fetched.
    """
    path = DEMO if source == "demo" else _path(source)
    if path is not None:
        if revision is not None:
            raise CheckpointError(f"{source} is local, and only a repository of the hub has a revision {revision!r}")
        return path
    if isinstance(source, Path) or _looks_like_a_path(source):
        raise CheckpointError(f"there is no directory or .safetensors file {source}")
    return _fetch(source, files, revision, local_files_only)


def weight_files(place: Path) -> dict[str, Path] | list[Path]:
    """The files that hold a checkpoint's tensors: one, or by tensor name as the index of a sharded one says.

    Raises:
        CheckpointError: there is none, or the index is broken or points outside its folder.
    """
    if place.is_file():
        return [place]
    if (place / WEIGHTS).is_file():
        return [place / WEIGHTS]
    if (place / INDEX).is_file():
        return _shards(place / INDEX)
    raise CheckpointError(f"{place} has no {WEIGHTS}" + _what_is_there(place))


def config_file(place: Path) -> Path:
    """The ``config.json`` in a checkpoint's folder, or beside its bare file."""
    path = (place if place.is_dir() else place.parent) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{place} has no {CONFIG}" + " beside it" * place.is_file())
    return path


def _shards(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(tensor): index.parent / file for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not the index of a sharded checkpoint: {error!r}") from error
    for file in set(shards.values()):
        if file.parent != index.parent or file.suffix != ".safetensors":
            raise CheckpointError(f"{index} names {str(file)!r}, which is not a .safetensors file in its own folder")
        if not os.path.isfile(file):
            raise CheckpointError(f"{index} names {file.name!r}, which is not there")
    return shards


def _what_is_there(folder: Path) -> str:
    if (folder / "pytorch_model.bin").is_file():
        return ", only a pytorch_model.bin, which is not read; save it again with transformers to get one"
    return ""


def _path(source: str | Path) -> Path | None:
    """The directory or .safetensors file of that name; None where there is nothing."""
    path = os.path.expanduser(source)  # os.path answers False where pathlib raises, as for a name that is too long
    if os.path.isfile(path) and not path.endswith(".safetensors"):
        raise CheckpointError(f"{source} is neither a directory nor a .safetensors file")
    return Path(path) if os.path.isdir(path) or os.path.isfile(path) else None


def _looks_like_a_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.endswith(".safetensors") or source.count("/") > 1 or not source


def _fetch(repository: str, files: tuple[str, ...], revision: str | None, local_files_only: bool) -> Path:
    try:
        return hub.fetch(
            repository, files, revision=revision, local_files_only=local_files_only, pickled=WEIGHTS in files
        )
    except CheckpointError:
        raise
    except Exception as error:  # the client's own errors, its transport's, and what a server that is no hub makes of it
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"cannot get {repository[:96]!r}{at} from the Hugging Face hub ({hub.cause(error)}); "
            f"give a local folder, or one of {', '.join(KNOWN)}, of which demo needs no network"
        ) from error
