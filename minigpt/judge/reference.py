"""transformers' own model: it reads texts, writes after prompts, and shows what its norms and blocks compute.

B batch, T tokens, V vocabulary, C embedding.
"""

import contextlib
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt.checkpoint import Files
from minigpt.checkpoint.contents import CONFIG
from minigpt.checkpoint.offloading import compute_in
from minigpt.checkpoint.transformers_model import load_with_transformers, quiet_transformers
from minigpt.errors import CheckpointError, MiniGPTError, NormError, listing, raised
from minigpt.garbage import uncollected
from minigpt.host import host_of, uncompiled, unwrapped
from minigpt.inputs import left_padded
from minigpt.judge.checkpoint_facts import CheckpointFacts
from minigpt.judge.gradients import gradients_of
from minigpt.judge.perplexity import window_losses
from minigpt.judge.reading import Reading, Recorder, Runner, Sample, Scored, as_batch, only_text
from minigpt.judge.together import read_together, reads_apart
from minigpt.precision import HALVES, Float64, dtype_name, full_products
from minigpt.shape import Shape

CACHE_NAMES = ("past_key_values", "cache")  # of a forward's argument, in older and newer transformers
IN_MEMORY = 2**63  # bytes that a model may take whose size has been looked at before
BATCH = 8  # prompts written at once: a step costs hardly more for 8 rows than for one


@contextlib.contextmanager
def judging() -> Iterator[None]:
    """Compute without gradients, with ``full_products``, and make tensors that may have gradients later."""
    with full_products(), torch.inference_mode(False), torch.no_grad():
        yield


def fill_in(norm: nn.LayerNorm, dtype: torch.dtype, device: torch.device) -> None:
    """Give a norm that was folded away a scale of 1 and a shift of 0 where it has none, as transformers does."""
    for role, parameter in list(norm.named_parameters()):
        if parameter.is_meta:
            number = 1.0 if role == "weight" else 0.0
            value = torch.full(parameter.shape, number, dtype=dtype, device=device)
            norm.register_parameter(role, nn.Parameter(value, requires_grad=False))


