"""What the endpoints use: the models, their tokenizer, and the scheduler."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from minigpt.errors import ConfigError
from minigpt.generation.settings import GenerationSettings
from minigpt.model import GPT2
from minigpt.serve.comparison import Comparison
from minigpt.serve.job import Job, Text
from minigpt.serve.protocol import CompareRequest, CompletionRequest, RefusalError
from minigpt.serve.scheduler import Scheduler
from minigpt.tokenizer import Tokenizer

LONG = 2000  # characters; a longer text is encoded in another thread, since that takes a while


class Service:
    """Turns requests into work for the scheduler.

    Raises:
        ConfigError: if there is no model, the tokenizer does not fit the models, or a number is below 1.
    """

    def __init__(
        self, models: Mapping[str, GPT2], tokenizer: Tokenizer, max_batch: int, max_queue: int, draft: str | None = None
    ) -> None:
        if not models:
            raise ConfigError("models must hold at least one model")
        for name, number in {"max_batch": max_batch, "max_queue": max_queue}.items():
            if number < 1:
                raise ConfigError(f"{name} must be 1 or more, got {number}")
        for name, model in models.items():
            known = model.config.used_vocab_size or model.config.vocab_size
            if tokenizer.vocab_size < known:
                raise ConfigError(
                    f"the tokenizer has {tokenizer.vocab_size} tokens and model {name!r} has {known}; give tokenizer="
                )
        self.models, self.tokenizer, self.started = dict(models), tokenizer, int(time.time())
        self.scheduler = Scheduler(models, max_batch, max_queue, draft)
        self.token_text = lru_cache(maxsize=2**16)(self._token_text)

    def model(self, name: str) -> GPT2:
        """Return a model by its id.

        Raises:
            RefusalError: with status 404 if there is none.
        """
        if name not in self.models:
            said = f"the model {name!r:.200} does not exist; this server has {', '.join(self.models)}"
            raise RefusalError(404, said, "model", "model_not_found")
        return self.models[name]

    async def prompts(
        self, model: GPT2, given: str | Sequence[str] | Sequence[int] | list[list[int]]
    ) -> list[list[int]]:
        """Return the ids of each prompt. An empty text becomes the end-of-text token, which starts a new document.

        Raises:
            GenerationError, RefusalError: if a text is not valid Unicode, or an id is outside the vocabulary.
        """
        several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        found = [await self.encode(one) if isinstance(one, str) else list(one) for one in several]  # type: ignore[arg-type]
        vocabulary = model.config.used_vocab_size or model.config.vocab_size
        for ids in found:
            if wrong := [id for id in ids if not 0 <= id < vocabulary]:
                said = f"token ids must be within [0, {vocabulary}), got {wrong[0]}"
                raise RefusalError(400, said, "prompt")
        return found

    async def encode(self, text: str) -> list[int]:
        encode, end = self.tokenizer.encode, self.tokenizer.end_of_text_id
        ids = encode(text) if len(text) < LONG else await asyncio.to_thread(encode, text)
        if ids:
            return ids
        if end is None:
            raise RefusalError(400, "prompt is empty, and the vocabulary has no end-of-text token", "prompt")
        return [end]

    def job(self, body: CompletionRequest, model: GPT2, prompts: list[list[int]]) -> Job:
        """Submit the texts of a request.

        Raises:
            GenerationError: if a setting is wrong.
            RefusalError: if a prompt is too long, too many texts wait, or the server shuts down.
        """
        settings, new, copies = body.settings(), body.new_tokens, body.copies
        for ids in prompts:
            self._check(model, ids, new, settings, scored=body.scores_prompts)
        if (count := len(prompts) * copies) > self.scheduler.max_queue:
            said = f"a request may ask for at most {self.scheduler.max_queue} texts, got {count}"
            raise RefusalError(400, said, "best_of" if body.best_of else "n" if body.n else "prompt")
        texts = [self._text(model, prompts[i // copies], settings, i // copies, i % copies, i) for i in range(count)]
        job = Job(body, texts)
        self.scheduler.submit(job, len(texts), body.model)
        self.scheduler.meters.prompts.labels(body.model).inc(sum(map(len, prompts)))
        return job

    async def comparison(self, body: CompareRequest) -> Comparison:
        """Submit a comparison; errors as ``job``."""
        models = self.model(body.models[0]), self.model(body.models[1])
        settings, (ids,) = body.settings(), await self.prompts(models[0], body.prompt)
        for model in models:
            self._check(model, ids, body.new_tokens, settings)
        if not body.new_tokens:
            raise RefusalError(400, "max_tokens must be 1 or more", "max_tokens")
        if settings.samples and settings.seed is None:  # both must draw alike
            settings = settings.replace(seed=secrets.randbelow(2**31))
        pair = self._text(models[0], ids, settings), self._text(models[1], ids, settings)
        comparison = Comparison(models, pair, body.alternatives, self.token_text)
        self.scheduler.submit(comparison, 1)
        return comparison

    def token_bytes(self, id: int) -> bytes:
        return self.tokenizer.decode_bytes([id])

    def _token_text(self, id: int) -> str:
        """Return the text of one token, or its bytes if they are not whole characters."""
        data = self.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text(
        self, model: GPT2, ids: list[int], settings: GenerationSettings, prompt: int = 0, copy: int = 0, index: int = 0
    ) -> Text:
        seed = None if settings.seed is None else settings.seed + index
        return Text(list(ids), settings, settings.end_ids(model.config), self.tokenizer, prompt, copy, seed)

    def _check(self, model: GPT2, ids: list[int], new: int, settings: GenerationSettings, scored: bool = False) -> None:
        context = model.config.n_positions
        if len(ids) + new > context and (scored or settings.overflow == "refuse"):
            said = (
                f"this model's context is {context} tokens, and the request has {len(ids) + new}: "
                f"{len(ids)} in the prompt and {new} to write; shorten the prompt or lower max_tokens"
            )
            raise RefusalError(400, said, "prompt", "context_length_exceeded")
        settings.require_known_ids(model.config.vocab_size)
