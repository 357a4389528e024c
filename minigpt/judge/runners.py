"""Runners: what reads texts, whole or token by token. They differ in what they can give.

Where every reading brings a model's weights from its files, texts are read together, padded on the right. A causal
model computes nothing else for the tokens before the padding, unless its rotary angles depend on the longest text: such
a model reads each text alone.

B batch, T tokens, V vocabulary, C embedding.
"""

import contextlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt.engine.reader import Reader
from minigpt.errors import ConfigError
from minigpt.host import hooked, is_compiled, prefix_of, unwrapped
from minigpt.inputs import left_padded
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.gradients import gradients_of
from minigpt.judge.reading import Outputs, Reading, Text, as_batch, recorded, rounded_as
from minigpt.model import GPT2
from minigpt.offload import is_offloaded, is_sharded, plain_copy
from minigpt.precision import dtype_name
from minigpt.scoring import Scored, window_losses

BATCH = 8  # prompts read together, token by token: a step costs hardly more for 8 rows than for one
CACHE_NAMES = ("past_key_values", "cache")  # of a forward's argument, in older and newer transformers
MOST_LOGITS = 2**26  # numbers of the logits of texts that are read together: 512 MB in float64
MOST_TOKENS = 4096  # of texts that are read together: eager attention keeps scores of every pair
BY_LENGTH = {"longrope", "dynamic"}  # rotary embeddings whose angles depend on the longest text
MOST_PADDING = 64  # tokens; to compute more takes longer than to bring the weights once more

Naming = Callable[[], AbstractContextManager[None]]
"""Gives a block that turns what foreign code raises into an error that names it."""

Step = Callable[[list[list[int]]], Float[Tensor, "batch vocab"]]
"""A function of the next tokens of each of some texts, to the logits (B, V) of the token after them."""


class Runner:
    """Something that reads texts. All that it cannot give is None, or empty.

    Attributes:
        pads: whether it can read prompts of several lengths together, token by token.
        batch: the most prompts that it reads together, token by token.
        used: ids from there on are never written; None if all may be.
    """

    pads = False
    batch = BATCH
    used: int | None = None

    def __init__(self, facts: CheckpointFacts) -> None:
        self.facts = facts

    def read(self, texts: Iterable[Text], *, places: bool = True) -> Iterator[Reading]:
        """Yield what it computes of each text; several may be read together.

        Args:
            places: whether to keep what norms and blocks compute, if that is known.
        """
        raise NotImplementedError

    def logits(self, text: Text) -> Float[Tensor, "seq vocab"]:
        """Return the logits at the compared positions of a text."""
        (reading,) = self.read([text], places=False)
        return reading.logits

    def read_with_norms(
        self, texts: Iterable[Text], true_inputs: Iterable[Outputs], *, places: bool = True
    ) -> Iterator[Reading]:
        """Yield what it computes of each text. Each norm is also read by itself, with its true input there."""
        for reading, inputs in zip(self.read(texts, places=places), true_inputs, strict=True):
            alone: dict[str, Tensor] = {}
            for site, x in inputs.items():
                if site not in reading.outputs:
                    continue
                output = self.normalize(site, rounded_as(reading, site, x))
                if output is not None:
                    alone[site] = output[0]
            yield replace(reading, alone=alone)

    def normalize(self, site: str, x: Float[Tensor, "1 seq *rows"]) -> Float[Tensor, "1 seq *rows"] | None:
        """Return the output of the norm at a site."""
        return None

    def start(self, texts: list[list[int]], room: int) -> Step | None:
        """Return a function that reads on in texts, piece by piece, with a cache; None if there is no cache.

        Args:
            texts: the tokens of each, as far as they are known.
            room: the most tokens that one of them will have.
        """
        return None

    def decode(self, texts: Sequence[Text], new: Sequence[int]) -> list[Float[Tensor, "new vocab"]]:
        """Return the logits of the tokens after each prompt, read token by token; nothing if there is no cache.

        A token is the one that was written there, else the likeliest.

        Args:
            new: how many tokens, of each text.
        """
        facts = self.facts
        logits = [torch.empty(0, facts.shape.vocab_size, device=facts.device) for _ in texts]
        sizes: list[tuple[int, int]] = []
        for text, count in zip(texts, new, strict=True):
            sizes.append((count, 0 if self.pads else text.new_from))
        for count, numbers in batches(sizes, self.batch):
            group = [texts[number] for number in numbers]
            room = max(text.new_from for text in group) + count
            step = self.start([text.ids for text in group], room)
            if step is None:
                return []
            steps = [step([text.prompt for text in group])]
            for place in range(count - 1):
                likeliest = self.likeliest(steps[-1])
                pieces: list[list[int]] = []
                for text, token in zip(group, likeliest, strict=True):
                    pieces.append(text.written[place : place + 1] or [token])
                steps.append(step(pieces))
            rows = torch.stack(steps, dim=1)  # (B, new, V)
            for number, row in zip(numbers, rows, strict=True):
                logits[number] = row
        return logits

    def likeliest(self, logits: Float[Tensor, "rows vocab"]) -> list[int]:
        """Return the token with the largest of each row of logits."""
        return logits[:, : self.used].argmax(-1).tolist()

    def write(
        self, prompts: list[list[int]], most: int, ends: Sequence[int]
    ) -> list[tuple[Text, Float[Tensor, "new vocab"]]]:
        """Continue the prompts greedily, up to their end or the context's; nothing if there is no cache.

        Returns:
            Each prompt with what is written after it, and the logits of that.
        """
        new = [min(most, self.facts.shape.n_positions - len(prompt)) for prompt in prompts]
        texts: list[tuple[Text, Tensor]] = []
        decoded = self.decode([Text.whole(prompt) for prompt in prompts], new)
        for prompt, logits in zip(prompts, decoded, strict=bool(decoded)):
            written = self.likeliest(logits)
            for place, token in enumerate(written):
                if token in ends:
                    del written[place + 1 :]
                    break
            texts.append((Text.whole(prompt + written, len(prompt)), logits[: len(written)].clone()))
        return texts

    def gradients(self, texts: Sequence[list[int]]) -> dict[str, Tensor] | None:
        """Return the gradient of the loss of texts, by Parameter."""
        return None

    def window_losses(self, ids: list[int]) -> list[Scored] | None:
        """Return tokens and loss of each window of a long text."""
        return None


