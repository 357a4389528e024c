"""Checkpoints from a hub: the real client against a small server on the loopback, with no other network at all."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import reference, saved, tiny_bpe, tokens

import minigpt
from minigpt import CheckpointError, Tokenizer
from minigpt.checkpoint import local_place
from minigpt.cli import app

pytestmark = pytest.mark.thorough

REPOSITORY = "someone/tiny-gpt2"


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as its client needs: a revision's commit, its files, and each file by name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits: dict[tuple[str, str], Path] = {}  # (repository, revision or commit) -> its folder
        self.requests: list[tuple[str, str]] = []  # method and path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def publish(self, folder: Path, repository: str = REPOSITORY, revision: str = "main") -> str:
        """Make a folder a revision of a repository; return its commit."""
        commit = hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()
        self.commits[repository, revision] = self.commits[repository, commit] = folder
        return commit

    def downloads(self) -> list[list[str]]:
        """Commit and name of every request for a file's content."""
        parts = [path.partition("/resolve/") for method, path in self.requests if method == "GET"]
        return [rest.split("/", 1) for _, resolve, rest in parts if resolve]

    def downloaded(self) -> set[str]:
        """Names of the files that were fetched."""
        return {name for _, name in self.downloads()}


def published_hash(file: Path) -> str:
    """What the hub calls a content by: SHA-256 where it is large storage's, else as git does."""
    data = file.read_bytes()
    if file.suffix in (".safetensors", ".bin"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def described(file: Path, name: str) -> dict[str, Any]:
    """A file as the hub lists it."""
    fields: dict[str, Any] = {"type": "file", "path": name, "size": file.stat().st_size, "oid": published_hash(file)}
    if file.suffix in (".safetensors", ".bin"):
        fields |= {"oid": "0" * 40, "lfs": {"oid": published_hash(file), "size": fields["size"], "pointerSize": 130}}
    return fields


class Answer(BaseHTTPRequestHandler):
    """One request. GET and HEAD differ only in the body, which a HEAD's answer leaves out."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path))
        if self.path.startswith("/api/models/"):
            self.answer_about_a_repository(self.path.removeprefix("/api/models/").partition("?")[0])
        elif "/resolve/" in self.path:
            self.answer_with_a_file()
        else:
            self.reply(404)

    do_HEAD = do_GET

    def answer_about_a_repository(self, path: str) -> None:
        question = "/revision/" if "/revision/" in path else "/tree/"
        repository, _, revision = path.partition(question)
        if (folder := self.find(repository, revision)) is None:
            return
        if question == "/revision/":
            commit = next(name for (repo, name), path in self.server.commits.items()
                          if repo == repository and path == folder and len(name) == 40)  # fmt: skip
            self.reply(200, json.dumps({"id": repository, "sha": commit, "siblings": []}).encode())
        else:
            files = [file for file in folder.rglob("*") if file.is_file()]
            self.reply(200, json.dumps([described(file, str(file.relative_to(folder))) for file in files]).encode())

    def answer_with_a_file(self) -> None:
        repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
        commit, _, name = rest.partition("/")
        if (folder := self.find(repository, commit)) is not None:
            data = (folder / name).read_bytes()
            headers = {"ETag": f'"{published_hash(folder / name)}"', "X-Repo-Commit": commit}
            self.reply(200, data, headers)

    def find(self, repository: str, revision: str) -> Path | None:
        """The folder of a revision; where there is none, that has been answered."""
        if (repository, revision) in self.server.commits:
            return self.server.commits[repository, revision]
        known = any(repository == name for name, _ in self.server.commits)
        self.reply(404, headers={"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
        return None

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as published ones are: the model, its tokenizer, and much that a GPT-2 needs none of."""
    folder = saved(reference(), tmp_path_factory.mktemp("published"))
    Tokenizer(tiny_bpe()).save(folder)
    (folder / "onnx").mkdir()
    for name in ("pytorch_model.bin", "tf_model.h5", "README.md", "onnx/model.onnx", "onnx/config.json", "64.tflite",
                 "onnx/model.safetensors", "training.safetensors", "consolidated.00.pth"):  # fmt: skip
        (folder / name).write_bytes(b"not wanted")
    return folder


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    server = Hub()
    server.publish(checkpoint)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's client in this process, turned to our server and an empty cache, as its variables would at import."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", hub.address)
    monkeypatch.setattr(
        f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its retries
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    huggingface_hub.close_session()
    yield tmp_path / "cache"
    huggingface_hub.close_session()


def load(repository: str = REPOSITORY, **how: Any) -> minigpt.GPT2:
    return minigpt.from_pretrained(repository, arithmetic="reference", device="cpu", **how)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out = model(tokens(2, 9))
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.usefixtures("client")
def test_a_repository_is_fetched_and_loads_as_it_is() -> None:
    assert torch.equal(logits(load()), logits(reference()))


def test_only_the_wanted_files_are_fetched(hub: Hub, client: Path) -> None:
    Tokenizer.from_pretrained(REPOSITORY)
    assert hub.downloaded() == {"tokenizer.json", "tokenizer_config.json"}
    hub.requests.clear()
    load()
    assert hub.downloaded() == {"config.json", "generation_config.json", "model.safetensors"}
    assert not [path for path in client.rglob("*") if path.suffix in {".bin", ".onnx", ".h5"}]


@pytest.mark.usefixtures("client")
def test_what_is_cached_is_not_fetched_again_and_loads_without_the_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    hub.requests.clear()
    load()
    assert not hub.downloaded()
    hub.requests.clear()
    expected = logits(reference())
    assert torch.equal(logits(load(local_files_only=True)), expected)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert torch.equal(logits(load()), expected)
    with pytest.raises(CheckpointError, match="cannot get 'someone/else' from the Hugging Face hub"):
        Tokenizer.from_pretrained("someone/else", local_files_only=True)
    assert not hub.requests


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("command", [("generate", "the dog", "--model"), ("convert",), ("parity", "--model")])
def test_a_command_takes_everything_from_one_commit(
    hub: Hub, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Also where the branch moves to one with another tokenizer while its files are fetched."""
    first, other = shutil.copytree(checkpoint, tmp_path / "first"), tmp_path / "other"
    for place, size in ((first, 300), (other, 290)):
        saved(reference(vocab_size=320), place)
        Tokenizer(tiny_bpe(size)).save(place)
    commit = hub.publish(first, "someone/moving", "v1")
    hub.commits["someone/moving", "main"] = first
    answer = Answer.answer_with_a_file

    def moves(self: Answer) -> None:
        answer(self)
        hub.publish(other, "someone/moving", "main")

    monkeypatch.setattr(Answer, "answer_with_a_file", moves)
    more = {"generate": ["--max-new-tokens", "2"], "convert": [str(tmp_path / "out")], "parity": ["--prompt", "the"]}
    assert not app([*command, "someone/moving", *more[command[0]]], standalone_mode=False)
    assert {commit for commit, _ in hub.downloads()} == {commit}


@pytest.mark.usefixtures("client")
def test_a_revision_is_its_own_checkpoint(hub: Hub, tmp_path: Path) -> None:
    other = reference(seed=1)
    commit = hub.publish(saved(other, tmp_path / "other"), revision="v2")
    assert torch.equal(logits(load(revision="v2")), logits(other))
    assert torch.equal(logits(load(revision=commit)), logits(other))
    assert torch.equal(logits(load()), logits(reference()))
    minigpt.load_norms(model := load(), REPOSITORY, revision="v2")
    assert torch.equal(model.ln_f.weight, other.transformer.ln_f.weight)


@pytest.mark.usefixtures("client")
def test_a_repository_or_a_revision_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"cannot get 'someone/else' from the Hugging Face hub; .*404"):
        load("someone/else")
    with pytest.raises(CheckpointError, match=rf"cannot get '{REPOSITORY}' at revision 'v9' .*404"):
        load(revision="v9")
    assert not hub.downloaded()


# --- repositories of before safetensors

PICKLED = ["pytorch_model.bin"], ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin",
                                  "pytorch_model-00002-of-00002.bin"]  # fmt: skip


def pickled(folder: Path, names: list[str]) -> Path:
    """A repository of old: what lies in its files is not looked at here."""
    saved(reference(), folder)
    (folder / "model.safetensors").unlink()
    for name in [*names, "pytorch_model.fp16.bin", "training_args.bin", "rust_model.ot"]:
        (folder / name).write_bytes(name.encode())
    return folder


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("names", PICKLED, ids=["single", "sharded"])
def test_pytorch_s_own_files_are_fetched_where_there_is_nothing_else(
    hub: Hub, tmp_path: Path, names: list[str]
) -> None:
    hub.publish(pickled(tmp_path / "old", names), "someone/old")
    place = local_place("someone/old")
    assert hub.downloaded() == {"config.json", "generation_config.json", *names}
    assert {path.name for path in place.iterdir()} == hub.downloaded()
    hub.requests.clear()
    assert local_place("someone/old", local_files_only=True) == place
    assert not hub.requests
    with pytest.raises(CheckpointError):
        Tokenizer.from_pretrained("someone/old")
    assert not hub.downloaded()
