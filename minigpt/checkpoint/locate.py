"""Where a checkpoint lies: a folder, a file of weights, the bundled demo, or a repository of the Hugging Face hub."""

import os.path
from pathlib import Path

from minigpt.checkpoint import hub
from minigpt.checkpoint.files import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SAFETENSORS,
    SHARDS,
    TOKENIZER_FILES,
    WEIGHT_SUFFIXES,
    folder_of,
)
from minigpt.errors import CheckpointError

DEMO = Path(__file__).parents[1] / "demo"
KNOWN = ("demo", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")

# The tokenizer's too: they tell how many ids of a vocabulary are in use, and are to be of one commit.
MODEL_FILES = (CONFIG, GENERATION_CONFIG, SAFETENSORS, INDEX, SHARDS, *TOKENIZER_FILES)


def locate(
    source: str | Path,
    files: tuple[str, ...] = MODEL_FILES,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """The local folder, or file of weights, that ``source`` names; a hub repository is fetched into its cache first.

    It is asked through huggingface_hub, so HF_HOME, HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT mean what they always do.

    Args:
        source: "demo", a directory, a file of weights (``WEIGHT_SUFFIXES``), or a repository id.
        files: shell-style patterns of the files to fetch from a repository.
        revision: branch, tag or commit of a repository.
        local_files_only: never ask the network.

    Raises:
        CheckpointError: there is no such thing, or it cannot be fetched.
    """
    path = _path(source)
    if path is not None:
        if revision is not None:
            raise CheckpointError(f"{source} is local, and only a repository of the hub has a revision {revision!r}")
        return path
    if isinstance(source, Path) or _looks_like_a_path(source):
        raise CheckpointError(f"there is no directory or file of weights {source}")
    return _fetch(source, files, revision, local_files_only)


def files_at(source: str | Path) -> list[Path]:
    """The files of the checkpoint that lies there; none where nothing does, as of a repository's name.

    Raises:
        CheckpointError: it is a file of another kind.
    """
    place = _path(source)
    files = folder_of(place).iterdir() if place else ()
    return [file for file in files if file.suffix in WEIGHT_SUFFIXES or any(map(file.match, MODEL_FILES))]


def _path(source: str | Path) -> Path | None:
    """The directory or file of weights of that name; None where there is nothing."""
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(f"a model is named by a text or a Path, not a {type(source).__name__}")
    if source == "demo":
        return DEMO
    path = os.path.expanduser(source)  # os.path answers False where pathlib raises, as for a name that is too long
    if os.path.isfile(path) and not path.endswith(WEIGHT_SUFFIXES):
        raise CheckpointError(f"{source} is neither a directory nor a {', '.join(WEIGHT_SUFFIXES)} file")
    return Path(path) if os.path.isdir(path) or os.path.isfile(path) else None


def _looks_like_a_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.endswith(WEIGHT_SUFFIXES) or source.count("/") > 1 or not source


def _fetch(repository: str, files: tuple[str, ...], revision: str | None, local_files_only: bool) -> Path:
    try:
        return hub.fetch(
            repository, files, revision=revision, local_files_only=local_files_only, pickled=SAFETENSORS in files
        )
    except CheckpointError:
        raise
    except Exception as error:  # the client's own errors, its transport's, and what a server that is no hub makes of it
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"cannot get {repository[:96]!r}{at} from the Hugging Face hub ({hub.cause(error)}); "
            f"give a local folder, or one of {', '.join(KNOWN)}, of which demo needs no network"
        ) from error
