"""The application in this process: what it answers, whom it refuses, and that nobody notices anybody else."""

import asyncio
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checkpoints import tiny_bpe
from helpers import small_model
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")

from application import MODEL, MODELS, TOKENIZER, Client, later, serving  # noqa: E402

import minigpt  # noqa: E402
from minigpt import Tokenizer, generate  # noqa: E402
from minigpt.generation.settings import SETTINGS  # noqa: E402
from minigpt.serve import jobs, scheduler  # noqa: E402
from minigpt.serve.routes import LONG_PROMPT  # noqa: E402

TEXTS = ["the dog", "naïve café", "I saw the other dog there", "狗", "\n\n", "the the the the", "a", "1 2 3"]


async def until(ready: Callable[[], object]) -> None:
    """Wait for a state of the server, and fail where it does not come."""
    async with asyncio.timeout(60):
        while not ready():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as client:
        yield client


def alone(prompt: str, model: minigpt.GPT2 = MODEL, **options: Any) -> str:
    """The text that ``generate`` adds to one prompt by itself."""
    ids = TOKENIZER.encode(prompt)
    new = generate(model, torch.tensor([ids]), tokenizer=TOKENIZER, **options)[0, len(ids) :].tolist()
    if new[-1] in (7, 20, 33, 150):
        del new[-1]
    text = TOKENIZER.decode(new)
    stops = [text.index(stop) for stop in options.get("stop", []) if stop in text]
    return text[: min(stops, default=len(text))]


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def streamed(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


SAME = (
    ({"temperature": 0}, {}),
    ({"temperature": 0, "seed": 3, "top_p": 0.5, "stop": []}, {}),
    ({"seed": 3}, {"do_sample": True, "seed": 3}),
    ({"temperature": 0, "stop": ["e", "\n"]}, {"stop": ["e", "\n"]}),
    ({"temperature": 0, "logit_bias": {"5": 4.5, "9": -100}}, {"logit_bias": {5: 4.5, 9: -100}}),
    ({"temperature": 0, "presence_penalty": 2, "frequency_penalty": 1},
     {"presence_penalty": 2, "frequency_penalty": 1}),
    ({"seed": 8, "top_k": 9, "min_p": 0.01}, {"do_sample": True, "seed": 8, "top_k": 9, "min_p": 0.01}),
    ({"temperature": 0, "overflow": "slide", "max_tokens": 70}, {"overflow": "slide", "max_new_tokens": 70}),
)  # fmt: skip


def test_an_application_serves_event_loops_one_after_the_other(client: Client) -> None:
    """Tasks of each loop have to wait for one another, at both locks."""
    body = later({"model": "demo", "prompt": " ".join(TEXTS * 40), "max_tokens": 4, "overflow": "slide"})
    for _ in range(3):
        client.ask_all(*[body] * 3)  # begins to write
        answers = client.ask_all(*[body] * 12)
        assert [answer.status_code for answer in answers] == [200] * 12


@pytest.mark.parametrize(("stream", "times"), [(True, 1), pytest.param(False, 3, marks=pytest.mark.thorough)])
def test_requests_of_all_settings_at_once_get_what_generate_gives(client: Client, stream: bool, times: int) -> None:
    """Also where prompts are read in pieces, since more requests come than there are places."""
    calls = [(" ".join([text] * times), *ways) for text in TEXTS[:3] for ways in SAME]
    longest = max(len(TOKENIZER.encode(text)) for text, *_ in calls)
    assert (longest > scheduler.PROMPT_TOKENS_BESIDE) == (times > 1)
    assert len(calls) > client.scheduler.places
    bodies = [
        {"model": "demo", "prompt": text, "max_tokens": 9, "stream": stream, **fields} for text, fields, _ in calls
    ]
    answers = client.ask_all(*map(later, bodies))
    for (text, _, options), answer in zip(calls, answers, strict=True):
        chunks = streamed(answer) if stream else [answer.json()]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone(
            text, **{"max_new_tokens": 9, **options}
        )
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] in ("stop", "length")


