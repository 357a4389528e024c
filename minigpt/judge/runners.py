"""Functions and modules that read texts.

B batch, T tokens, V vocabulary, C embedding.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.errors import ConfigError
from minigpt.host import hooked, is_compiled, prefix_of
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.gradients import gradients_of
from minigpt.judge.perplexity import window_losses
from minigpt.judge.reading import Reading, Recorder, Runner, Sample, Scored, as_batch, only_text
from minigpt.judge.reference import arguments_of, batches, cached_reader
from minigpt.judge.together import read_together, reads_apart
from minigpt.offload import is_offloaded, is_sharded, plain_copy
from minigpt.precision import dtype_name

Naming = Callable[[], AbstractContextManager[None]]
"""Gives a block that turns what foreign code raises into an error that names it."""


class FunctionRunner(Runner):
    """A function from ids (B, T) to logits (B, T, V), or to an object with ``logits``."""

    def __init__(
        self, call: Callable[[Tensor], Any], facts: CheckpointFacts, naming: Naming = contextlib.nullcontext
    ) -> None:
        self.call, self.facts, self.naming = call, facts, naming

    def tensor(self, ids: list[int]) -> Tensor:
        """Return token ids as a batch of one (1, T)."""
        return as_batch(ids, self.facts.device)

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        """Return the logits at the compared positions of a text.

        Raises:
            ConfigError: if what the function returns is not logits of that text.
        """
        ids = self.tensor(sample.ids)
        with self.naming():
            returned = self.call(ids)
        logits = require_logits(returned, (*ids.shape, self.facts.vocab_size))
        return logits.to(self.facts.device)[0, sample.compared]


def require_logits(returned: Any, shape: tuple[int, ...]) -> Float[Tensor, "batch seq vocab"]:
    """Return the logits that a candidate has returned.

    Raises:
        ConfigError: if they have another shape, or no floating dtype.
    """
    logits = getattr(returned, "logits", returned)
    if not hasattr(logits, "shape"):
        raise ConfigError(
            f"must return logits, or an object with .logits, got a {type(logits).__name__}", argument="candidate"
        )
    logits = torch.as_tensor(logits)
    if tuple(logits.shape) != shape or not logits.is_floating_point():
        described = f"{tuple(logits.shape)} and {dtype_name(logits.dtype)}"
        raise ConfigError(
            f"must return logits of shape {shape} and a floating dtype, got {described}", argument="candidate"
        )
    return logits


class ModuleRunner(FunctionRunner):
    """Anybody's module; its norms, blocks and Parameters are those whose names end as the original's do.

    Attributes:
        prefix: what their names begin with; None if it does not have all of the original's.
        together: whether several texts are read in one call: a model of another architecture that a recipe has opened,
            or one whose weights are brought for each call.
    """

    pads = False  # texts of several lengths

    def __init__(self, module: nn.Module, facts: CheckpointFacts, naming: Naming = contextlib.nullcontext) -> None:
        super().__init__(module, facts, naming)
        self.module = module
        self.prefix = prefix_of(module, facts.places)
        self.together = any(map(is_offloaded, module.modules()))
        self.apart = reads_apart(module)

    @property
    def reads_tokens(self) -> bool:
        """True if it can be read token by token: a model of transformers."""
        return bool(arguments_of(self.module))

    @property
    def root(self) -> nn.Module:
        """The module that has the sites; only if ``prefix`` is not None."""
        return self.module.get_submodule((self.prefix or "").rstrip("."))

    def read(self, sample: Sample) -> Reading:
        if self.prefix is None:
            return Reading(self.logits(sample))
        compiled = self.logits(sample) if is_compiled(self.module) else None
        with hooked(self.module), Recorder(self.root, self.facts.places) as recorder:
            logits = self.logits(sample)
        if compiled is not None:
            logits = compiled
        outputs = {place: only_text(y) for place, y in recorder.outputs.items()}
        return Reading(logits, outputs)

    def read_all(self, samples: Iterable[Sample]) -> Iterator[Reading]:
        if self.apart or not self.together or self.prefix is None:
            yield from super().read_all(samples)
            return
        yield from self._read_together(samples, self.facts.places)

    def logits_of_all(self, samples: Iterable[Sample]) -> Iterator[Reading]:
        if self.apart or not self.together:
            yield from super().logits_of_all(samples)
            return
        yield from self._read_together(samples, [])

    def _read_together(self, samples: Iterable[Sample], places: Sequence[str]) -> Iterator[Reading]:
        facts = self.facts
        return read_together(
            self._logits_of, self.root, places, samples, facts.vocab_size, facts.n_positions, facts.device
        )

    def _logits_of(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of a batch of ids (B, T)."""
        with self.naming(), hooked(self.module):
            returned = self.call(ids)
        return require_logits(returned, (*ids.shape, self.facts.vocab_size)).to(self.facts.device)

    def normalize(self, site: str, x: Tensor) -> Tensor | None:
        if self.prefix is None:
            return None
        norm = self.root.get_submodule(site)
        if any(map(is_sharded, norm.parameters())):  # which only a call of the whole model gathers
            norm = plain_copy(norm)
        with self.naming():
            return norm(x)

    def gradients(self, texts: Sequence[list[int]]) -> dict[str, Tensor] | None:
        if self.prefix is None:
            return None
        batches = [self.tensor(ids) for ids in texts]
        with self.naming():
            return gradients_of(self.module, batches, self.facts.embedding, self.prefix)

    def decode(self, prompts: Sequence[Sample]) -> list[Float[Tensor, "new vocab"]] | None:
        if not self.reads_tokens or not any(prompt.written for prompt in prompts):
            return None
        logits = [torch.empty(0, self.facts.vocab_size, device=self.facts.device) for _ in prompts]
        sizes = [(len(prompt.written), 0 if self.pads else prompt.new_from) for prompt in prompts]
        with self.naming(), hooked(self.module):
            for _, batch in batches(sizes):
                steps = [*self._decoded([prompts[i] for i in batch])]
                rows = torch.stack(steps, dim=1)  # (B, new, V)
                for i, row in zip(batch, rows, strict=True):
                    logits[i] = row
        return logits

    def _decoded(self, samples: list[Sample]) -> Iterator[Float[Tensor, "batch vocab"]]:
        """Read prompts, then what was written after them, a token a step; yield the logits of each next token."""
        read, first = cached_reader(self.module), samples[0].new_from
        ids = torch.cat([self.tensor(sample.ids) for sample in samples])  # (B, all)
        for end in range(first, ids.shape[1]):
            new = ids[:, :end] if end == first else ids[:, end - 1 : end]
            yield read(new, torch.ones_like(ids[:, :end]))

    def continue_prompt(self, sample: Sample) -> list[int] | None:
        if not self.reads_tokens:
            return None
        read, ids = cached_reader(self.module), sample.prompt
        new = self.tensor(ids)
        with self.naming(), hooked(self.module):
            for _ in sample.written:
                mask = torch.ones(1, len(ids), dtype=torch.long, device=new.device)
                new = read(new, mask).argmax(-1, keepdim=True)
                ids = [*ids, int(new)]
        return ids[sample.new_from :]

    def window_losses(self, ids: list[int]) -> list[Scored] | None:
        if not self.reads_tokens:
            return None
        with self.naming():
            return window_losses(self.module, ids)
