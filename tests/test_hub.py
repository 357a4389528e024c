"""Checkpoints from a hub: the real client against a small server on the loopback, with no other network at all."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
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

REPOSITORY = "someone/tiny-gpt2"
TOKEN = "hf_secret"


class Request(NamedTuple):
    """What the server was asked: GET or HEAD, the path, and the token that came with it."""

    method: str
    path: str
    token: str | None


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as its client needs: a revision's commit, its files, and each file by name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits: dict[tuple[str, str], Path] = {}  # (repository, revision or commit) -> its folder
        self.moved: dict[str, str] = {}  # repository -> its name of today
        self.private: set[str] = set()
        self.trouble = ""  # a way not to answer
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
        parts = [request.path.partition("/resolve/") for request in self.requests if request.method == "GET"]
        return {rest.partition("/")[2] for _, resolve, rest in parts if resolve}


class Answer(BaseHTTPRequestHandler):
    """One request. GET and HEAD differ only in the body, which a HEAD's answer leaves out."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        token = self.headers.get("authorization")
        self.server.requests.append(Request(self.command, self.path, token and token.removeprefix("Bearer ")))
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
            listed = [{"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size,
                       "oid": hashlib.sha1(file.read_bytes()).hexdigest()} for file in files]  # fmt: skip
            self.reply(200, json.dumps(listed).encode())

    def answer_with_a_file(self) -> None:
        repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
        repository = self.server.moved.get(repository, repository)
        commit, _, name = rest.partition("/")
        if (folder := self.find(repository, commit)) is not None:
            data = (folder / name).read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            self.reply(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def find(self, repository: str, revision: str) -> Path | None:
        """The folder of a revision; where there is none, or it is private, that has been answered."""
        authorized = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if repository in self.server.private and not authorized:
            self.reply(401, b'{"error": "Invalid username or password."}')
        elif (repository, revision) in self.server.commits:
            return self.server.commits[repository, revision]
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
    load()
    assert hub.downloaded() == {"config.json", "generation_config.json", "model.safetensors"}
    hub.requests.clear()
    Tokenizer.from_pretrained(REPOSITORY)
    assert hub.downloaded() == {"tokenizer.json", "tokenizer_config.json"}
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
def test_a_cached_model_without_its_tokenizer_says_so(hub: Hub) -> None:
    load()
    hub.requests.clear()
    with pytest.raises(CheckpointError) as raised:
        Tokenizer.from_pretrained(REPOSITORY, local_files_only=True)
    assert "tokenizer.json" in one_sentence(raised)
    assert not hub.requests


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
    with pytest.raises(CheckpointError, match="401") as raised:
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
def test_a_download_that_ends_early_leaves_no_checkpoint(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Answer.reply

    def half(answer: Answer, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        promised = {"Content-Length": str(len(body)), **(headers or {})}
        whole(answer, status, body[: len(body) // 2] if len(body) > 10_000 else body, promised)
        answer.close_connection = len(body) > 10_000

    monkeypatch.setattr(Answer, "reply", half)
    with pytest.raises(CheckpointError) as raised:
        load()
    one_sentence(raised)
    monkeypatch.setattr(Answer, "reply", whole)
    assert torch.equal(logits(load()), logits(reference()))


@pytest.mark.usefixtures("client")
def test_a_repository_with_a_pickle_only_says_so(hub: Hub, tmp_path: Path) -> None:
    folder = saved(reference(), tmp_path / "old")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.publish(folder, "someone/old")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load("someone/old")
    assert "pytorch_model.bin" not in hub.downloaded()


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


def located(*sources: str, **variables: str) -> list[str]:
    """What a process with these variables says of each source: its place, or the error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    own = {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sources], env=kept | own, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_client_s_variables_mean_what_they_always_do(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN with an empty cache, and then HF_HUB_OFFLINE with what is in it."""
    hub.private.add(REPOSITORY)
    home = str(tmp_path / "home")
    (place,) = located(REPOSITORY, HF_HOME=home, HF_ENDPOINT=hub.address, HF_TOKEN=TOKEN)
    assert Path(place).is_relative_to(home)
    assert torch.equal(logits(load(place)), logits(reference()))

    hub.requests.clear()
    again, refused = located(REPOSITORY, "someone/else", HF_HOME=home, HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="1")
    assert again == place
    assert refused.startswith("CheckpointError: cannot get 'someone/else' from the Hugging Face hub")
    assert "give a local folder, or one of demo, gpt2" in refused
    assert not hub.requests


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