def batches(sizes: list[tuple[int, int]], most: int = BATCH) -> Iterator[tuple[int, list[int]]]:
    """Group texts that are written together: how many tokens, above 0, and the numbers of the texts.

    Args:
        sizes: of each text the number of its new tokens, and that of its prompt where a model may not read padding.
        most: texts together.
    """
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, size in enumerate(sizes):
        alike[size].append(number)
    for (new, _), numbers in sorted(alike.items()):
        if new == 0:
            continue
        for start in range(0, len(numbers), most):
            yield new, numbers[start : start + most]


class FunctionRunner(Runner):
    """A function from ids (B, T) to logits (B, T, V), or to an object with ``logits``."""

    def __init__(
        self, call: Callable[[Tensor], Any], facts: CheckpointFacts, naming: Naming = contextlib.nullcontext
    ) -> None:
        super().__init__(facts)
        self.call, self.naming = call, naming

    def read(self, texts: Iterable[Text], *, places: bool = True) -> Iterator[Reading]:
        for text in texts:
            ids = as_batch(text.ids, self.facts.device)
            yield Reading(self(ids)[0, text.compared])

    def __call__(self, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits (B, T, V) of a batch without padding.

        Raises:
            ConfigError: if what the function returns is not logits of these ids.
        """
        with self.naming():
            returned = self.call(input_ids)
        logits = require_logits(returned, (*input_ids.shape, self.facts.shape.vocab_size))
        return logits.to(self.facts.device)


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
            f"must return logits of shape {shape} and a floating dtype, got {described}"
            f"{shape_advice(tuple(logits.shape), shape)}",
            argument="candidate",
        )
    return logits


def shape_advice(actual: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return what to do about a wrong shape, to be put behind the sentence on it; "" if that is not known."""
    *batch, _, width = expected
    if actual == (1, *expected):
        return "; leave the batch axis out, as x[0] does"
    if actual == expected[1:]:
        return "; add the batch axis, as x[None] does"
    if actual in ((*batch, width), (*batch, 1, width)):
        return "; these are of one position, and all positions are compared"
    if actual[:-1] == expected[:-1] and actual[-1] > width:
        return f"; a padded vocabulary must be cut to the first {width:,} columns, as x[..., :{width}] does"
    return ""


class ModuleRunner(FunctionRunner):
    """Anybody's module; its norms, blocks and Parameters are those whose names end as the original's do.

    Attributes:
        model: the module.
        prefix: what their names begin with; None if it does not have all of the original's.
        together: whether several texts are read in one call: a model of another architecture that a recipe has opened,
            or one whose weights are brought for each call.
    """

    def __init__(self, module: nn.Module, facts: CheckpointFacts, naming: Naming = contextlib.nullcontext) -> None:
        super().__init__(module, facts, naming)
        self.model: Any = module
        self.prefix = prefix_of(module, facts.places)
        self.together = any(map(is_offloaded, module.modules()))
        self.apart = reads_apart(module)

    @property
    def root(self) -> nn.Module:
        """The module that has the sites, if ``prefix`` is not None."""
        return self.model.get_submodule((self.prefix or "").rstrip("."))

    def read(self, texts: Iterable[Text], *, places: bool = True) -> Iterator[Reading]:
        kept = [] if self.prefix is None or not places else self.facts.places
        groups = ([text] for text in texts)
        if self.together and not self.apart:
            groups = groups_of(texts, self.facts.shape.vocab_size)
        for group in groups:
            yield from self._read_group(group, kept)

    def _read_group(self, group: list[Text], places: Sequence[str]) -> Iterator[Reading]:
        """Yield what is computed of texts that are read together.

        Where a place has no row for each token, as norms of compressed keys, the padding has changed its rows: the
        texts are read once more, one by one.
        """
        ids = right_padded(group, self.facts.shape.n_positions, self.facts.device)
        hooks = hooked(self.model) if places else contextlib.nullcontext()
        with hooks, recorded(self.root, places) as (all_inputs, all_outputs):
            logits = self._compared(ids, group)
        kept = [*all_outputs.values(), *all_inputs.values()]
        if len(group) > 1 and not all(has_tokens(y, ids) for y in kept):
            for text in group:
                yield from self._read_group([text], places)
            return
        if places and is_compiled(self.model):
            logits = self._compared(ids, group)
        for row, text in enumerate(group):
            length = len(text.ids)
            outputs = {place: of_text(y, row, ids, length) for place, y in all_outputs.items()}
            inputs = {place: of_text(x, row, ids, length) for place, x in all_inputs.items()}
            yield Reading(logits[row], outputs, inputs)

    def _compared(self, ids: Int[Tensor, "batch seq"], texts: Sequence[Text]) -> list[Float[Tensor, "rows vocab"]]:
        """Return the logits at the compared positions of each text of a batch."""
        logits = self(ids)
        compared: list[Tensor] = []
        for row, text in zip(logits, texts, strict=True):
            part = row[text.compared]
            compared.append(part if part.numel() == logits.numel() else part.clone())  # which lets the rest be freed
        return compared

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
        facts = self.facts
        batches = [as_batch(ids, facts.device) for ids in texts]
        with self.naming():
            return gradients_of(self.model, batches, facts.embedding, self.prefix)

    def start(self, texts: list[list[int]], room: int) -> Step | None:
        """Begin texts with the cache that a model of transformers makes; one that makes none reads all ids again."""
        accepted = arguments_of(self.model)
        if not accepted:
            return None
        cache_names = [name for name in CACHE_NAMES if name in accepted]
        cache: dict[str, Any] = {}
        read_before: list[Tensor] = []
        mask = torch.ones(len(texts), 0, dtype=torch.long, device=self.facts.device)

        def step(pieces: list[list[int]]) -> Tensor:
            nonlocal mask
            ids, is_token = left_padded(pieces, self.facts.device)
            mask = torch.cat([mask, is_token], dim=1)  # (B, all)
            if not cache:
                read_before.append(ids)
                ids = torch.cat(read_before, dim=1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)  # (B, all)
            options: dict[str, Any] = dict(position_ids=positions[:, -ids.shape[1] :], logits_to_keep=1)
            if not mask.all():  # recurrent models take a mask of all ids for one of the new ids
                options["attention_mask"] = mask
            known = {option: value for option, value in options.items() if option in accepted}
            with self.naming(), hooked(self.model):
                output = self.model(ids, use_cache=bool(cache_names), **cache, **known)
            for name in cache_names:
                if getattr(output, name, None) is not None:
                    cache[name] = output[name]
            return output.logits[:, -1]

        return step

    def window_losses(self, ids: list[int]) -> list[Scored] | None:
        if not (isinstance(self.model, GPT2) or arguments_of(self.model)):
            return None
        with self.naming():
            return window_losses(self.model, ids)


def arguments_of(model: Any) -> Collection[str]:
    """Return what a model of transformers takes, compiled or with adapters of PEFT too; nothing for any other model."""
    transformers = sys.modules.get("transformers")  # it need not be installed for another model
    if transformers is None or not isinstance(getattr(model, "config", None), transformers.PretrainedConfig):
        return ()
    inner: Any = unwrapped(model)
    if hasattr(inner, "get_base_model"):  # of PEFT
        inner = inner.get_base_model()
    return inspect.signature(inner.forward).parameters


class OurRunner(ModuleRunner):
    """A ``minigpt.GPT2``, which reads and writes as ``generate`` does."""

    pads = True

    def __init__(self, model: GPT2, facts: CheckpointFacts, naming: Naming = contextlib.nullcontext) -> None:
        super().__init__(model, facts, naming)
        self.used = model.config.used_vocab_size

    def _compared(self, ids: Int[Tensor, "batch seq"], texts: Sequence[Text]) -> list[Float[Tensor, "rows vocab"]]:
        if self.together:
            return super()._compared(ids, texts)
        (text,) = texts
        with self.naming():
            hidden = self.model.hidden_states(ids)  # (1, T, C)
            return [self.model.head(hidden[:, text.compared])[0]]

    def gradients(self, texts: Sequence[list[int]]) -> dict[str, Tensor] | None:
        if self.model.quantize is not None:
            return None
        return super().gradients(texts)

    def start(self, texts: list[list[int]], room: int) -> Step:
        reader = Reader(self.model, len(texts), room)

        def step(pieces: list[list[int]]) -> Tensor:
            with self.naming(), hooked(self.model):
                return reader.read(dict(enumerate(pieces)))

        return step


def reads_apart(model: nn.Module) -> bool:
    """Return whether each text must be read alone.

    It must where padding changes a text, and where a block's output is not one row a text, as in Gemma 3n.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return False
    fields = config.to_dict()
    if "altup_num_inputs" in fields or "altup_num_inputs" in fields.get("text_config", {}):
        return True
    return not BY_LENGTH.isdisjoint(_rope_types(fields))


def _rope_types(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of rotary embeddings that a config names, of single layer types too."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif name in ("rope_type", "type") and isinstance(value, str):
            yield value


def groups_of(texts: Iterable[Text], vocab_size: int) -> Iterator[list[Text]]:
    """Yield texts in their order, as many together as there is room for, and none with much padding."""
    group: list[Text] = []
    for text in texts:
        grown = [*group, text]
        longest = max(len(member.ids) for member in grown)
        tokens = len(grown) * longest
        padding = tokens - sum(len(member.ids) for member in grown)
        is_large = tokens > MOST_TOKENS or tokens * vocab_size > MOST_LOGITS
        if group and (padding > MOST_PADDING or is_large):
            yield group
            grown = [text]
        group = grown
    if group:
        yield group


def right_padded(texts: Sequence[Text], most: int, device: torch.device) -> Int[Tensor, "batch seq"]:
    """Return the ids of texts (B, T).

    T is odd where it may be, as numbers of heads are not, so that a dimension of tokens is not taken for one of heads.

    Args:
        most: tokens that the model can read.
    """
    longest = max(len(text.ids) for text in texts)
    if len(texts) > 1:
        longest = min(longest | 1, most)
    rows = []
    for text in texts:
        rows.append(text.ids + [0] * (longest - len(text.ids)))
    return torch.tensor(rows, device=device)


def has_tokens(y: Tensor, batch: Int[Tensor, "batch seq"]) -> bool:
    """Return whether ``of_text`` finds the tokens of a text in an output."""
    return len(y) == batch.numel() or batch.shape[1] in y.shape[1:-1]


def of_text(y: Tensor, row: int, batch: Int[Tensor, "batch seq"], length: int) -> Tensor:
    """Return the part of an output that is of one text, without its padding.

    Args:
        y: (B, T, ...), or (B, heads, T, ...), or (B x T, ...).
    """
    rows, tokens = batch.shape
    if rows == 1 and y.ndim == 2:
        return y
    if len(y) != rows and len(y) == rows * tokens:
        y = y.view(rows, tokens, *y.shape[1:])
    y = y[row]
    for dimension in range(y.ndim - 1):
        if y.shape[dimension] == tokens:
            return y.narrow(dimension, 0, length)
    return y
