"""Find a checkpoint: a folder, a file of weights, the bundled demo, or a repository of the Hugging Face hub."""

import functools
import os.path
import re
from pathlib import Path

from minigpt.checkpoint.contents import MODEL, PICKLED, SAFETENSORS, TOKENIZER_FILES, WEIGHT_SUFFIXES
from minigpt.errors import CheckpointError
from minigpt.files import as_path

DEMO = Path(__file__).parents[1] / "demo"
KNOWN = ("demo", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
COMMITS: dict[tuple[str, str | None], str] = {}  # of repositories and revisions, as this process first saw them
REPOSITORY = re.compile(r"[^./~][^/]*(/[^/]+)?")

# The tokenizer's files count the ids in use, and must come from the same commit.
MODEL_FILES = (*MODEL, *TOKENIZER_FILES)


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
            f"{', '.join(KNOWN)}; only demo needs no network, and a private or gated repository needs HF_TOKEN. "
            f"The hub's client says: {' '.join(str(error).split())}"
        ) from error
    return folder