def gpt2_of(
    place: Path,
    attention: str,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    tensors: dict[str, Tensor] | None = None,
) -> nn.Module:
    """Return transformers' GPT-2 with the weights of a checkpoint, rounded to ``dtype``, which computes in ``compute``.

    It takes the checkpoint's tensors under their own names, so that a fault in our loading shows.

    Args:
        tensors: by their names in the files, if they have been read. They are taken out of this dict.
    """
    with uncollected():
        from transformers import AutoModelForCausalLM, GPT2Config  # imported here, since it takes seconds

    files = Files.at(place)
    if tensors is None:
        tensors = files.tensors()[0]
    config = GPT2Config.from_json_file(files.folder / CONFIG)
    if compute == torch.float64:
        config.reorder_and_upcast_attn = False  # it would compute the scores in float32
    config.return_dict = True
    config.output_hidden_states = False
    config.output_attentions = False
    # Shapes only: the values come from the file. transformers imports the architecture's code here.
    with uncollected(), quiet_transformers(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in list(tensors):
        tensor = tensors.pop(name)
        path = name if name in known else f"transformer.{name}"
        if path not in known:
            continue  # a causal mask, which older files hold
        value = tensor.to(dtype).to(device, compute)
        owner, _, role = path.rpartition(".")
        parameter = nn.Parameter(value, requires_grad=False)
        model.get_submodule(owner).register_parameter(role, parameter)
    for norm in model.modules():
        if isinstance(norm, nn.LayerNorm):
            fill_in(norm, compute, device)
    model.tie_weights()
    unset = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unset:
        raise CheckpointError(f"{place} has no {listing(unset)}, so transformers cannot read it")
    return model.eval()


def other_model(
    place: Path,
    attention: str,
    dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    offload: bool = False,
) -> nn.Module:
    """Return a model of another architecture, rounded to ``dtype``, which computes in ``compute``.

    At ``dtype`` it is what ``from_pretrained`` gives, and nothing is cast: that keeps some tables in float32, such as
    rotary frequencies and routers. In float64 it holds the same values. In another dtype the tables stay too.

    Args:
        offload: whether the weights stay in their files; it may be a GPT-2 then too.
    """
    keeps_more = dtype not in HALVES and compute in HALVES  # then the file's weights are rounded once, here too
    model: Any = load_with_transformers(
        place,
        attention=attention,
        dtype=compute if keeps_more else dtype,
        device=device,
        memory=0 if offload else IN_MEMORY,
    )
    if compute == dtype or keeps_more:
        return model
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    if compute == torch.float64:
        compute_in(model, compute)
        return model
    for tensor in tensors_of(model).values():
        if tensor.dtype == dtype:
            tensor.data = tensor.data.to(compute)
    return model


class Reference(Runner):
    """transformers' model with the weights of a checkpoint, rounded to ``dtype``, which computes in ``compute``.

    Args:
        tensors: of a GPT-2, by their names in the files, if they have been read. They are taken out of this dict.
        offload: whether the weights stay in their files. A GPT-2 is read as any other architecture then.
    """

    def __init__(
        self,
        place: Path,
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
        compute: torch.dtype | None = None,
        tensors: dict[str, Tensor] | None = None,
        offload: bool = False,
    ) -> None:
        if compute is None:
            compute = dtype
        self.is_gpt2 = Files.at(place).architecture is None and not offload
        self.model: Any
        if self.is_gpt2:
            self.model = gpt2_of(place, attention, dtype, compute, device, tensors)
        else:
            self.model = other_model(place, attention, dtype, compute, device, offload)
        self.device = device
        self.host = host_of(self.model)
        self.is_exact = compute == torch.float64
        self.shape = Shape.of(self.model.config)

    @classmethod
    def of(
        cls, facts: CheckpointFacts, compute: torch.dtype | None = None, tensors: dict[str, Tensor] | None = None
    ) -> "Reference":
        """Return transformers' model of a checkpoint.

        In float64 it has the other implementation of attention, so that float64 has a noise floor too.
        """
        attention = facts.attention
        if compute == torch.float64:
            attention = "eager" if attention == "sdpa" else "sdpa"
        return cls(facts.place, attention, facts.dtype, facts.device, compute, tensors, facts.offload)

    def logits(self, sample: Sample) -> Float[Tensor, "seq vocab"]:
        batch = as_batch(sample.ids, self.device)
        logits = self(batch)[0, sample.compared]
        if len(logits) == len(sample.ids):
            return logits
        return logits.clone()  # which frees the others

    def read(self, sample: Sample) -> Reading:
        with Recorder(self.host.root, self._places()) as recorder:
            logits = self.logits(sample)
        inputs: dict[str, Tensor] = {}
        for site in self.host.sites:
            if site in recorder.inputs:
                inputs[site] = only_text(recorder.inputs[site])
        outputs = {place: only_text(y) for place, y in recorder.outputs.items()}
        return Reading(logits, outputs, inputs)

    def _places(self) -> list[str]:
        """Return the sites and the blocks."""
        return [*self.host.sites, *self.host.blocks]

    def read_all(self, samples: Iterable[Sample]) -> Iterator[Reading]:
        if self.is_gpt2 or reads_apart(self.model):
            yield from super().read_all(samples)
            return
        yield from self._read_together(samples, self._places())

    def logits_of_all(self, samples: Iterable[Sample]) -> Iterator[Reading]:
        if self.is_gpt2 or reads_apart(self.model):
            yield from super().logits_of_all(samples)
            return
        yield from self._read_together(samples, [])

    def _read_together(self, samples: Iterable[Sample], places: Sequence[str]) -> Iterator[Reading]:
        shape = self.shape
        return read_together(self, self.host.root, places, samples, shape.vocab_size, shape.n_positions, self.device)

    def gradients(self, texts: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return the gradient of the loss of texts, by Parameter.

        Raises:
            MiniGPTError: if transformers' model has none.
        """
        host = self.host
        batches = [as_batch(ids, self.device) for ids in texts]
        try:
            with self.exactly():
                return gradients_of(host.model, batches, host.embedding, host.prefix)
        except NormError as error:
            name = type(host.model).__name__
            raise MiniGPTError(f"{name} of transformers has no gradients to compare with: {error.message}") from error

    def window_losses(self, ids: list[int]) -> list[Scored]:
        with self._explaining():
            return window_losses(self.model, ids)

    @contextlib.contextmanager
    def computing_in(self, compute: torch.dtype) -> Iterator["Reference"]:
        """Have the values of a GPT-2 in another dtype in the block."""
        values = {parameter: parameter.data for parameter in self.model.parameters()}
        try:
            for parameter, value in values.items():
                parameter.data = value.to(compute)
            yield self
        finally:
            for parameter, value in values.items():
                parameter.data = value

    def kept(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the dtypes of Parameters and buffers that transformers keeps in another one than ``dtype``."""
        kept = {}
        for name, tensor in tensors_of(self.model).items():
            if tensor.is_floating_point() and tensor.dtype != dtype:
                kept[name.removeprefix(self.host.prefix)] = dtype_name(tensor.dtype)
        return kept

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Compute in float64 in the block, whatever dtype transformers' code names, if the model is in float64."""
        before = torch.get_default_dtype()
        if self.is_exact:
            torch.set_default_dtype(torch.float64)
        try:
            with Float64() if self.is_exact else contextlib.nullcontext():
                yield
        finally:
            torch.set_default_dtype(before)

    def __call__(self, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return logits (B, T, V) of a batch without padding."""
        with self.exactly(), self._explaining():
            return self.model(input_ids, use_cache=False).logits

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say in one sentence that transformers' model cannot read a text."""
        try:
            yield
        except MiniGPTError:  # as of a file that changes meanwhile
            raise
        except raised() as error:
            reason = " ".join(str(error).split())
            if "meta tensor" in reason:  # accelerate brings a module's weights for its own call alone
                reason = "a weight is used outside of its module, so it is not read block by block; give more memory"
            name = type(self.model).__name__
            raise MiniGPTError(f"{name} of transformers cannot read a text: {reason}") from error

    def write(
        self, prompts: list[list[int]], most: int, ends: Sequence[int]
    ) -> tuple[list[Sample], list[Float[Tensor, "new vocab"]]]:
        """Continue the prompts greedily, up to their end or the context's; return the logits of what is written too."""
        samples: list[Sample] = []
        logits: list[Tensor] = []
        sizes: list[tuple[int, int]] = []
        for prompt in prompts:
            samples.append(Sample.whole(prompt))
            logits.append(torch.empty(0, self.shape.vocab_size, device=self.device))
            new = min(most, self.shape.n_positions - len(prompt))
            sizes.append((new, 0 if self.is_gpt2 else len(prompt)))
        for new, batch in batches(sizes):
            with self._explaining():
                rows = self._write_batch([prompts[i] for i in batch], new)
            for row, i in zip(rows, batch, strict=True):
                prompt = prompts[i]
                written = until_end(row.argmax(-1).tolist(), ends)
                samples[i] = Sample.whole(prompt + written, len(prompt))
                logits[i] = row[: len(written)].clone()
        return samples, logits

    def _write_batch(self, prompts: list[list[int]], new: int) -> Float[Tensor, "batch new vocab"]:
        """Continue the prompts greedily by ``new`` tokens, and return the logits that predict them."""
        ids, mask = left_padded(prompts, self.device)  # both (B, T)
        read = cached_reader(self.model)
        steps: list[Tensor] = []
        for _ in range(new):
            logits = read(ids, mask)  # (B, V)
            steps.append(logits)
            ids = logits.argmax(-1, keepdim=True)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        return torch.stack(steps, dim=1)  # (B, new, V)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the Parameters and buffers of a model, by the names that they have without ``torch.compile``."""
    tensors = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        tensors[uncompiled(name)] = tensor
    return tensors


def arguments_of(model: Any) -> Collection[str]:
    """Return what a model of transformers takes, compiled or with adapters of PEFT too; nothing for any other model."""
    from transformers import PretrainedConfig

    if not isinstance(getattr(model, "config", None), PretrainedConfig):
        return ()
    inner: Any = unwrapped(model)
    if hasattr(inner, "get_base_model"):  # of PEFT
        inner = inner.get_base_model()
    return inspect.signature(inner.forward).parameters


def cached_reader(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of more ids (B, T) and the mask (B, all) of all so far, that reads them with a model's cache.

    The function returns logits (B, V). The model is one of transformers, and makes its own kind of cache. One that
    makes none reads all ids again.
    """
    accepted = arguments_of(model)
    cache_names = [name for name in CACHE_NAMES if name in accepted]
    cache: dict[str, Any] = {}
    read_before: list[Tensor] = []

    def read(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if not cache:
            read_before.append(input_ids)
            input_ids = torch.cat(read_before, dim=-1)
        new = input_ids.shape[1]
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # (B, all)
        options: dict[str, Any] = dict(position_ids=positions[:, -new:], logits_to_keep=1)
        if not attention_mask.all():  # recurrent models take a mask of all ids for one of the new ids
            options["attention_mask"] = attention_mask
        known = {option: value for option, value in options.items() if option in accepted}
        output = model(input_ids, use_cache=bool(cache_names), **cache, **known)
        for name in cache_names:
            if getattr(output, name, None) is not None:
                cache[name] = output[name]
        return output.logits[:, -1]

    return read


def batches(sizes: list[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Group texts that are written together: how many tokens, above 0, and the numbers of up to 8 texts.

    Args:
        sizes: of each text the number of its new tokens, and that of its prompt where a model may not read padding.
    """
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, size in enumerate(sizes):
        alike[size].append(number)
    for (new, _), numbers in sorted(alike.items()):
        if new == 0:
            continue
        for start in range(0, len(numbers), BATCH):
            yield new, numbers[start : start + BATCH]


def until_end(new: list[int], ends: Sequence[int]) -> list[int]:
    """Return the new tokens of a row up to the first that ends it."""
    for i, token in enumerate(new):
        if token in ends:
            return new[: i + 1]
    return new
