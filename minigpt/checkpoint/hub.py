"""Files of a Hugging Face repository -> its cache: those that are wanted, of one commit, each as it was published.

The client is huggingface_hub, so HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT and
HF_HUB_DISABLE_PROGRESS_BARS mean what they always do. A download that breaks off is resumed, and given up after some
vain attempts; the files that have arrived whole by then are not fetched again. Of the file that has not, the client
keeps no part for another process: it writes under a name of its own each time, so that two cannot spoil each other's.
"""

import hashlib
from pathlib import Path

from minigpt.errors import CheckpointError

PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-?????-of-?????.bin")

# What to do about an error of the client's or its transport's, by its kind's name or its status; the first that fits.
_TOKEN = "if it is private, give a token that may read it in HF_TOKEN or by `hf auth login`"
_WAYS_OUT = {
    "GatedRepoError": "accept its terms on its page, and give your token in HF_TOKEN or by `hf auth login`",
    "RepositoryNotFoundError": _TOKEN,
    "401": _TOKEN,
    "OfflineModeIsEnabled": "unset HF_HUB_OFFLINE to go online",
    "IncompleteSnapshotError": "get the rest of it with the network on",
    "TimeoutException": "for a slow line, set HF_HUB_DOWNLOAD_TIMEOUT to more seconds",
}


def fetch(
    repository: str, files: tuple[str, ...], *, revision: str | None, local_files_only: bool, pickled: bool
) -> Path:
    """The local folder of a repository's commit, with the files that match.

    Args:
        files: shell-style patterns.
        pickled: fetch PyTorch's own files too where the repository has no safetensors.

    Raises:
        CheckpointError: a file arrived otherwise than it was published. The client raises errors of many kinds besides,
            which ``cause`` puts into words.
    """
    folder = _snapshot(repository, files, revision, local_files_only)
    if pickled and not any(folder.glob("model*.safetensors*")):
        folder = _snapshot(repository, PICKLED_FILES, folder.name, local_files_only)  # of that commit, and no newer one
    return folder


def cause(error: Exception) -> str:
    """What went wrong, in the client's own words, and what can be done about it."""
    chain = _chain(error)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    kinds |= {str(getattr(getattr(link, "response", None), "status_code", None)) for link in chain}
    said = next((line for link in reversed(chain) if (line := _first_line(link))), type(error).__name__)
    way_out = next((way_out for kind, way_out in _WAYS_OUT.items() if kind in kinds), None)
    return f"{said}; {way_out}" if way_out and way_out not in said else said


def _snapshot(repository: str, files: tuple[str, ...], revision: str | None, local_files_only: bool) -> Path:
    from huggingface_hub import constants, snapshot_download  # here: a local model needs no network client
    from huggingface_hub.file_download import repo_folder_name

    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))
    before = {blob.name for blob in cached.glob("blobs/*")}
    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=list(files), local_files_only=local_files_only
        )
    finally:  # also where only some have arrived: those will be taken for whole
        damaged = _without_damaged(cached, before)
    if damaged:
        raise CheckpointError(
            f"{', '.join(damaged)} of {repository!r} arrived damaged, of another hash than published, and did not stay "
            "in the cache; try again"
        )
    return Path(folder)


def _without_damaged(cached: Path, before: set[str]) -> list[str]:
    """Remove what has arrived otherwise than published from a repository's cache; return the names of those files.

    The client itself checks a file's size alone. Its cache calls a content by the hash that the hub tells.
    """
    arrived = [blob for blob in cached.glob("blobs/*") if blob.name not in before]
    damaged = {blob.name for blob in arrived if _hash_like(blob) not in (None, blob.name)}
    links = [link for link in cached.glob("snapshots/*/*") if link.is_symlink() and link.readlink().name in damaged]
    for path in (*links, *(cached / "blobs" / name for name in damaged)):
        path.unlink(missing_ok=True)
    return sorted(link.name for link in links)


def _hash_like(blob: Path) -> str | None:
    """The hash of a file, of the kind that its name is: SHA-256 (a large file), or git's (a small one); else None."""
    size = blob.stat().st_size
    kinds = {64: hashlib.sha256, 40: lambda: hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)}
    if len(blob.name) not in kinds or not set(blob.name) <= set("0123456789abcdef"):
        return None  # a mirror's own way to tell files apart
    with blob.open("rb") as file:
        return hashlib.file_digest(file, kinds[len(blob.name)]).hexdigest()


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it came from, the origin last."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__
    return links


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")[:200]
