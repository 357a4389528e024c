"""OpenAI's own Python client against a live server: every field, streams, and 64 requests at once."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live import Live, live

import minigpt
from minigpt.serve.models import load

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.thorough
NORMS = ["fused", "std_eps"]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live("--norm", "fused", "--norm", "std_eps", "--api-key", "right") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)


MODELS, TOKENIZER = load("demo", NORMS)


def generated(prompt: str | list[int], model: str = "demo", **how: Any) -> str:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    new = minigpt.generate(MODELS[model], torch.tensor([ids]), tokenizer=TOKENIZER, **how)[0, len(ids) :].tolist()
    text = TOKENIZER.decode(new[:-1] if new[-1] in MODELS[model].config.eos_token_ids else new)
    return text[: min((text.index(stop) for stop in how.get("stop_strings", []) if stop in text), default=len(text))]


@pytest.mark.parametrize("model", ["demo", "demo:std_eps"])
def test_greedy_and_sampled_texts_are_those_of_generate(client: Any, model: str) -> None:
    greedy = client.completions.create(model=model, prompt="The dog", max_tokens=30, temperature=0)
    assert greedy.choices[0].text == generated("The dog", model, max_new_tokens=30)
    assert greedy.choices[0].finish_reason == "length"
    assert (greedy.usage.prompt_tokens, greedy.usage.completion_tokens) == (len(TOKENIZER.encode("The dog")), 30)
    drawn = client.completions.create(model=model, prompt="The dog", max_tokens=30, seed=5, top_p=0.9, temperature=1.2)
    how = {"do_sample": True, "seed": 5, "top_p": 0.9, "temperature": 1.2}
    assert drawn.choices[0].text == generated("The dog", model, max_new_tokens=30, **how)


def test_n_best_of_stop_penalties_and_bias(client: Any) -> None:
    answer = client.completions.create(model="demo", prompt="The", max_tokens=9, n=3, seed=7)
    how = {"do_sample": True, "max_new_tokens": 9}
    assert [one.text for one in answer.choices] == [generated("The", seed=7 + i, **how) for i in range(3)]
    best = client.completions.create(model="demo", prompt="The", max_tokens=9, best_of=3, seed=7)
    assert best.choices[0].text in [one.text for one in answer.choices]
    stopped = client.completions.create(model="demo", prompt="The", max_tokens=50, temperature=0, stop=[".", "!"])
    assert stopped.choices[0].text == generated("The", max_new_tokens=50, stop_strings=[".", "!"])
    assert stopped.choices[0].finish_reason == "stop"
    how = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"286": -100}}
    answer = client.completions.create(model="demo", prompt="The", max_tokens=20, temperature=0, **how)
    assert answer.choices[0].text == generated("The", max_new_tokens=20, **how | {"logit_bias": {286: -100.0}})
    extra = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    answer = client.completions.create(model="demo", prompt="The", max_tokens=20, temperature=0, extra_body=extra)
    assert answer.choices[0].text == generated("The", max_new_tokens=20, **extra)


def test_streams_add_up(client: Any) -> None:
    how = dict(model="demo", prompt=["The dog", "A cat"], max_tokens=12, n=2, seed=3, logprobs=1)
    whole = client.completions.create(**how)
    texts, offsets, usage = [""] * 4, [[] for _ in range(4)], None
    for chunk in client.completions.create(**how, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset
        usage = chunk.usage or usage
    assert texts == [one.text for one in whole.choices]
    assert offsets == [one.logprobs.text_offset for one in whole.choices]
    assert usage == whole.usage


def test_errors_are_the_clients_own_kinds(server: Live, client: Any) -> None:
    def create(**how: Any) -> Any:
        return client.completions.create(**{"model": "demo", "prompt": "a", **how})

    with pytest.raises(openai.NotFoundError, match="does not exist") as raised:
        create(model="gpt-4")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="suffix") as raised:
        create(suffix="the end")
    assert raised.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="context is 256 tokens"):
        create(max_tokens=1000)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(temperature=-1)
    with pytest.raises(openai.BadRequestError, match="not supported"):
        create(extra_body={"guided_json": {}})
    with pytest.raises(openai.NotFoundError, match="chat"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.APIStatusError) as raised:
        create(prompt="a" * 2**20)
    assert raised.value.status_code == 413


def test_64_requests_at_once_are_each_what_generate_gives_alone(server: Live) -> None:
    ways: list[dict[str, Any]] = [
        dict(model=list(MODELS)[i % 2], prompt="The dog saw a big red ball"[: 3 + i % 20], max_tokens=5 + i % 40,
             **({"temperature": 0} if i % 3 == 0 else {"temperature": 0.5 + i / 64, "seed": i}))
        for i in range(64)
    ]  # fmt: skip

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as client:

            async def one(number: int, how: dict[str, Any]) -> str:
                if number % 2:
                    return (await client.completions.create(**how)).choices[0].text
                chunks = await client.completions.create(**how, stream=True)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            return await asyncio.gather(*(one(number, how) for number, how in enumerate(ways)))

    for how, text in zip(ways, asyncio.run(ask()), strict=True):
        drawn = (
            {} if how["temperature"] == 0 else dict(do_sample=True, temperature=how["temperature"], seed=how["seed"])
        )
        assert text == generated(how["prompt"], how["model"], max_new_tokens=how["max_tokens"], **drawn), how
