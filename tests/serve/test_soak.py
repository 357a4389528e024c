"""Minutes of clients of every kind: nothing is lost or mixed up, memory is flat, every error is an error object.

MINIGPT_SOAK_SECONDS is how long; the default is ten minutes.
"""

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from live import live, resident_mb

import minigpt
from minigpt.recipe import Recipe
from minigpt.serve import open_models

httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.thorough
SECONDS = float(os.environ.get("MINIGPT_SOAK_SECONDS", "600"))
CLIENTS = 12
MODELS, TOKENIZER = open_models([Recipe(norm=norm) for norm in ("fused", "std_eps")])


def known_answers() -> list[tuple[dict[str, Any], str]]:
    """Requests, each with the text that it must get."""
    answers = []
    for number in range(24):
        ids = TOKENIZER.encode("Once upon a time there was a little red dog")[: 1 + number % 9]
        name, new = list(MODELS)[number % 2], 1 + number * 7 % 50
        options: dict[str, Any] = {} if number % 3 else {"seed": number, "temperature": 0.7}
        out = minigpt.generate(
            MODELS[name], torch.tensor([ids]), max_new_tokens=new, eos_token_id=None, do_sample=bool(options), **options
        )
        body = {"model": name, "prompt": ids, "max_tokens": new, "eos_token_id": [], **(options or {"temperature": 0})}
        answers.append((body, TOKENIZER.decode(out[0, len(ids) :].tolist())))
    return answers


BAD: tuple[bytes, ...] = (
    b'{"model": "nobody"}', b'{"model": "demo", "temperature": 9}', b'{"prompt": "a"}', b"{", b"[" * 5000,
    b'{"model": "demo", "prompt": [5000]}', b'{"model": "demo", "max_tokens": 4000}', b'{"model": "demo", "n": 0}',
)  # fmt: skip


class Soak:
    """The clients, and what has become of their requests."""

    def __init__(self, url: str) -> None:
        self.url, self.counts, self.wrong, self.known = url, Counter[str](), list[str](), known_answers()

    async def client(self, number: int, until: float) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            while time.monotonic() < until:
                (kind,) = chance.choices(["good", "streamed", "compared", "bad", "hung_up"], [40, 30, 5, 15, 10])
                self.counts[kind] += 1
                try:
                    await getattr(self, f"_{kind}")(http, chance, *chance.choice(self.known))
                except Exception as error:
                    self.wrong.append(f"{kind}: {type(error).__name__}: {error}")

    async def _good(self, http: Any, chance: random.Random, body: dict[str, Any], expected: str) -> None:
        answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == expected

    async def _streamed(self, http: Any, chance: random.Random, body: dict[str, Any], expected: str) -> None:
        answer = await http.post("/v1/completions", json=body | {"stream": True, "logprobs": 1, "echo": True})
        chunks = [json.loads(part[6:]) for part in answer.text.split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TOKENIZER.decode(body["prompt"]) + expected

    async def _compared(self, http: Any, *_: Any) -> None:
        body = {"models": list(MODELS), "prompt": "The dog", "max_tokens": 10, "eos_token_id": []}
        assert len((await http.post("/compare", json=body)).text.split("\n\n")) == 22

    async def _bad(self, http: Any, chance: random.Random, *_: Any) -> None:
        headers = {"Content-Type": "application/json"}
        answer = await http.post("/v1/completions", content=chance.choice(BAD), headers=headers)
        assert 400 <= answer.status_code < 500
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    async def _hung_up(self, http: Any, chance: random.Random, body: dict[str, Any], _: str) -> None:
        more = {"max_tokens": 200, "stream": chance.random() < 0.5}
        with contextlib.suppress(httpx.TimeoutException):
            await http.post("/v1/completions", json=body | more, timeout=0.01 + chance.random() * 0.2)


def test_a_soak_of_good_bad_and_vanishing_clients() -> None:
    with live("--norm", "fused", "--norm", "std_eps", "--max-batch", "8") as server:
        soak, memory = Soak(server.url), list[float]()

        async def watch(until: float) -> None:
            while time.monotonic() < until:
                memory.append(resident_mb(server.process))
                await asyncio.sleep(SECONDS / 40)

        async def main() -> None:
            until = time.monotonic() + SECONDS
            await asyncio.gather(watch(until), *(soak.client(number, until) for number in range(CLIENTS)))

        asyncio.run(main())
        print(dict(soak.counts), [round(mb) for mb in memory])
        assert server.process.poll() is None, f"the server has ended with {server.process.returncode}; {soak.wrong[:5]}"
        assert soak.wrong == []
        assert min(soak.counts[kind] for kind in ("good", "streamed", "bad", "hung_up")) > 0
        deadline, metrics = time.monotonic() + 20, ""
        while "minigpt_texts_writing 0.0" not in metrics and time.monotonic() < deadline:
            metrics = httpx.get(f"{server.url}/metrics").text
        assert "minigpt_texts_writing 0.0" in metrics
        assert "minigpt_texts_waiting 0.0" in metrics
        assert 'status="500"' not in metrics
        warm = memory[len(memory) // 4 :]
        half = len(warm) // 2
        growth = sum(warm[half:]) / len(warm[half:]) - sum(warm[:half]) / half
        assert growth < 0.03 * warm[0] + 4, f"memory grew by {growth:.1f} MiB from {warm[0]:.0f} MiB"
    assert server.process.returncode == 0
