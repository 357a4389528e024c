"""OpenAI's own Python client against a live server: texts, streams, further fields, and its kinds of errors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live import Live, live

import minigpt
from minigpt.recipe import Recipe
from minigpt.serve import open_models

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.thorough
MODELS, TOKENIZER = open_models([Recipe(norm=norm) for norm in ("fused", "std_eps")])


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live("--norm", "fused", "--norm", "std_eps", "--api-key", "right") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)


def generated(model: str, **fields: Any) -> str:
    ids = TOKENIZER.encode("The dog")
    return TOKENIZER.decode(minigpt.generate(MODELS[model], torch.tensor([ids]), **fields)[0, len(ids) :].tolist())


@pytest.mark.parametrize("model", MODELS)
def test_texts_and_streams_are_those_of_generate(client: Any, model: str) -> None:
    extra: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    drawn: dict[str, Any] = {"seed": 5, "top_p": 0.9, "temperature": 1.2}
    expected = [
        generated(model, max_new_tokens=12, do_sample=True, **extra, **drawn | {"seed": 5 + i}) for i in range(2)
    ]
    fields = dict(model=model, prompt="The dog", max_tokens=12, n=2, logprobs=1, extra_body=extra, **drawn)
    whole = client.completions.create(**fields)
    assert [one.text for one in whole.choices] == expected
    texts, usage = [""] * 2, None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == expected
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
