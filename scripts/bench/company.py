"""Count texts that differ between alone and in company: through ``generate``'s batches, and through the server.

    python scripts/bench/company.py --texts 10000 --requests 10000 --json docs/results/company-cpu.json

Alone means: the only text of a batch, of which other texts know nothing. Each text has random words, settings and a
seed. Texts are compared token by token, and in batches also the bits of every log-probability. The server gets requests
of 32 clients: streamed or whole, with ``n``, ``stop`` and ``echo``, texts that slide, and some that hang up.
"""

import asyncio
import contextlib
import json
import logging
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import typer

import minigpt
from minigpt.device import environment
from minigpt.engine.kernel import path_of
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.row import Row
from minigpt.generation.settings import parse_settings

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, show

KINDS = ("float32", "bfloat16", "int8")
LONGEST, NEW = 59, 32  # tokens of a prompt, and new ones at most
WORDS = [
    "the",
    "old",
    "sailor",
    "saw",
    "a",
    "small",
    "red",
    "dog",
    "and",
    "said",
    "that",
    "would",
    "not",
    ".",
    ",",
    "\n",
]


def main(
    model: str = "demo", texts: int = 10_000, requests: int = 10_000, clients: int = 32, places: int = 16,
    kinds: str = ",".join(KINDS), json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Write so many texts of each kind, and ask the server for so many completions."""
    torch.set_num_threads(1)
    logging.getLogger("minigpt").setLevel(logging.ERROR)
    report: dict[str, Any] = {"model": model, "environment": environment(1), "batches": {}, "server": {}}
    for kind in kinds.split(","):
        how: dict[str, Any] = {"quantize": "int8"} if kind == "int8" else {"dtype": kind}
        opened = minigpt.from_pretrained(model, device="cpu", **how)
        report["batches"][kind] = {"decoding": path_of(opened)} | in_batches(opened, texts, places)
        print(kind, report["batches"][kind], flush=True)
        if requests:
            options = ["--quantize", "int8"] if kind == "int8" else ["--dtype", kind]
            tokenizer = minigpt.Tokenizer.from_pretrained(model)
            with served(model, options) as url:
                counts = asyncio.run(Clients(url, opened, tokenizer, requests).run(clients))
            report["server"][kind] = {"clients": clients} | counts
            print(kind, report["server"][kind], flush=True)
    show(report, json_file)


def in_batches(model: minigpt.GPT2, texts: int, places: int) -> dict[str, int]:
    """Write random texts in so many places, where each that ends makes room for another; then each alone."""
    vocabulary = model.config.used_vocab_size or model.config.vocab_size
    together, alone = (rows_for(model, texts, vocabulary) for _ in range(2))
    for _ in write_rows(model, together, together[0].settings, places):
        pass
    for row in alone:
        for _ in write_rows(model, [row], row.settings, 1):
            pass
    pairs = list(zip(together, alone, strict=True))
    return {
        "texts": texts,
        "places": places,
        "tokens": sum(len(row.new_ids) for row in alone),
        "differing texts": sum(one.ids != other.ids for one, other in pairs),
        "differing log-probabilities": sum(one.logprobs != other.logprobs for one, other in pairs),
    }


def rows_for(model: minigpt.GPT2, texts: int, vocabulary: int) -> list[Row]:
    """Return rows with random prompts, lengths and seeds, the same each time."""
    chance, rows = random.Random(0), []
    for number in range(texts):
        prompt = [chance.randrange(vocabulary) for _ in range(chance.randint(1, LONGEST))]
        draws = chance.random() < 0.7
        settings = parse_settings(
            max_new_tokens=chance.randint(1, NEW), output_logprobs=True, do_sample=draws, seed=number if draws else None
        )
        rows += rows_of(model, [prompt], settings, first=number)
    return rows


@contextlib.contextmanager
def served(model: str, options: list[str]) -> Iterator[str]:
    """Start ``minigpt serve``, and yield its address."""
    command = [sys.executable, "-m", "minigpt", "serve", "--model", model, "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().rstrip("/")
        finally:
            process.terminate()
            process.wait()


class Clients:
    """Clients of a server, and what became of their requests."""

    def __init__(self, url: str, model: minigpt.GPT2, tokenizer: minigpt.Tokenizer, requests: int) -> None:
        self.url, self.model, self.tokenizer = url, model, tokenizer
        self.left, self.counts = list(range(requests)), Counter[str]()
        self.answers: list[tuple[dict[str, Any], list[str]]] = []

    async def run(self, clients: int) -> dict[str, int]:
        """Ask everything, and then write every text alone; return the counts."""
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            self.name = (await http.get("/v1/models")).json()["data"][0]["id"]
            await asyncio.gather(*(self._client(http) for _ in range(clients)))
        for body, texts in self.answers:
            self.counts["completions"] += len(texts)
            self.counts["differing texts"] += sum(
                one != other for one, other in zip(texts, self._alone(body), strict=True)
            )
        return {"requests": sum(self.counts[kind] for kind in ("whole", "streamed", "hung up")), **self.counts}

    async def _client(self, http: httpx.AsyncClient) -> None:
        while self.left:
            chance = random.Random(self.left.pop())
            body = self._body(chance)
            kind = chance.choices(["whole", "streamed", "hung up"], [50, 40, 10])[0]
            self.counts[kind] += 1
            if kind == "whole":
                answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
                self.answers.append((body, [choice["text"] for choice in answer["choices"]]))
                continue
            texts = [""] * body["n"]
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        texts[choice["index"]] += choice["text"]
                        if kind == "hung up" and chance.random() < 0.3:
                            break
            if kind == "streamed":
                self.answers.append((body, texts))

    def _body(self, chance: random.Random) -> dict[str, Any]:
        """Return a random request."""
        count = chance.choices([chance.randint(1, 40), chance.randint(150, 400)], [9, 1])[0]
        body: dict[str, Any] = {
            "model": self.name, "prompt": " ".join(chance.choice(WORDS) for _ in range(count)), "n": 1,
            "max_tokens": chance.randint(1, NEW), "seed": chance.randrange(10**6), "overflow": "slide",
            "slide_stride": 16, "temperature": chance.choice([0, 0.8, 1.0]), "echo": chance.random() < 0.2,
        }  # fmt: skip
        if body["temperature"]:
            body["n"] = chance.choice([1, 1, 1, 3])
        if chance.random() < 0.3:
            body["stop"] = chance.choice([["."], ["the", " and"]])
        if chance.random() < 0.2 and count <= 40:  # a prompt beyond the context cannot be scored
            body["logprobs"] = 2
        return body

    def _alone(self, body: dict[str, Any]) -> list[str]:
        """Return the texts of a request, each written by itself."""
        shared = {name: body[name] for name in ("overflow", "slide_stride", "stop", "temperature") if name in body}
        texts, first = [], body["prompt"] if body["echo"] else ""
        for number in range(body["n"]):
            prompt = minigpt.generation.Prompt(body["prompt"], body["max_tokens"])
            how: dict[str, Any] = shared | {"max_new_tokens": body["max_tokens"], "do_sample": True}
            if body["temperature"]:
                how["seed"] = body["seed"] + number
            (one,) = minigpt.generation.complete(self.model, self.tokenizer, [prompt], **how)
            texts.append(first + one.text)
        return texts


if __name__ == "__main__":
    typer.run(main)