def test_each_norm_writes_its_own_text_on_the_same_parameters(client: Client) -> None:
    first, second = (set(map(id, model.parameters())) for model in MODELS.values())
    assert first == second
    assert type(MODELS["demo"].ln_f) is not type(MODELS["demo:std_eps"].ln_f)
    listed = client.get("/v1/models").json()
    assert [one["id"] for one in listed["data"]] == ["demo", "demo:std_eps"]
    assert client.get("/v1/models/demo:std_eps").json()["max_model_len"] == 64
    for name, model in MODELS.items():
        body = {"model": name, "prompt": "the dog", "max_tokens": 20, "temperature": 0}
        answer = client.post("/v1/completions", body).json()
        assert answer["model"] == name
        assert answer["choices"][0]["text"] == alone("the dog", model, max_new_tokens=20)


def test_several_prompts_and_choices_are_in_order_and_counted(client: Client) -> None:
    prompts = [TOKENIZER.encode(text) for text in TEXTS[:3]]
    answer = client.complete(prompts, n=2, seed=10, max_tokens=5).json()
    options = {"max_new_tokens": 5, "do_sample": True}
    expected = [alone(text, seed=10 + 2 * i + j, **options) for i, text in enumerate(TEXTS[:3]) for j in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


LOAD_GENERATORS: dict[str, dict[str, Any]] = {
    "guidellm": {"stop": None, "ignore_eos": True},
    "vllm bench serve": {"repetition_penalty": 1.0, "ignore_eos": True, "logprobs": None, "top_k": -1, "best_of": 1},
    "vllm": {"min_tokens": 9, "n": 1, "top_k": 0, "eos_token_id": [], "stop_token_ids": [], "use_beam_search": False,
             "guided_json": None, "spaces_between_special_tokens": True, "priority": 0, "logit_bias": {},
             "skip_special_tokens": True, "add_special_tokens": True, "response_format": {"type": "text"}},
}  # fmt: skip


@pytest.mark.parametrize("name", LOAD_GENERATORS)
def test_load_generators_get_the_tokens_that_they_ask_for(client: Client, name: str) -> None:
    body = {"model": "demo", "prompt": ["the dog", "狗"], "max_tokens": 9, "stream": True, **LOAD_GENERATORS[name]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(client.post("/v1/completions", body | {"stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 18
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]].count("length") == 2


def test_the_best_n_of_n_texts_are_all_of_them(client: Client) -> None:
    for fields in ({"n": 2}, {}, {"n": None}):
        expected = client.complete(seed=1, **fields).json()["choices"]
        best_of = fields.get("n") or 1
        assert client.complete(seed=1, best_of=best_of, **fields).json()["choices"] == expected


def test_every_seed_of_64_bits_draws(client: Client) -> None:
    texts = {}
    for seed in (-(2**63) + 5, -1, 0, 2**63 - 3):
        texts[seed], again = (client.complete(seed=seed, n=2).json()["choices"] for _ in range(2))
        assert texts[seed] == again
    assert len({str(choices) for choices in texts.values()}) == 4


def test_special_tokens_are_left_out_where_that_is_asked_for(client: Client) -> None:
    end = TOKENIZER.eos_token_id
    body = {"max_tokens": 6, "eos_token_id": [], "logit_bias": {str(end): 100}, "echo": True, "logprobs": 1}
    for prompt, shown in (([end, 65], TOKENIZER.decode([65])), ("a<|endoftext|>b", "a<|endoftext|>b")):
        plain = client.complete(prompt, **body).json()["choices"][0]
        skipped = client.complete(prompt, skip_special_tokens=True, **body).json()["choices"][0]
        assert plain["text"].endswith("<|endoftext|>" * 6)
        assert skipped["text"] == shown
        assert skipped["logprobs"]["tokens"] == plain["logprobs"]["tokens"]
        assert skipped["logprobs"]["text_offset"][-6:] == [len(shown)] * 6


def test_a_text_ends_where_generation_config_says() -> None:
    model = copy.deepcopy(MODEL)
    prompt = torch.tensor([TOKENIZER.encode("the dog")])
    end = generate(MODEL, prompt, max_new_tokens=9, eos_token_id=None)[0, -3].item()
    model.generation_fields = {"eos_token_id": [299, end]}
    with serving({"demo": model}) as client:
        choice = client.complete(temperature=0, max_tokens=9, logprobs=0).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert end not in model.config.eos_token_ids
        assert generate(model, prompt, max_new_tokens=9)[0, -1] == end


def test_min_tokens_holds_an_end_back(client: Client) -> None:
    for min_tokens in (0, 5):
        answer = client.complete(max_tokens=9, min_tokens=min_tokens, logit_bias={"7": 100}).json()
        assert answer["usage"]["completion_tokens"] == min_tokens + 1


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs_gives_those_of_the_prompt(client: Client, max_tokens: int) -> None:
    text = "naïve café 狗 the dog"
    ids = TOKENIZER.encode(text)
    answer = client.complete(text, max_tokens=max_tokens, echo=True, logprobs=3, temperature=0).json()
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    whole = generate(MODEL, torch.tensor([ids]), max_new_tokens=max_tokens)[0].tolist() if max_tokens else ids
    truth = MODEL(torch.tensor([whole]))[0].float().log_softmax(-1)
    expected = [None] + [truth[i, id].item() for i, id in enumerate(whole[1:])]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected[1:], abs=1e-5)
    for i, top in enumerate(logprobs["top_logprobs"][1:]):
        assert max(top.values()) == pytest.approx(truth[i, :300].max().item(), abs=1e-5)
        assert 3 <= len(top) <= 4
    assert choice["text"] == TOKENIZER.decode([id for id in whole if id not in (7, 20, 33, 150)])
    for i, offset in enumerate(logprobs["text_offset"]):
        if not logprobs["tokens"][i].startswith("bytes:") and whole[i] not in (7, 20, 33, 150):
            assert choice["text"][offset:].startswith(logprobs["tokens"][i])
    assert answer["usage"]["completion_tokens"] == len(whole) - len(ids)


def test_offsets_count_into_the_text_whatever_the_tokenizer_adds() -> None:
    """A first token, a first space, letters that are composed, and spaces that are no part of a token's place."""
    backend = tiny_bpe(300)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    around = processors.TemplateProcessing("<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    tokenizer = Tokenizer(backend)
    text = "the cafe\u0301 the  dog"
    app = minigpt.serve.app({"demo": MODEL}, tokenizer=tokenizer)
    fields = {"max_tokens": 2, "eos_token_id": [], "logit_bias": {"68": 100}, "echo": True, "logprobs": 0}
    transport = httpx.ASGITransport(app=app)

    async def ask(prompt: Any) -> Any:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
            answer = await http.post("/v1/completions", json={"model": "demo", "prompt": prompt, **fields})
            return answer.json()["choices"][0]

    choice = asyncio.run(ask(text))
    app.state.scheduler.stop()
    new = TOKENIZER.decode([68])
    assert choice["text"] == text + 2 * new
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:2] == [0, 0]
    assert offsets[-3:] == [len(text), len(text), len(text) + 1]
    for token, begin in zip(choice["logprobs"]["tokens"][2:-3], offsets[2:-3], strict=True):
        if token.isascii() and not token.startswith("bytes:"):
            assert text[begin:].startswith(token)


def test_a_stream_says_the_same_as_a_whole_answer(client: Client) -> None:
    options = {"max_tokens": 7, "seed": 2, "n": 2, "logprobs": 2, "echo": True}
    whole = client.complete(["the dog", "狗"], **options).json()
    body = {"model": "demo", "prompt": ["the dog", "狗"], "stream": True, **options}
    *chunks, last = streamed(client.post("/v1/completions", body | {"stream_options": {"include_usage": True}}))
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in parts) == choice["text"]
        assert [one["finish_reason"] for one in parts][-1] == choice["finish_reason"]
        for part, values in choice["logprobs"].items():
            joined = [value for one in parts for value in one["logprobs"][part]]
            if part in ("token_logprobs", "top_logprobs"):
                assert str(len(joined)) == str(len(values))
            else:
                assert joined == values


REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "another model": ({"model": "../../etc/passwd"}, "model"),
    "a suffix": ({"suffix": "end"}, "suffix"),
    "an unknown field": ({"functions": []}, "functions"),
    "a temperature of 3": ({"temperature": 3}, "temperature"),
    "too many tokens": ({"max_tokens": 100}, "prompt"),
    "a prompt of mixed kinds": ({"prompt": ["a", 1]}, "prompt"),
    "no prompt": ({"prompt": []}, "prompt"),
    "an id outside the vocabulary": ({"prompt": [300]}, "prompt"),
    "half a character": ({"prompt": "\ud800"}, "prompt"),
    "half a character as a name": ({"\ud800": 1}, None),
    "a flag that is a number": ({"stream": 1}, "stream"),
    "a fraction of a text": ({"n": 1.5}, "n"),
    "a penalty near 0": ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    "more ids than a setting may have": ({"suppress_tokens": [5] * 1025}, "suppress_tokens"),
    "an option of streams that is a number": ({"stream": True, "stream_options": 5}, "stream_options"),
    "an unknown option of a stream": ({"stream_options": {"window": 1}}, "window"),
    "settings that contradict": ({"min_new_tokens": 5, "max_tokens": 3}, "min_new_tokens"),
    "more tokens at least than at most": ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    "the best of three": ({"best_of": 3}, "best_of"),
    "two, and the best of one": ({"best_of": 1, "n": 2}, "best_of"),
    "a seed beyond 64 bits": ({"seed": 2**63}, "seed"),
    "JSON that a schema describes": ({"response_format": {"type": "json_object"}}, "response_format"),
    "log-probabilities of prompts": (
        {"prompt": [[5] * 50] * 250, "echo": True, "logprobs": 100, "max_tokens": 0}, "logprobs"),
    "log-probabilities of many texts": (
        {"prompt": [[5] * 60] * 3, "n": 64, "echo": True, "logprobs": 100, "max_tokens": 2}, "logprobs"),
    "a bias outside the vocabulary": ({"logit_bias": {"320": 1}}, "logit_bias"),
    "too many texts": ({"n": 100, "prompt": ["a"] * 3}, "n"),
    "a top_p of 0": ({"top_p": 0}, "top_p"),
    "nothing left to choose": ({"suppress_tokens": list(range(300))}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_request_is_refused_with_an_error_object(client: Client, case: str) -> None:
    fields, param = REFUSED[case]
    body = json.dumps({"model": "demo", "prompt": "a", **fields}).encode()
    answer = client.post("/v1/completions", body, headers={"Content-Type": "application/json"})
    error = error_of(answer, 404 if param == "model" else 400)
    assert error["param"] == param, error
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")


@pytest.mark.parametrize("length", [1, LONG_PROMPT])
def test_a_text_that_cannot_be_read_is_refused_with_the_reason(length: int) -> None:
    vocabulary = {"a": 0, "b": 1} | {f"[{id}]": id for id in range(2, 300)}
    letters = Backend(models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    client = Client(tokenizer=Tokenizer(letters))
    for last, reason in (("\ud800", "must be a string of valid Unicode"), ("c", "it has no token for 'c'")):
        body = json.dumps({"model": "demo", "prompt": length * "a" + last}).encode()
        error = error_of(client.post("/v1/completions", body, headers={"Content-Type": "application/json"}), 400)
        assert reason in error["message"]
        assert error["param"] == "prompt"
    client.scheduler.stop()


def test_other_bodies_paths_and_methods_are_refused_with_error_objects(client: Client) -> None:
    json_type = {"Content-Type": "application/json"}
    for body in (b"", b"[]", b"[" * 100_000, b"\xff"):
        assert "JSON" in error_of(client.post("/v1/completions", body, headers=json_type), 400)["message"]
    body = json.dumps({"model": "demo", "prompt": "a"}).encode()
    assert "Content-Type" in error_of(client.post("/v1/completions", body), 400)["message"]
    assert "/v1/completions" in error_of(client.post("/v1/chat/completions", {"model": "demo"}), 404)["message"]
    error_of(client.get("/etc/passwd"), 404)
    wrong = client.get("/v1/completions")
    error_of(wrong, 405)
    assert wrong.headers["allow"] == "POST"
    error_of(client.get("/v1/models/nobody"), 404)

    async def parts() -> Any:  # of a length that is not announced
        for _ in range(20):
            yield b"a" * 2**16

    error_of(client.ask_all(lambda http: http.post("/v1/completions", content=parts(), headers=json_type))[0], 413)


def test_a_key_is_asked_for() -> None:
    with serving(api_key="right") as client:
        wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"Authorization": b"Bearer \xff"}]
        for headers in wrong:
            assert error_of(client.get("/v1/models", headers=headers), 401)["code"] == "invalid_api_key"
            error_of(client.get("/metrics", headers=headers), 401)
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert client.get("/v1/models", headers={"Authorization": f"{scheme} right"}).status_code == 200
        twice = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer right")]
        error_of(client.get("/v1/models", headers=twice), 400)
        assert client.get("/health").json() == {"status": "ok"}


def test_hosts_and_origins_elsewhere_are_refused() -> None:
    with serving() as client:
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/", headers={"Host": "evil.example:8000"}).status_code == 403
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
            answer = client.get("/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
            assert answer.status_code == 200
            assert not any("access-control" in name for name in answer.headers)
        for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example"):
            error_of(client.get("/v1/models", headers={"Origin": origin}), 403)
    with serving(allowed_origins=["https://good.example"], allowed_hosts=None) as client:
        answer = client.get("/v1/models", headers={"Host": "any.example", "Origin": "https://good.example"})
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        answer = client.get("/v1/models/nobody", headers={"Origin": "https://good.example"})
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        error_of(client.get("/v1/models", headers={"Origin": "https://evil.example"}), 403)


ORIGINS = {
    "*": "https://any.example", "https://good.example/": "https://good.example", "HTTPS://Good.example": "https://good.example",
    "https://good.example:443": "https://good.example", "http://good.example:80/": "http://good.example",
    "http://good.example:8000": "http://good.example:8000", "null": "null", "tauri://localhost": "tauri://localhost",
}  # fmt: skip


@pytest.mark.parametrize("allowed", ORIGINS)
def test_an_origin_is_allowed_however_it_is_written(allowed: str) -> None:
    with serving(allowed_origins=[allowed]) as client:
        headers = {"Origin": ORIGINS[allowed]}
        answer = client.post("/tokenize", {"prompt": "a"}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in ("*", ORIGINS[allowed])
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
        preflight = client.ask_all(lambda http: http.options("/tokenize", headers=headers | asked))[0]
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-private-network"] == "true"
        if allowed != "*":
            error_of(client.get("/v1/models", headers={"Origin": "https://evil.example"}), 403)


@pytest.mark.parametrize("origin", ["good.example", "https://good.example/page", "https://", "https://*.good.example"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(minigpt.ConfigError, match="allowed_origins must be"):
        Client(allowed_origins=[origin])


@pytest.mark.parametrize("host", ["Good.example", "good.example:8000", "*"])
def test_a_host_is_allowed_however_it_is_written(host: str) -> None:
    with serving(allowed_hosts=[host]) as client:
        for name in ("good.example", "GOOD.example:80"):
            assert client.get("/health", headers={"Host": name}).status_code == 200
        status = client.get("/health", headers={"Host": "evil.example"}).status_code
        assert status == (200 if host == "*" else 403)


def test_an_address_of_ipv6_needs_no_brackets_as_an_option() -> None:
    with serving(allowed_hosts=["fd00::5"]) as client:
        assert client.get("/health", headers={"Host": "[fd00::5]:8000"}).status_code == 200


def test_a_header_that_comes_twice_is_refused() -> None:
    """A proxy may read the other one."""
    with serving() as client:
        for name, values in {"Host": ("127.0.0.1", "evil.example"), "Origin": ("http://127.0.0.1", "null")}.items():
            for pair in (values, values[::-1]):
                headers = [(name, value) for value in pair]
                error_of(client.get("/health", headers=headers), 400)


def test_tokens_come_and_go(client: Client) -> None:
    for text in [*TEXTS, ""]:
        tokenized = client.post("/tokenize", {"prompt": text}).json()
        assert tokenized["tokens"] == TOKENIZER.encode(text)
        assert tokenized["count"] == len(tokenized["tokens"])
        assert client.post("/detokenize", {"tokens": tokenized["tokens"]}).json() == {"prompt": text}
    error_of(client.post("/detokenize", {"tokens": [300]}), 400)


def test_metrics_count() -> None:
    with serving() as client:
        client.complete(max_tokens=5, eos_token_id=[])
        client.complete(temperature=9)
        text = client.get("/metrics").text
        for line in (
            'generated_tokens_total{model="demo"} 5.0',
            "texts_waiting 0.0",
            *(f'requests_total{{path="/v1/completions",status="{status}"}} 1.0' for status in (200, 400)),
        ):
            assert f"minigpt_{line}" in text


def test_every_field_is_described(client: Client) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    over_http = {name for name, setting in SETTINGS.items() if "http" in setting.users} - {"max_new_tokens"}
    assert over_http | {"model", "prompt", "max_tokens", "n", "stream", "logprobs", "ignore_eos"} <= set(fields)
    assert fields["top_k"]["description"] == SETTINGS["top_k"].about


class Gate(torch.nn.Module):
    """A norm that waits for an event, and raises at token 299, which a text without a seed may draw."""

    open = threading.Event()
    error: type[BaseException] = ValueError

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(width)), torch.nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.open.wait(30)
        if x.abs().max() > 1e5:
            raise self.error("this norm has had enough")
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)


@pytest.fixture
def gate() -> Iterator[type[Gate]]:
    Gate.open.set()
    yield Gate
    Gate.open.set()
    Gate.error = ValueError


SHORT = {"model": "demo", "prompt": "a", "max_tokens": 2, "temperature": 0}


def gated() -> dict[str, minigpt.GPT2]:
    model = small_model(dtype=torch.float64, n_positions=64, vocab_size=300, tie_word_embeddings=False)
    model.wte.weight.data[299] = 1e6
    minigpt.swap_norms(model, Gate, "h.0.ln_1")
    return {"demo": model}


def test_a_full_queue_is_said_so_at_once(gate: type[Gate]) -> None:
    with serving(gated(), max_batch=2, max_queue=3) as client:
        gate.open.clear()

        async def patient(http: Any, is_first: bool) -> Any:
            await until(lambda: is_first or client.scheduler.count_writing)
            return await later(SHORT | {"max_tokens": 3})(http)

        async def late(http: Any) -> Any:
            await until(lambda: client.scheduler.count_waiting == 3)
            answer = await later(SHORT)(http)
            gate.open.set()
            return answer

        *answers, refused = client.ask_all(*(lambda http, i=i: patient(http, i == 0) for i in range(4)), late)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert error_of(refused, 429)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0


def test_one_request_does_not_fill_the_queue(gate: type[Gate]) -> None:
    """Two requests for 8 texts each wait in a queue of 8 texts."""
    with serving(gated(), max_batch=2, max_queue=8) as client:
        gate.open.clear()

        async def many(http: Any) -> Any:
            await until(lambda: client.scheduler.count_writing)
            requests = [asyncio.create_task(later(SHORT | {"n": 8})(http)) for _ in range(2)]
            queued = 2 * 8 - 1  # the second place may be one's
            await until(lambda: client.scheduler.count_waiting >= queued or any(map(asyncio.Task.done, requests)))
            gate.open.set()
            return await asyncio.gather(*requests)

        first, others = client.ask_all(later(SHORT), many)
        assert [answer.status_code for answer in (first, *others)] == [200] * 3


def test_many_requests_leave_half_of_the_time_to_texts(gate: type[Gate]) -> None:
    """Also requests that are refused: without this a step waits for Python's lock at every operation."""
    body = {"prompt": "the dog " * 240}
    assert len(body["prompt"]) < LONG_PROMPT, "encoded by the thread of requests"
    with serving(gated(), max_batch=2, max_queue=8) as client:

        async def busy(http: Any) -> tuple[float, float]:
            await until(lambda: client.scheduler.count_writing)
            began, used = time.monotonic(), time.thread_time()
            for _ in range(3):
                await asyncio.gather(*(later(body, path="/tokenize")(http) for _ in range(80)))
            times = time.monotonic() - began, time.thread_time() - used
            gate.open.set()
            return times

        gate.open.clear()
        text, (seconds, used) = client.ask_all(later(SHORT), busy)
    assert text.status_code == 200
    print(f"busy for {used:.2f} of {seconds:.2f} s")
    assert used > 0.05
    assert used < 0.6 * seconds


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit, BaseException])
def test_a_norm_that_raises_is_one_clients_error(gate: type[Gate], error: type[BaseException]) -> None:
    models, gate.error = gated(), error
    with serving(models) as client:
        alone = client.complete("the dog", max_tokens=25, temperature=0, eos_token_id=[]).json()["choices"]
        bad = {"model": "demo", "prompt": [5, 299, 5], "max_tokens": 3}
        nothing = {"model": "demo", "prompt": "a", "suppress_tokens": list(range(300))}
        good = {"model": "demo", "prompt": "the dog", "max_tokens": 25, "temperature": 0, "eos_token_id": []}

        *fine, excluded, failed, scored = client.ask_all(
            *(later(good, wait) for wait in (0.0, 0.005, 0.01)), later(nothing, 0.007), later(bad, 0.007),
            later(bad | {"echo": True, "logprobs": 1}),
        )  # fmt: skip
        assert [answer.json()["choices"] for answer in fine] == [alone] * 3
        error_of(excluded, 400)
        for answer in (failed, scored):
            assert "this norm has had enough" in error_of(answer, 500)["message"]
        pair = {"models": ["demo", "demo"], "prompt": "the dog", "max_tokens": 4}
        assert "this norm has had enough" in client.post("/compare", pair | {"logit_bias": {"299": 100}}).text
        assert client.get("/health").json() == {"status": "ok"}
        assert client.complete("the dog", max_tokens=25, temperature=0, eos_token_id=[]).json()["choices"] == alone


def test_health_says_that_the_thread_has_ended() -> None:
    with serving() as client:
        client.scheduler._run = lambda: None
        body = {"model": "demo", "prompt": "a"}
        with pytest.raises(TimeoutError):
            client.ask_all(lambda http: asyncio.wait_for(later(body)(http), 0.5))
        assert error_of(client.get("/health"), 503)["code"] == "not_alive"


def test_numbers_that_json_does_not_have_are_an_error() -> None:
    model = small_model(dtype=torch.float64, n_positions=64, vocab_size=300)
    far = copy.deepcopy(model)
    with torch.no_grad():
        model.wpe.weight[2] = torch.nan
        far.ln_f.weight *= 1e6
    with serving({"demo": model, "far": far}) as client:
        for fields in ({"echo": True, "max_tokens": 0}, {"max_tokens": 3}):
            failed = error_of(client.complete([5, 6, 7], logprobs=2, **fields), 500)
            assert "NaN" in failed["message"]
        assert client.complete([5, 6], logprobs=2, echo=True, max_tokens=0).status_code == 200
        pair = {"models": ["demo", "demo"], "prompt": "a", "max_tokens": 4}
        assert "NaN" in client.post("/compare", pair).text
        events = streamed(client.post("/compare", pair | {"models": ["far", "far"]}))
        assert all(0 <= event["kl"] < 1e5 for event in events)


def test_a_mistake_in_a_step_is_told_to_everybody_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that always fails is not tried again for ever, and the next request is served."""
    body = {"model": "demo", "prompt": "a", "max_tokens": 3}
    with serving() as client:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.Lane, "_report", lambda *_: 1 / 0)
            failed = client.ask_all(*[later(body)] * 3)
        assert ["ZeroDivisionError" in error_of(answer, 500)["message"] for answer in failed] == [True] * 3
        assert client.complete("the dog", max_tokens=3, eos_token_id=[]).json()["usage"]["completion_tokens"] == 3


def test_requests_take_places_in_turn() -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 8, "seed": 1, "eos_token_id": []}
    with serving(max_batch=2) as client:
        ended = []

        async def ask(http: Any, n: int, wait: float) -> None:
            await later(body | {"n": n}, wait)(http)
            ended.append(n)

        client.ask_all(lambda http: ask(http, 20, 0), lambda http: ask(http, 1, 0.01))
        assert ended == [1, 20]


def test_a_comparison_reads_both_texts_with_both_models(client: Client) -> None:
    body = {"models": ["demo", "demo:std_eps"], "prompt": "the dog", "max_tokens": 12, "seed": 4, "alternatives": 4}
    events = streamed(client.post("/compare", body))
    for side, name in enumerate(body["models"]):
        events_of_side = [event for event in events if event["side"] == side]
        options = {"max_new_tokens": 12, "do_sample": True, "seed": 4}
        assert "".join(event["text"] for event in events_of_side) == alone("the dog", MODELS[name], **options)
        ids = TOKENIZER.encode("the dog") + [event["chosen"]["id"] for event in events_of_side]
        truth = [model(torch.tensor([ids]))[0].detach().double().log_softmax(-1) for model in MODELS.values()]
        for event in events_of_side:
            p, q = (of[len(ids) - len(events_of_side) - 1 + event["position"]] for of in truth)
            assert event["kl"] == pytest.approx((p.exp() * (p - q)).sum().item(), abs=1e-9)
            for one in [*event["alternatives"], event["chosen"]]:
                assert one["probabilities"] == pytest.approx([of[one["id"]].exp().item() for of in (p, q)], abs=1e-6)
            assert len(event["alternatives"]) >= 4
        assert events_of_side[-1]["finish_reason"] in ("stop", "length")
    error_of(client.post("/compare", body | {"models": ["demo"]}), 400)
    error_of(client.post("/compare", body | {"models": ["demo", "other"]}), 404)


def test_comparisons_run_a_few_at_a_time_with_the_memory_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, beside = [], []

    class Counted(jobs.Batch):
        def __init__(self, model: Any, places: int, most: int) -> None:
            columns.append(most)
            beside.append(sum(bool(other._batches) for other in client.scheduler.comparisons))
            super().__init__(model, places, most)

    monkeypatch.setattr(jobs, "Batch", Counted)
    body = {"models": ["demo", "demo:std_eps"], "prompt": "the dog", "max_tokens": 9, "eos_token_id": []}
    with serving() as client:
        answers = client.ask_all(*[later(body, path="/compare")] * 10)
    assert {len(streamed(answer)) for answer in answers} == {18}
    assert columns == [len(TOKENIZER.encode("the dog")) + 9] * 20
    assert max(beside) == scheduler.COMPARISONS - 1


def test_the_page_is_served_with_a_policy_that_permits_no_other_address(client: Client) -> None:
    for path in ("/", "/page.css", "/page.js"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org", "")


def test_a_stopped_server_says_so(gate: type[Gate]) -> None:
    client = Client(gated())
    gate.open.clear()
    threading.Timer(0.2, client.scheduler.stop).start()
    threading.Timer(0.3, gate.open.set).start()
    (answer,) = client.ask_all(later(SHORT | {"max_tokens": 30}))
    assert error_of(answer, 503)["code"] == "shutting_down"
    error_of(client.complete(), 503)


def test_models_and_tokenizer_must_fit() -> None:
    with pytest.raises(minigpt.ConfigError, match="at least one model"):
        minigpt.serve.app({})
    with pytest.raises(minigpt.ConfigError, match="tokenizer has 300 ids"):
        minigpt.serve.app({"demo": small_model(vocab_size=400)}, tokenizer=TOKENIZER)
    with pytest.raises(minigpt.ConfigError, match="max_batch must be at least 1, got 0"):
        minigpt.serve.app(MODELS, tokenizer=TOKENIZER, max_batch=0)
    for key in ("", "\udcff", "a\nb"):
        with pytest.raises(minigpt.ConfigError) as raised:
            minigpt.serve.app(MODELS, tokenizer=TOKENIZER, api_key=key)
        assert raised.value.argument == "api_key"
    with pytest.raises(minigpt.ConfigError, match='draft="int8" needs'):
        minigpt.serve.app({"demo": small_model("dyt", vocab_size=300)}, tokenizer=TOKENIZER, draft="int8")
