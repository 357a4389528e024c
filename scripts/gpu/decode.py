"""Tokens a second of greedy decoding, ours beside transformers' ``generate``, in turns.

Contestants:
    minigpt: ``minigpt.generate``.
    transformers: ``generate`` with its default cache.
    transformers, static cache: with ``cache_implementation="static"``, which it compiles on a GPU.
    minigpt, static step: one step over static buffers, launched operation by operation.
    minigpt, CUDA graph: the same step, captured once and replayed. Only on CUDA.

The graph must give the ids and the logits' bits of the static step.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu.models import finish, ours_of, theirs_of
from torch import Tensor

import minigpt
from minigpt.engine import accelerate

SIZES = ("gpt2", "gpt2-xl")
TEXTS = (1, 16)
PROMPT = 64  # tokens of each prompt
NEW = 128  # tokens that are written behind it
ROUNDS = 5
Contestants = dict[str, Callable[[], Tensor]]


class StaticCache:
    """Keys and values of fixed size: a step writes one place and reads every place, by a mask.

    Args:
        store: (L, 2, B, H, S, D), as ``KVCache.store``.

    Attributes:
        place: (1,), the place that the next token takes.
    """

    def __init__(self, store: Tensor) -> None:
        self.store = store
        self.place = torch.zeros(1, dtype=torch.long, device=store.device)

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, ...]:
        """Write keys and values (2, B, H, 1, D) at ``place``; return all of the layer's, each (B, H, S, D)."""
        held = self.store[layer]
        held.index_copy_(3, self.place, new.to(held.dtype))
        return held.unbind()


class StaticStep:
    """A decoding step whose inputs and outputs keep their addresses, so that a CUDA graph can replay it.

    Attributes:
        ids: (B, 1), the token to read, then the token that it chose.
        logits: (B, V) of the step.
    """

    def __init__(self, model: minigpt.GPT2, texts: int, total: int) -> None:
        self.model = model
        self.cache = model.new_cache(texts, total)
        self.cache.store.zero_()  # a place that is not written yet takes part with weight 0, and must not be NaN
        self.static = StaticCache(self.cache.store)
        self.places = torch.arange(total, device=model.device)
        self.ids = torch.zeros(texts, 1, dtype=torch.long, device=model.device)
        self.logits = torch.zeros(texts, model.config.vocab_size, dtype=model.dtype, device=model.device)

    def read_prompt(self, prompt: Tensor) -> None:
        """Read prompts (B, T) by the plain network, and choose the first new token of each."""
        self.cache.length = 0
        logits = self.model(prompt, cache=self.cache)[:, -1]
        self.static.place.fill_(prompt.shape[1])
        self.ids.copy_(logits.argmax(-1, keepdim=True))

    def step(self) -> None:
        """Read the chosen tokens, and choose the next."""
        model, place = self.model, self.static.place
        visible = (self.places <= place)[None, None, None]  # (1, 1, 1, S)
        positions = place[None]  # (1, 1)
        stream = model.embed(self.ids, positions)
        hidden = model.run(stream, positions, visible, self.static)
        self.logits.copy_(model.head(hidden)[:, -1])
        self.ids.copy_(self.logits.argmax(-1, keepdim=True))
        place.add_(1)

    def write(self, prompt: Tensor, new: int, step: Callable[[], None]) -> Tensor:
        """Return the ids (B, T + new) of the prompt and of what ``step`` writes behind it."""
        self.read_prompt(prompt)
        written = [prompt, self.ids.clone()]
        for _ in range(new - 1):
            step()
            written.append(self.ids.clone())
        return torch.cat(written, dim=1)

    def captured(self, prompt: Tensor) -> Callable[[], None]:
        """Return a function that replays ``step`` as a CUDA graph."""
        self.read_prompt(prompt)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries choose their kernels and workspaces before the capture
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def decode(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Add to ``results`` a row for each size, number of texts and contestant."""
    rows = results.setdefault("rows", [])
    dtype = torch.float32 if quick else torch.bfloat16
    for size in SIZES[:1] if quick else SIZES:
        weights = ours_of(size, device, quick).to(dtype)
        hf = theirs_of(weights, "sdpa")
        model = accelerate(weights)
        for texts in TEXTS[-1:] if quick else TEXTS:
            yield f"{size}, {texts} texts"
            new, rounds = (8, 1) if quick else (NEW, ROUNDS)
            for row in timed(model, hf, texts, new, rounds):
                rows.append({"model": size, "dtype": str(dtype).removeprefix("torch."), "texts": texts} | row)


@torch.inference_mode()
def timed(model: minigpt.GPT2, hf: Any, texts: int, new: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each contestant: tokens a second of all texts, and the ids that it shares with ``minigpt``."""
    prompt = torch.randint(model.config.vocab_size, (texts, PROMPT), generator=torch.Generator().manual_seed(0))
    prompt = prompt.to(model.device)
    runs = contestants(model, hf, prompt, new)
    written = {name: run() for name, run in runs.items()}  # compilers, caches
    if "minigpt, CUDA graph" in written:
        require_same(written["minigpt, CUDA graph"], written["minigpt, static step"])
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            finish(model.device)
            start = time.perf_counter()
            run()
            finish(model.device)
            seconds[name].append(time.perf_counter() - start)
    for name, taken in seconds.items():
        median = statistics.median(taken)
        shared = (written[name] == written["minigpt"]).float().mean().item()
        yield {
            "contestant": name,
            "new_tokens": new,
            "seconds": median,
            "tokens_per_second": texts * new / median,
            "ids_as_minigpt": shared,
        }


def contestants(model: minigpt.GPT2, hf: Any, prompt: Tensor, new: int) -> Contestants:
    """Return the contestants by name; each returns the ids (B, T + new)."""
    greedy = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    static = StaticStep(model, len(prompt), prompt.shape[1] + new)
    runs: Contestants = {
        "minigpt": lambda: minigpt.generate(model, prompt, max_new_tokens=new, min_new_tokens=new, temperature=0),
        "transformers": lambda: hf.generate(prompt, **greedy),
        "transformers, static cache": lambda: hf.generate(prompt, cache_implementation="static", **greedy),
        "minigpt, static step": lambda: static.write(prompt, new, static.step),
    }
    if model.device.type == "cuda":
        replay = static.captured(prompt)
        require_same_bits(static, prompt, replay)
        runs["minigpt, CUDA graph"] = lambda: static.write(prompt, new, replay)
    return runs


def require_same_bits(static: StaticStep, prompt: Tensor, replay: Callable[[], None]) -> None:
    """Raise an AssertionError unless the graph gives the logits of the step without a graph, bit for bit."""
    static.read_prompt(prompt)
    static.step()
    expected = static.logits.clone()
    static.read_prompt(prompt)
    replay()
    assert torch.equal(static.logits, expected), "the CUDA graph's logits have other bits than the step's"


def require_same(actual: Tensor, expected: Tensor) -> None:
    """Raise an AssertionError unless the graph writes what the step without a graph writes."""
    assert torch.equal(actual, expected), "the CUDA graph writes other ids than the step"
