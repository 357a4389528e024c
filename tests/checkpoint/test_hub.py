"""Checkpoints from a hub: the real client against a small server on the loopback, with no other network at all."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import pytest
import torch
from checkpoints import reference, saved, tiny_bpe, tokens

import minigpt
from minigpt import CheckpointError, Tokenizer
from minigpt.checkpoint import locate
from minigpt.cli import app

REPOSITORY = "someone/tiny-gpt2"
TOKEN = "hf_secret"


class Request(NamedTuple):
    """What the server was asked: GET or HEAD, the path, the token that came with it, and from which byte on."""

    method: str
    path: str
    token: str | None
    start: int


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as its client needs: a revision's commit, its files, and each file by name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits: dict[tuple[str, str], Path] = {}  # (repository, revision or commit) -> its folder
        self.moved: dict[str, str] = {}  # repository -> its name of today
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.trouble = ""  # a way not to answer
        self.accidents: dict[str, list[str]] = {}  # file name -> what happens to it on its way, time after time
        self.patience = threading.Event()  # set when the test is over: what stalls may go on
        self.requests: list[Request] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def publish(self, folder: Path, repository: str = REPOSITORY, revision: str = "main") -> str:
        """Make a folder a revision of a repository; return its commit."""
        commit = hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()
        self.commits[repository, revision] = self.commits[repository, commit] = folder
        return commit

    def downloaded(self) -> set[str]:
        """Names of the files that were fetched."""
        return {name for _, name, _ in self.downloads()}

    def downloads(self) -> list[tuple[str, str, int]]:
        """Commit, name and first byte of every request for a file's content."""
        parts = [(request.path.partition("/resolve/"), request.start) for request in self.requests
                 if request.method == "GET"]  # fmt: skip
        return [(*rest.split("/", 1), start) for (_, resolve, rest), start in parts if resolve]  # type: ignore[misc]


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
        token = self.headers.get("authorization")
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.server.requests.append(Request(self.command, self.path, token and token.removeprefix("Bearer "), start))
        if self.server.trouble:
            self.misbehave(self.server.trouble)
        elif self.path.startswith("/api/models/"):
            self.answer_about_a_repository(self.path.removeprefix("/api/models/").partition("?")[0])
        elif "/resolve/" in self.path:
            self.answer_with_a_file()
        else:
            self.reply(404)

    do_HEAD = do_GET

    def answer_about_a_repository(self, path: str) -> None:
        question = "/revision/" if "/revision/" in path else "/tree/"
        repository, _, revision = path.partition(question)
        if repository in self.server.moved:
            new = self.path.replace(repository, self.server.moved[repository], 1)
            self.reply(307, headers={"Location": self.server.address + new})
        elif (folder := self.find(repository, revision)) is None:
            return
        elif question == "/revision/":
            commit = next(name for (repo, name), path in self.server.commits.items()
                          if repo == repository and path == folder and len(name) == 40)  # fmt: skip
            self.reply(200, json.dumps({"id": repository, "sha": commit, "siblings": []}).encode())
        else:
            files = [file for file in folder.rglob("*") if file.is_file()]
            self.reply(200, json.dumps([described(file, str(file.relative_to(folder))) for file in files]).encode())

    def answer_with_a_file(self) -> None:
        repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
        repository = self.server.moved.get(repository, repository)
        commit, _, name = rest.partition("/")
        if (folder := self.find(repository, commit)) is not None:
            data = (folder / name).read_bytes()
            headers = {"ETag": f'"{published_hash(folder / name)}"', "X-Repo-Commit": commit}
            accidents = self.server.accidents.get(name, [])
            if self.command == "GET" and accidents:
                self.have_an_accident(accidents.pop(0), data, headers)
            else:
                self.send_from(self.server.requests[-1].start, data, headers)

    def send_from(self, start: int, data: bytes, headers: dict[str, str]) -> None:
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.reply(206 if start else 200, data[start:], headers)

    def have_an_accident(self, kind: str, data: bytes, headers: dict[str, str]) -> None:
        start = self.server.requests[-1].start
        middle = (start + len(data)) // 2
        if kind == "damaged":
            self.send_from(start, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], headers)
        elif kind == "too long":
            self.send_from(start, data + b"more", headers)
        else:  # half of it, and then nothing, or nothing for long
            self.reply(206 if start else 200, data[start:middle], headers | {"Content-Length": str(len(data) - start)})
            if kind == "stalls":
                self.server.patience.wait(30)
            self.close_connection = True

    def find(self, repository: str, revision: str) -> Path | None:
        """The folder of a revision; where there is none, or it is private, that has been answered."""
        authorized = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if repository in self.server.private and not authorized:
            self.reply(401, b'{"error": "Invalid username or password."}')
        elif (repository, revision) in self.server.commits and repository not in self.server.gated:
            return self.server.commits[repository, revision]
        elif repository in self.server.gated:
            self.reply(403, headers={"X-Error-Code": "GatedRepo"})
        elif any(repository == known for known, _ in self.server.commits):
            self.reply(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            self.reply(404, headers={"X-Error-Code": "RepoNotFound"})
        return None

    def misbehave(self, how: str) -> None:
        if how == "closes":
            self.close_connection = True
        elif how == "is no web server":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            self.close_connection = True
        elif how.isdigit():
            self.reply(int(how))
        else:
            self.reply(200, how.encode())

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
    server.patience.set()
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


def one_sentence(raised: pytest.ExceptionInfo[CheckpointError]) -> str:
    message = str(raised.value)
    assert "\n" not in message
    assert "give a local folder, or one of demo, gpt2" in message
    return message


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
def test_shards_are_fetched(hub: Hub, tmp_path: Path) -> None:
    shards = saved(reference(), tmp_path / "shards", max_shard_size="40KB")
    hub.publish(shards, "someone/sharded")
    assert torch.equal(logits(load("someone/sharded")), logits(reference()))
    assert hub.downloaded() == {file.name for file in shards.iterdir()}


@pytest.mark.usefixtures("client")
def test_what_is_cached_is_not_fetched_again(hub: Hub) -> None:
    load()
    hub.requests.clear()
    load()
    assert not hub.downloaded()


@pytest.mark.usefixtures("client")
def test_what_is_cached_loads_without_the_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    hub.requests.clear()
    expected = logits(reference())
    assert torch.equal(logits(load(local_files_only=True)), expected)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert torch.equal(logits(load()), expected)
    assert not hub.requests


@pytest.mark.usefixtures("client")
def test_what_is_cached_loads_while_the_hub_is_down(hub: Hub) -> None:
    load()
    hub.trouble = "503"
    assert torch.equal(logits(load()), logits(reference()))


@pytest.mark.usefixtures("client")
def test_local_files_only_never_asks(hub: Hub) -> None:
    for fetch in (load, Tokenizer.from_pretrained):
        with pytest.raises(CheckpointError, match=rf"cannot get '{REPOSITORY}' from the Hugging Face hub") as raised:
            fetch(REPOSITORY, local_files_only=True)
        one_sentence(raised)
    assert not hub.requests


@pytest.mark.usefixtures("client")
def test_a_cached_tokenizer_without_its_model_says_so(hub: Hub) -> None:
    Tokenizer.from_pretrained(REPOSITORY)
    hub.requests.clear()
    with pytest.raises(CheckpointError) as raised:
        load(local_files_only=True)
    assert "config.json" in one_sentence(raised)
    assert not hub.requests


@pytest.mark.usefixtures("client")
def test_ids_without_a_token_are_known_as_a_folder_s_are(hub: Hub, tmp_path: Path) -> None:
    padded = saved(reference(vocab_size=320), tmp_path / "padded")
    Tokenizer(tiny_bpe(300)).save(padded)
    hub.publish(padded, "someone/padded")
    assert load("someone/padded").config == load(str(padded)).config
    assert load("someone/padded").config.used_vocab_size == 300


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
    assert {commit for commit, _, _ in hub.downloads()} == {commit}


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
def test_a_name_of_old_leads_to_the_repository_of_today(hub: Hub, checkpoint: Path) -> None:
    hub.publish(checkpoint, "openai-community/gpt2")
    hub.moved["gpt2"] = "openai-community/gpt2"
    assert torch.equal(logits(load("gpt2")), logits(reference()))


@pytest.mark.usefixtures("client")
def test_a_repository_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"cannot get 'someone/else' from the Hugging Face hub \(.*404") as raised:
        load("someone/else")
    one_sentence(raised)
    assert not hub.downloaded()


