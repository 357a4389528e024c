"""OpenAI's own Python client against a live server: texts, streams, further fields, and its kinds of errors."""

from collections.abc import Iterator
from typing import Any

import pytest
from live import Live, live

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live("--norm", "fused", "--norm", "std_eps", "--api-key", "right") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)


def test_texts_and_streams_are_the_same(client: Any) -> None:
    extra: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    fields = dict(prompt="The dog", max_tokens=12, n=2, logprobs=1, seed=5, top_p=0.9, temperature=1.2)
    for model in [each.id for each in client.models.list()]:
        whole = client.completions.create(model=model, extra_body=extra, **fields)
        texts, usage, options = [""] * 2, None, {"include_usage": True}
        chunks = client.completions.create(model=model, extra_body=extra, stream=True, stream_options=options, **fields)
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage or usage
        assert texts == [one.text for one in whole.choices]
        assert texts[0] != texts[1]
        assert usage == whole.usage


def test_errors_are_the_clients_own_kinds(server: Live, client: Any) -> None:
    def create(**fields: Any) -> Any:
        return client.completions.create(**{"model": "demo", "prompt": "a", **fields})

    with pytest.raises(openai.NotFoundError, match="does not exist") as raised:
        create(model="gpt-4")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="suffix") as raised:
        create(suffix="the end")
    assert raised.value.param == "suffix"
    with pytest.raises(openai.NotFoundError, match="completions"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.APIStatusError) as raised:
        create(prompt="a" * 2**20)
    assert raised.value.status_code == 413
