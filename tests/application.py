"""An application of two norms in this process, and how it is asked."""

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import torch
from checkpoints import tiny_bpe
from helpers import small_model

import minigpt
from minigpt import Tokenizer
from minigpt.serve import share_weights

# Log-probabilities are over all logits, also over those of ids from 300 on, which have no token.
MODEL = small_model(
    dtype=torch.float64, n_positions=64, vocab_size=320, used_vocab_size=300, eos_token_id=[7, 20, 33, 150]
)
TOKENIZER = Tokenizer(tiny_bpe(300))
OTHER = copy.deepcopy(MODEL)
minigpt.swap_norms(OTHER, "std_eps")
share_weights(MODEL, OTHER)
MODELS = {"demo": MODEL, "demo:std_eps": OTHER}


class Client:
    """Asks an application in this process."""

    def __init__(self, models: Any = MODELS, tokenizer: Tokenizer = TOKENIZER, **options: Any) -> None:
        self.app = minigpt.serve.app(models, tokenizer=tokenizer, **options)
        self.scheduler = self.app.state.scheduler

    def ask_all(self, *calls: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        async def main() -> list[Any]:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
                return await asyncio.gather(*(one(http) for one in calls))

        return asyncio.run(main())

    def post(self, path: str, body: Any, **options: Any) -> Any:
        content = {"json": body} if not isinstance(body, bytes) else {"content": body}
        return self.ask_all(lambda http: http.post(path, **content, **options))[0]

    def get(self, path: str, **options: Any) -> Any:
        return self.ask_all(lambda http: http.get(path, **options))[0]

    def complete(self, prompt: Any = "the dog", **fields: Any) -> Any:
        return self.post("/v1/completions", {"model": "demo", "prompt": prompt, **fields})


def later(body: Any, wait: float = 0.0, path: str = "/v1/completions") -> Callable[[Any], Awaitable[Any]]:
    """Asks after some seconds."""

    async def post(http: Any) -> Any:
        await asyncio.sleep(wait)
        return await http.post(path, json=body)

    return post


@contextlib.contextmanager
def serving(models: Any = MODELS, **options: Any) -> Iterator[Client]:
    client = Client(models, **options)
    yield client
    client.scheduler.stop()