@pytest.mark.usefixtures("client")
def test_a_revision_that_is_not_there() -> None:
    with pytest.raises(CheckpointError, match=rf"cannot get '{REPOSITORY}' at revision 'v9' .*404") as raised:
        load(revision="v9")
    one_sentence(raised)


@pytest.mark.usefixtures("client")
def test_a_private_repository_needs_the_token_and_gets_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private.add(REPOSITORY)
    with pytest.raises(CheckpointError, match=r"401.*give a token that may read it in HF_TOKEN") as raised:
        load()
    one_sentence(raised)
    assert {request.token for request in hub.requests} == {None}

    hub.requests.clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert torch.equal(logits(load()), logits(reference()))
    assert {request.token for request in hub.requests} == {TOKEN}


@pytest.mark.usefixtures("client")
def test_a_token_that_is_wrong_is_refused_and_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private.add(REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(CheckpointError, match="401") as raised:
        load()
    assert "hf_wrong" not in one_sentence(raised)


@pytest.mark.parametrize(
    "trouble", ["500", "503", "429", "403", "closes", "is no web server", "<html>Please sign in</html>", "{}", "[]"]
)
@pytest.mark.usefixtures("client")
def test_a_hub_in_trouble_is_one_sentence(hub: Hub, trouble: str) -> None:
    hub.trouble = trouble
    with pytest.raises(
        CheckpointError, match=r"cannot get 'someone/tiny-gpt2' from the Hugging Face hub \(\S"
    ) as raised:
        load()
    one_sentence(raised)


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(("accident", "patience"), [("cut", 10), ("stalls", 1)])  # more than a busy machine takes
def test_a_download_that_breaks_off_half_way_is_resumed_there(
    hub: Hub, accident: str, patience: float, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", patience)
    monkeypatch.setattr(
        "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096
    )  # what is kept is a whole number of these
    hub.accidents["model.safetensors"] = [accident, accident]
    assert torch.equal(logits(load()), logits(reference()))
    size = (checkpoint / "model.safetensors").stat().st_size
    starts = [start for _, name, start in hub.downloads() if name == "model.safetensors"]
    assert starts[0] == 0
    assert 0 < starts[1] <= size // 2
    assert starts == sorted(starts)  # a busy machine may keep less of a part than was sent
    assert starts[-1] < size
    assert len(starts) == 3


@pytest.mark.parametrize("accident", ["cut", "stalls"])
def test_a_download_that_never_ends_leaves_no_checkpoint(
    hub: Hub, client: Path, accident: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has arrived whole stays; offline, half a snapshot is none; later the rest alone is fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.accidents["model.safetensors"] = [accident] * 40
    with pytest.raises(CheckpointError) as raised:
        load()
    assert ("set HF_HUB_DOWNLOAD_TIMEOUT to more seconds" in one_sentence(raised)) == (accident == "stalls")
    assert not list(client.rglob("*.incomplete"))
    with pytest.raises(CheckpointError, match="get the rest of it with the network on") as raised:
        load(local_files_only=True)
    one_sentence(raised)
    hub.requests.clear()
    hub.accidents.clear()
    assert torch.equal(logits(load()), logits(reference()))
    assert hub.downloaded() == {"model.safetensors"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_arrives_damaged_is_refused_and_not_kept(hub: Hub, client: Path, name: str) -> None:
    hub.accidents[name] = ["damaged"]
    with pytest.raises(CheckpointError, match=rf"{name} of '{REPOSITORY}' arrived damaged, of another hash") as raised:
        load()
    assert "\n" not in str(raised.value)
    assert not [path for path in client.rglob(name) if path.is_symlink()]
    hub.requests.clear()
    assert torch.equal(logits(load()), logits(reference()))
    assert hub.downloaded() == {name}


@pytest.mark.usefixtures("client")
def test_a_damaged_file_is_not_kept_where_another_never_arrives(hub: Hub) -> None:
    hub.accidents |= {"config.json": ["damaged"], "model.safetensors": ["cut"] * 40}
    with pytest.raises(CheckpointError):
        load()
    hub.accidents.clear()
    assert torch.equal(logits(load()), logits(reference()))


@pytest.mark.usefixtures("client")
def test_a_file_of_another_size_is_refused(hub: Hub) -> None:
    hub.accidents["model.safetensors"] = ["too long"]
    with pytest.raises(CheckpointError, match="should be of size") as raised:
        load()
    one_sentence(raised)
    assert torch.equal(logits(load()), logits(reference()))


@pytest.mark.usefixtures("client")
def test_a_broken_shard_is_fetched_again_alone(hub: Hub, tmp_path: Path) -> None:
    shards = saved(reference(), tmp_path / "shards", max_shard_size="40KB")
    hub.publish(shards, "someone/sharded")
    name = sorted(path.name for path in shards.glob("model-*"))[1]
    hub.accidents[name] = ["damaged"]
    with pytest.raises(CheckpointError, match=f"{name} .*damaged"):
        load("someone/sharded")
    hub.requests.clear()
    hub.accidents[name] = ["cut"]
    assert torch.equal(logits(load("someone/sharded")), logits(reference()))
    assert hub.downloaded() == {name}


@pytest.mark.usefixtures("client")
def test_a_gated_repository_says_what_to_do(hub: Hub) -> None:
    hub.gated.add(REPOSITORY)
    with pytest.raises(
        CheckpointError, match=r"403.*accept its terms on its page, and give your token in HF_TOKEN"
    ) as raised:
        load()
    one_sentence(raised)


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
    place = locate("someone/old")
    assert hub.downloaded() == {"config.json", "generation_config.json", *names}
    assert {path.name for path in place.iterdir()} == hub.downloaded()
    hub.requests.clear()
    assert locate("someone/old", local_files_only=True) == place
    assert not hub.requests
    with pytest.raises(CheckpointError):
        Tokenizer.from_pretrained("someone/old")
    assert not hub.downloaded()


@pytest.mark.usefixtures("client")
def test_they_are_those_of_the_same_commit(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the branch moves while they are fetched."""
    old = hub.publish(pickled(tmp_path / "old", PICKLED[0]), "someone/old", "v1")
    hub.commits["someone/old", "main"] = hub.commits["someone/old", "v1"]
    answer = Answer.answer_with_a_file

    def moves(self: Answer) -> None:
        answer(self)
        hub.publish(hub.commits[REPOSITORY, "main"], "someone/old", "main")

    monkeypatch.setattr(Answer, "answer_with_a_file", moves)
    locate("someone/old")
    assert {commit for commit, _, _ in hub.downloads()} == {old}
    assert "pytorch_model.bin" in hub.downloaded()


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("name", ["a--b", "two words", "-gpt2", "gpt2-", "x" * 200, "naïve"])
def test_a_name_that_is_no_repository_is_never_asked_for(hub: Hub, name: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        load(name)
    one_sentence(raised)
    assert not hub.requests


@pytest.mark.usefixtures("client")
def test_no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(CheckpointError, match=rf"cannot get '{REPOSITORY}' from the Hugging Face hub \(\S") as raised:
        load()
    one_sentence(raised)


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


# --- the client's own variables, in processes of their own

SCRIPT = """
import sys
from minigpt import MiniGPTError
from minigpt.checkpoint import locate
for source in sys.argv[1:]:
    try:
        print(locate(source))
    except MiniGPTError as error:
        print(f"{type(error).__name__}: {error}")
"""


def only(**variables: str) -> dict[str, str]:
    """An environment with these variables of the client's, and no other of them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return kept | {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **variables}


def located(*sources: str, **variables: str) -> tuple[list[str], str]:
    """What a process with these variables says of each source, its place or the error; and its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sources], env=only(**variables), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_the_client_s_variables_mean_what_they_always_do(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN with an empty cache, and then HF_HUB_OFFLINE with what is in it."""
    hub.private.add(REPOSITORY)
    home = str(tmp_path / "home")
    (place,), shown = located(REPOSITORY, HF_HOME=home, HF_ENDPOINT=hub.address, HF_TOKEN=TOKEN)
    assert Path(place).is_relative_to(home)
    assert "Fetching" in shown or "Downloading" in shown, "progress is told on standard error, and nowhere else"
    assert torch.equal(logits(load(place)), logits(reference()))

    hub.requests.clear()
    (again, refused), _ = located(REPOSITORY, "someone/else", HF_HOME=home, HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="1")
    assert again == place
    assert refused.startswith("CheckpointError: cannot get 'someone/else' from the Hugging Face hub")
    assert "give a local folder, or one of demo, gpt2" in refused
    assert not hub.requests


def files_in(place: Path) -> list[tuple[str, str]]:
    """Folder and name of each file, while another process moves them about."""
    return [(folder, name) for folder, _, names in os.walk(place) for name in names]


def test_a_process_killed_while_it_fetches_leaves_what_another_completes(hub: Hub, client: Path) -> None:
    hub.accidents["model.safetensors"] = ["stalls"]
    variables = only(HF_HUB_CACHE=str(client), HF_ENDPOINT=hub.address)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, REPOSITORY], env=variables, stderr=subprocess.DEVNULL
    ) as process:
        while not (
            "model.safetensors" in hub.downloaded()
            and any(name.endswith(".incomplete") for _, name in files_in(client))
            and sum("snapshots" in folder for folder, _ in files_in(client)) == 4  # all others have arrived
        ):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    with pytest.raises(CheckpointError, match="get the rest of it with the network on"):
        load(local_files_only=True)
    hub.requests.clear()
    assert torch.equal(logits(load()), logits(reference()))
    assert {(name, start) for _, name, start in hub.downloads()} == {("model.safetensors", 0)}
    assert load(local_files_only=True).config == load().config


@pytest.mark.usefixtures("client")
def test_a_repository_without_any_wanted_file(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    hub.publish(tmp_path, "someone/empty")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load("someone/empty")
    with pytest.raises(CheckpointError, match=r"neither a tokenizer\.json nor"):
        Tokenizer.from_pretrained("someone/empty")


def test_no_name_is_asked_for_where_a_path_was_meant(hub: Hub, client: Path, tmp_path: Path) -> None:
    for source in (tmp_path / "nothing", Path("some/thing"), "./nothing", "nothing.safetensors"):
        with pytest.raises(CheckpointError, match="there is no directory or"):
            locate(source)
    assert not hub.requests
    assert not client.exists()
