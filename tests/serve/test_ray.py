"""Two replicas on a local Ray, by the documented command; the same client works."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.serve")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.thorough
URL = "http://127.0.0.1:8000"  # of Ray's proxy


@pytest.fixture
def replicas() -> Iterator[None]:
    command = shutil.which("serve", path=str(Path(sys.executable).parent))
    assert command is not None
    calm = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "MINIGPT_API_KEY": "right"}
    process = subprocess.Popen(
        [command, "run", "minigpt.serve.ray:build", "model=demo", "replicas=2"], env={**os.environ, **calm}
    )
    try:
        deadline = time.monotonic() + 150
        while not _is_ready() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(1)
        assert _is_ready(), "Ray Serve has not started"
        yield
    finally:
        process.terminate()
        process.wait(60)


def _is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_two_replicas_answer_the_same_client(replicas: None) -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="right", max_retries=0)
    fields = dict(model="demo", prompt="The dog", max_tokens=12, temperature=0)
    texts = {client.completions.create(**fields).choices[0].text for _ in range(8)}
    chunks = client.completions.create(**fields, stream=True)
    assert texts == {"".join(chunk.choices[0].text for chunk in chunks)}
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong").models.list()
